"""Whole models, unmodified: certified in traced form, exact, and each gradient held as expected."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import check, kinds
from torch import Tensor, nn

from zoo.hugging_face import BATCH, VOCABULARY, convnext, deberta, roused, swin, t5
from zoo.small import Recommender
from zoo.tasks import classifier_loss, pictures, sentences, words
from zoo.vision import Mixer, depthwise

Loss = Callable[[Any], Tensor]
Kinds = dict[str, str]
"""From a pattern of parameter names to the kind of factor; the first pattern that fits counts."""


# --- Hugging Face models ------------------------------------------------------------------------


def translation_loss(model: nn.Module) -> Loss:
    def loss(batch: dict[str, Tensor]) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "answers"}
        logits = model(**inputs).logits
        return F.cross_entropy(logits.mT, batch["answers"], reduction="none").sum(1)

    return loss


def translations() -> dict[str, Tensor]:
    answers = torch.randint(VOCABULARY, (BATCH, 4))
    return {**words(), "decoder_input_ids": answers.roll(1, 1), "answers": answers}


# --- models written here ------------------------------------------------------------------------


def label_loss(model: nn.Module) -> Loss:
    def loss(batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["pixel_values"]), batch["labels"], reduction="none")

    return loss


def click_loss(model: nn.Module) -> Loss:
    def loss(batch: tuple[Tensor, ...]) -> Tensor:
        *inputs, clicks = batch
        return F.binary_cross_entropy_with_logits(model(*inputs), clicks, reduction="none")

    return loss


def clicks() -> tuple[Tensor, ...]:
    categories = torch.stack([torch.randint(n, (BATCH,)) for n in (11, 7, 30)], 1)
    return torch.randn(BATCH, 6), categories, torch.randint(2, (BATCH,)).float()


# --- what is held -------------------------------------------------------------------------------

SMALL_ONES = {"*bias": "Dense", "*norm*": "Dense"}
WORDS_AND_LAYERS = {"*word_embeddings.weight": "OneHot", "*.weight": "Outer"}
T5 = {"*relative_attention_bias.weight": "OneHot", "*norm.weight": "Dense"}
# A convolution is written out where that is cheaper: over many pixels, or channel by channel.
COARSE = {"5.body.0.weight": "Outer", "5.body.7.weight": "Outer", "8.weight": "Outer"}

Made = tuple[Callable[[], nn.Module], Callable[[nn.Module], Loss], Callable[[], Any], Kinds]

MODELS: dict[str, Made] = {
    "T5": (
        lambda: t5(tied=True),
        translation_loss,
        translations,
        {"shared.weight": "OneHot, Outer", **T5, "*.weight": "Outer"},
    ),
    "T5, untied and gated": (
        lambda: t5(tied=False, gated=True),
        translation_loss,
        translations,
        {"shared.weight": "OneHot", **T5, "*.weight": "Outer"},
    ),
    "DeBERTa-v2": (
        lambda: deberta(share_att_key=True),
        classifier_loss,
        sentences,
        {"*rel_embeddings.weight": "Dense", **SMALL_ONES, **WORDS_AND_LAYERS},
    ),
    "DeBERTa-v2, projections and a convolution of their own": (
        lambda: deberta(share_att_key=False, conv_kernel_size=3),
        classifier_loss,
        sentences,
        {"*rel_embeddings.weight": "Dense", **SMALL_ONES, **WORDS_AND_LAYERS},
    ),
    "Swin": (
        swin,
        classifier_loss,
        pictures,
        {
            "*relative_position_bias_table": "OneHot",
            **SMALL_ONES,
            "*projection.weight": "Dense",
            "*.weight": "Outer",
        },
    ),
    "ConvNeXt": (
        convnext,
        classifier_loss,
        pictures,
        {
            **SMALL_ONES,
            "*layer_scale_parameter": "Dense",
            "*dwconv.weight": "Dense",
            "*patch_embeddings.weight": "Dense",
            "*downsampling_layer.0.weight": "Dense",
            "*.weight": "Outer",
        },
    ),
    "MobileNet": (
        lambda: depthwise(nn.ReLU6, se=False),
        label_loss,
        pictures,
        {**COARSE, "*": "Dense"},
    ),
    "EfficientNet": (
        lambda: depthwise(nn.SiLU, se=True),
        label_loss,
        pictures,
        {**COARSE, "*squeeze.weight": "Outer", "*excite.weight": "Outer", "*": "Dense"},
    ),
    "MLP-Mixer": (
        Mixer,
        label_loss,
        pictures,
        {**SMALL_ONES, "*.weight": "Outer"},
    ),
    "DLRM": (
        Recommender,
        click_loss,
        clicks,
        {"tables.*": "OneHot", **SMALL_ONES, "*.weight": "Outer"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_exact_and_held_as_expected(name: str) -> None:
    build, loss, batch, expected = MODELS[name]
    model = roused(build()).train()
    gradients = check(loss(model), model, batch())
    found = kinds(gradients)
    wanted = {
        key: next(kind for pattern, kind in expected.items() if fnmatch(key, pattern))
        for key in (key.lower() for key in found)
    }
    assert {key.lower(): kind for key, kind in found.items()} == wanted
    for key, gradient in gradients.held_gradients.items():
        if "Dense" in found[key]:
            assert gradient.form == "materialised"
