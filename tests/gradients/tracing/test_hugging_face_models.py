"""Hugging Face models as they come: certified in traced form and exact, record by record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import Expected, agree, check, expected, private, size_of, stacked
from torch import Tensor, nn

from hushgrad.gradients import Certificate, certificate_for, per_sample, traced
from zoo.hugging_face import (
    LENGTH,
    Loss,
    bert,
    blank_filling_bert,
    distilbert,
    gpt2,
    llama,
    roberta,
    roused,
    vit,
)
from zoo.tasks import (
    blanks,
    causal_loss,
    classifier_loss,
    masked_loss,
    pictures,
    placed,
    sentences,
    words,
)

Made = tuple[Callable[..., nn.Module], Callable[[nn.Module], Loss], Callable[[], Any]]

MODELS: dict[str, Made] = {
    "BERT": (bert, classifier_loss, sentences),
    "BERT, tied decoder": (blank_filling_bert, masked_loss, blanks),
    "RoBERTa": (roberta, classifier_loss, sentences),
    "DistilBERT": (distilbert, classifier_loss, sentences),
    "GPT-2": (gpt2, causal_loss, words),
    "GPT-2, position ids": (gpt2, causal_loss, placed),
    "Llama": (llama, causal_loss, words),
    "ViT": (vit, classifier_loss, pictures),
}


def make(name: str, **options: Any) -> tuple[nn.Module, Loss, Any]:
    build, loss, batch = MODELS[name]
    model = roused(build(**options)).train()
    return model, loss(model), batch()


def tied(model: nn.Module) -> bool:
    """Are input and output words one parameter?"""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("name", MODELS)
def test_an_unmodified_model_is_exact(name: str) -> None:
    model, loss, batch = make(name)
    check(loss, model, batch)


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama"])
def test_eager_attention_is_exact(name: str) -> None:
    model, loss, batch = make(name, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    check(loss, model, batch)


@pytest.mark.parametrize("name", ["BERT, tied decoder", "GPT-2", "Llama"])
def test_tied_words_have_one_gradient_of_two_uses(name: str) -> None:
    model, loss, batch = make(name)
    assert tied(model)
    (table,) = [n for n, p in private(model).items() if p is model.get_input_embeddings().weight]
    sites = certificate_for(loss, private(model), batch, form=traced, modules=(model,)).sites
    assert [site.operation for site in sites if table in site.parameters] == ["embedding", "linear"]


@pytest.mark.parametrize("name", ["BERT", "GPT-2"])
def test_another_length_is_exact(name: str) -> None:
    """Of 8 positions too, which is also what the batch is padded to."""
    model, loss, batch = make(name)
    for length in (LENGTH, 8, 9, LENGTH):
        check(loss, model, {**batch, **words(length)})


# --- dropout ------------------------------------------------------------------------------------


def expected_of_pass(
    certificate: Certificate, loss: Loss, params: dict[str, nn.Parameter], batch: Any, seed: int
) -> Any:
    """What autograd says of each record in one pass over all rows, drawn from `seed`."""
    torch.manual_seed(seed)
    slots = certificate.slots(size_of(batch))
    losses = slots.of_records(loss(slots.fill(batch)))
    gradients = [
        torch.autograd.grad(value, [*params.values()], retain_graph=True, allow_unused=True)
        for value in losses
    ]
    return Expected(losses.detach().double(), stacked(params, gradients))


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("BERT", "sdpa"),
        ("GPT-2", "eager"),
        pytest.param("BERT", "eager", marks=pytest.mark.slow),
        pytest.param("GPT-2", "sdpa", marks=pytest.mark.slow),
    ],
)
def test_dropout_is_certified_and_exact_for_the_masks_drawn(name: str, attention: str) -> None:
    model, loss, batch = make(name, dropout=0.3, attn_implementation=attention)
    params = private(model)
    certificate = certificate_for(loss, params, batch, modules=(model,))
    assert certificate.form is traced
    for seed in (1, 2):
        want = expected_of_pass(certificate, loss, params, batch, seed)
        torch.manual_seed(seed)
        gradients = per_sample(loss, params, batch, form=traced, modules=(model,))
        agree(gradients, want, params)


# --- types --------------------------------------------------------------------------------------


def test_autocast_is_exact_to_its_precision() -> None:
    model, loss, batch = make("BERT")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(loss, model, batch)


@pytest.mark.parametrize("name", ["GPT-2", "ViT"])
def test_float64_is_exact(name: str) -> None:
    model, _, batch = make(name)
    model.double()
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].double()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        labels = batch.get("labels", batch["input_ids"][:, -1] if "input_ids" in batch else None)
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = model(**inputs).logits
        return F.cross_entropy(
            logits if logits.dim() == 2 else logits[:, -2], labels, reduction="none"
        )

    check(loss, model, batch)


@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_bfloat16_is_exact_to_its_precision(name: str) -> None:
    model, loss, batch = make(name)
    check(loss, model.bfloat16(), batch)


# --- activation checkpointing -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [
        ("BERT", True),
        ("GPT-2", False),
        pytest.param("BERT", False, marks=pytest.mark.slow),
        pytest.param("GPT-2", True, marks=pytest.mark.slow),
    ],
)
def test_activation_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    model, loss, batch = make(name, layers=2)
    params, want = private(model), expected(loss, private(model), batch)
    ran = []
    model.base_model.register_forward_hook(lambda *_: ran.append(1))
    first = model.base_model.h[0] if name == "GPT-2" else model.base_model.encoder.layer[0]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    first.register_forward_pre_hook(lambda *_: ran.append(0))
    for _ in range(4):
        ran.clear()
        gradients = per_sample(loss, params, batch, form=traced, modules=(model,))
        agree(gradients, want, params)
    assert (ran.count(1), ran.count(0)) == (1, 2), "the block was not run again"


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_dropout_draws_its_masks_once(reentrant: bool) -> None:
    model, loss, batch = make("GPT-2", layers=2, dropout=0.3)
    params = private(model)
    certificate = certificate_for(loss, params, batch, modules=(model,))
    want = expected_of_pass(certificate, loss, params, batch, seed=1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    torch.manual_seed(1)
    agree(per_sample(loss, params, batch, form=traced, modules=(model,)), want, params)


# --- frozen layers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("BERT", ("encoder.layer.1.", "pooler.", "classifier.")),
        ("GPT-2", ("transformer.h.1.", "transformer.ln_f.")),
        ("ViT", ("layers.1.", "layernorm.", "classifier.")),
    ],
)
def test_nothing_is_recorded_for_frozen_layers(name: str, trained: tuple[str, ...]) -> None:
    model, loss, batch = make(name, layers=2)
    for key, p in model.named_parameters():
        p.requires_grad_(any(part in key for part in trained))
    params = private(model)
    assert all(any(part in key for key in params) for part in trained)
    sites = certificate_for(loss, params, batch, form=traced, modules=(model,)).sites
    assert {key for site in sites for key in site.parameters} == params.keys()
    assert {site.operation for site in sites} <= {"linear", "layer_norm", "addmm"}
    gradients = check(loss, model, batch)
    assert gradients.factors.keys() == params.keys()
    uses = sum(len(site.parameters) for site in sites)
    assert sum(len(uses) for uses in gradients.factors.values()) == uses
