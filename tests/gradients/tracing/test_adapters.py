"""Adapters on frozen Hugging Face models are exact, also in float32 on bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import TOLERANCE, Forms, agree, assert_held, check, expected, private
from rich.console import Console
from torch import nn

from hushgrad import doctor
from hushgrad.gradients import auto, per_sample, traced
from zoo.hugging_face import Loss, bert, qwen2, roused, vit
from zoo.tasks import causal_loss, classifier_loss, pictures, sentences, words

peft = pytest.importorskip("peft")

QV = ["q_proj", "v_proj"]
LORA: Forms = {"*.lora_?.*": "Gram"}

ADAPTERS: dict[str, tuple[Callable[[], nn.Module], Any, Forms]] = {
    "LoRA on Qwen2": (qwen2, peft.LoraConfig(r=2, target_modules=QV), LORA),
    "LoRA on all of Qwen2": (
        qwen2,
        peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
        LORA,
    ),
    "LoRA on Qwen2's words": (
        qwen2,
        peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
        {"*.lora_embedding_a.*": "materialised", "*.lora_embedding_b.*": "Gram", **LORA},
    ),
    "LoRA on ViT": (
        vit,
        peft.LoraConfig(r=2, target_modules=QV, modules_to_save=["classifier"]),
        {**LORA, "*.bias": "materialised", "*.classifier.*.weight": "Gram"},
    ),
    "LoRA on BERT": (
        bert,
        peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"),
        {**LORA, "*.bias": "materialised", "*.classifier.*.weight": "Gram"},
    ),
    "DoRA on Qwen2": (
        qwen2,
        peft.LoraConfig(r=2, target_modules=QV, use_dora=True),
        {"*.lora_magnitude_vector.*": "materialised", **LORA},
    ),
    "IA3 on Qwen2": (
        qwen2,
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        {"*.ia3_l.*": "materialised"},
    ),
    "VeRA on Qwen2": (
        qwen2,
        peft.VeraConfig(r=2, target_modules=["q_proj"]),
        {"*.vera_lambda_*": "materialised"},
    ),
    "a prefix for Qwen2": (
        qwen2,
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        {"prompt_encoder.*.weight": "Gram"},
    ),
}

DATA: dict[Any, tuple[Callable[[nn.Module], Loss], Callable[[], Any]]] = {
    qwen2: (causal_loss, words),
    vit: (classifier_loss, pictures),
    bert: (classifier_loss, sentences),
}


def adapted(name: str) -> tuple[nn.Module, Loss, Any]:
    build, config, _ = ADAPTERS[name]
    loss, batch = DATA[build]
    model = roused(peft.get_peft_model(build(), config)).train()
    return model, loss(model), batch()


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_on_a_frozen_model_is_exact(name: str) -> None:
    model, loss, batch = adapted(name)
    assert 0 < len(private(model)) < len(list(model.parameters()))
    gradients = check(loss, model, batch)
    assert_held(gradients, model, ADAPTERS[name][2])


@pytest.mark.parametrize(
    "config",
    [
        peft.LoHaConfig(r=2, target_modules=["q_proj"]),
        peft.OFTConfig(oft_block_size=4, r=0, target_modules=["q_proj"]),
    ],
    ids=["LoHa: a function of its own", "OFT: a parameter written into a tensor"],
)
def test_an_adapter_that_cannot_be_traced_is_exact_otherwise(config: Any) -> None:
    model = roused(peft.get_peft_model(qwen2(), config)).train()
    gradients = check(causal_loss(model), model, words(), form=auto)
    assert gradients.form == "loop"


def test_float32_adapters_on_a_bfloat16_model() -> None:
    model = peft.get_peft_model(qwen2().bfloat16(), peft.LoraConfig(r=2, target_modules=QV))
    roused(model).train()
    assert {p.dtype for p in private(model).values()} == {torch.float32}
    check(causal_loss(model), model, words(), tolerance=TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("tuned", ["all", "LoRA on Qwen2"])
def test_activation_checkpointing_changes_nothing(tuned: str, reentrant: bool) -> None:
    """Ahead of frozen layers it asks for a gradient of the words' embeddings, which are data."""
    model = roused(qwen2()).train()
    loss, batch = causal_loss(model), words()
    if tuned != "all":
        model, loss, batch = adapted(tuned)
    params, want = private(model), expected(loss, private(model), batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if tuned != "all":
        model.enable_input_require_grads()
    ran = []
    layer = next(m for name, m in model.named_modules() if name.endswith("layers.0"))
    layer.register_forward_pre_hook(lambda *_: ran.append(1))
    for _ in range(4):  # the fourth is not tested anew
        ran.clear()
        agree(per_sample(loss, params, batch, form=traced, modules=(model,)), want, params)
    assert len(ran) == 2, "the block was not run again"


def test_the_doctor_on_an_adapter_reads_well() -> None:
    model, loss, batch = adapted("DoRA on Qwen2")
    found = doctor(model, loss, batch)
    assert found.healthy and found.form == "traced"
    rows = {row.name.split("self_attn.")[1]: row for row in found.rows}
    assert {name: row.form for name, row in rows.items()} == {
        f"{layer}.{part}.weight": form
        for layer in QV
        for part, form in (
            ("lora_A.default", "Gram"),
            ("lora_B.default", "Gram"),
            ("lora_magnitude_vector.default", "materialised"),
        )
    }
    console = Console(width=120, record=True)
    console.print(found)
    text = console.export_text()
    assert "certified: private training will use the traced form" in text
    assert max(map(len, text.splitlines())) <= 120
