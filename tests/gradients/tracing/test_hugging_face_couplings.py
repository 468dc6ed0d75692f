"""Hugging Face models whose records meet: in attention masks, branches and contrastive losses."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import Forms, assert_held, check, pick, private, size_of
from torch import Tensor, nn

from hushgrad.gradients import auto, certificate_for, per_sample, traced
from hushgrad.types import Refused
from zoo.hugging_face import VOCABULARY, Loss, clip, qwen2, roused
from zoo.tasks import causal_loss, pairs, words

WRITTEN = {"*norm*": "materialised", "*.bias": "materialised"}
AS_FACTORS: Forms = {**WRITTEN, "*.weight": "Gram"}


def full_beside_short() -> dict[str, Tensor]:
    """Every second record is padded; the others beside each other need no mask."""
    batch = words()
    batch["attention_mask"][::2] = 1
    batch["input_ids"][::2] = torch.randint(2, VOCABULARY, batch["input_ids"][::2].shape)
    return batch


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certification takes the first records of the batch instead of drawing some."""
    certify = sys.modules["hushgrad.gradients.certification.certify"]
    monkeypatch.setattr(certify, "distinct_records", certify.own_records)


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_drops_its_mask_is_refused(dtype: torch.dtype) -> None:
    """Without padding in the batch, keys are no longer repeated for each head of queries.

    So one padded record more would move every other record's gradient, if only by rounding. Some
    processors round both kernels alike.
    """
    model = roused(qwen2()).to(dtype).train()
    loss, params, batch = causal_loss(model), private(model), full_beside_short()
    found = []
    for beside in (batch, pick(batch, [i // 2 * 2 for i in range(size_of(batch))])):
        losses = loss(beside)[::2]
        found.append([losses, *torch.autograd.grad(losses.sum(), [*params.values()])])
    moves = not all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    refused = pytest.raises(Refused, match=r"other operations beside other records.*eager")
    with refused if moves else nullcontext():
        certificate_for(loss, params, batch, form=traced, modules=(model,))


@pytest.mark.usefixtures("in_order")
def test_attention_that_keeps_its_mask_keeps_its_bits() -> None:
    model = roused(qwen2(attn_implementation="eager")).train()
    loss, params, batch = causal_loss(model), private(model), full_beside_short()
    assert certificate_for(loss, params, batch, modules=(model,)).form is traced


def test_a_coupling_behind_a_branch_is_seen() -> None:
    """A branch on the whole batch excuses no difference."""
    layer = nn.Linear(3, 1)

    def loss(x: Tensor) -> Tensor:
        h = layer(x).squeeze(1)
        if bool((x > 0).all()):
            return h.square()
        return h.square() + 1e-3 * (x > 0).float().mean() * h.detach()

    with pytest.raises(Refused, match="depends on other records"):
        per_sample(loss, private(layer), torch.randn(8, 3), form=auto, modules=(layer,))


def contrastive_loss(model: nn.Module) -> Loss:
    """Each text must know its picture among all of the batch, and each picture its text."""

    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = model(**batch).logits_per_text
        own = torch.arange(len(logits))
        losses = [F.cross_entropy(x, own, reduction="none") for x in (logits, logits.T)]
        return torch.stack(losses).mean(0)

    return loss


def pairwise_loss(model: nn.Module) -> Loss:
    """How well a text fits its own picture, whoever else is there."""

    def loss(batch: dict[str, Tensor]) -> Tensor:
        text = model.get_text_features(batch["input_ids"], batch["attention_mask"])
        picture = model.get_image_features(batch["pixel_values"])
        same = F.cosine_similarity(_pooled(text), _pooled(picture))
        return -F.logsigmoid(model.logit_scale.exp() * same)

    return loss


def _pooled(features: Any) -> Tensor:
    return features if isinstance(features, Tensor) else features.pooler_output


def test_a_contrastive_loss_mixes_the_records() -> None:
    model = roused(clip()).train()
    with pytest.raises(Refused, match=r"depends on other records.*from that record alone"):
        per_sample(contrastive_loss(model), private(model), pairs(), form=auto, modules=(model,))


def test_the_loss_that_clip_returns_is_one_number() -> None:
    model = roused(clip()).train()
    with pytest.raises(Refused, match=r"one loss for each record, .*reduction='none'"):
        per_sample(
            lambda batch: model(**batch, return_loss=True).loss,
            private(model),
            pairs(),
            form=auto,
            modules=(model,),
        )


def test_a_loss_of_each_pair_alone_is_exact() -> None:
    model = roused(clip()).train()
    gradients = check(pairwise_loss(model), model, pairs())
    assert_held(
        gradients,
        model,
        {"logit_scale": "materialised", "*class_embedding": "materialised", **AS_FACTORS},
    )
