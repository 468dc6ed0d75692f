"""Whole models, unmodified: certified in traced form, exact, and each gradient held as expected."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from compare import check, kinds
from torch import Tensor, nn

from zoo.hugging_face import ENCODER, classifier_loss, roused, sentences, words

BATCH, WORDS = 5, 29

Loss = Callable[[Any], Tensor]
Kinds = dict[str, str]
"""From a pattern of parameter names to the kind of factor; the first pattern that fits counts."""


# --- Hugging Face models ------------------------------------------------------------------------


def t5(*, tied: bool, gated: bool = False) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=12,
        d_kv=6,
        d_ff=10,
        num_layers=1,
        num_heads=2,
        relative_attention_num_buckets=6,
        relative_attention_max_distance=12,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu" if gated else "relu",
        use_cache=False,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    if not tied:
        model.lm_head.weight = nn.Parameter(torch.randn(WORDS, 12))
    return model


def translation_loss(model: nn.Module) -> Loss:
    def loss(batch: dict[str, Tensor]) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "answers"}
        logits = model(**inputs).logits
        return F.cross_entropy(logits.mT, batch["answers"], reduction="none").sum(1)

    return loss


def translations() -> dict[str, Tensor]:
    answers = torch.randint(WORDS, (BATCH, 4))
    return {**words(), "decoder_input_ids": answers.roll(1, 1), "answers": answers}


def deberta(**options: Any) -> nn.Module:
    """Relative positions are layer-normed, projected as the words are, and met only then."""
    config = transformers.DebertaV2Config(
        **ENCODER,
        num_hidden_layers=1,
        relative_attention=True,
        position_buckets=4,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
        type_vocab_size=0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )
    return transformers.DebertaV2ForSequenceClassification(config)


def swin() -> nn.Module:
    """A block with windows, one with shifted windows, and a coarser stage."""
    config = transformers.SwinConfig(
        image_size=8,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=2,
        mlp_ratio=2.0,
        num_labels=3,
        drop_path_rate=0.0,
    )
    return transformers.SwinForImageClassification(config)


def convnext() -> nn.Module:
    config = transformers.ConvNextConfig(
        patch_size=2, num_stages=2, hidden_sizes=[6, 8], depths=[1, 1], num_labels=3
    )
    return transformers.ConvNextForImageClassification(config)


def pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8), "labels": torch.randint(3, (BATCH,))}


# --- models written here ------------------------------------------------------------------------


class SqueezeExcite(nn.Module):
    """Channels weighted by what the whole picture says."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(pooled))))


class Inverted(nn.Module):
    """Widen, filter each channel by itself, narrow; as MobileNetV2 and EfficientNet do."""

    def __init__(self, width: int, expand: int, act: Callable[..., nn.Module], se: bool) -> None:
        super().__init__()
        wide = width * expand
        self.body = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False),
            nn.GroupNorm(2, wide),
            act(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.GroupNorm(2, wide),
            act(inplace=True),
            SqueezeExcite(wide) if se else nn.Identity(),
            nn.Conv2d(wide, width, 1, bias=False),
            nn.GroupNorm(2, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def depthwise(act: Callable[..., nn.Module], *, se: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(2, 4),
        act(inplace=True),
        Inverted(4, 2, act, se),
        nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4, bias=False),
        Inverted(4, 2, act, se),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


class Mixer(nn.Module):
    """Patches mixed along positions, then along channels, by layers alone."""

    def __init__(self, positions: int = 4, width: int = 6) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.along = nn.Sequential(nn.Linear(positions, 5), nn.GELU(), nn.Linear(5, positions))
        self.across = nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Linear(7, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).mT
        h = h + self.along(self.norms[0](h).mT).mT
        h = h + self.across(self.norms[1](h))
        return self.head(self.norms[2](h).mean(1))


class Recommender(nn.Module):
    """Numbers and categories embedded side by side, and every pair's inner product, as in DLRM."""

    def __init__(self, sizes: tuple[int, ...] = (11, 7, 30), width: int = 4) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows in sizes)
        self.bottom = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, width))
        vectors = 1 + len(sizes)
        self.pairs = torch.triu_indices(vectors, vectors, 1)
        self.top = nn.Sequential(nn.Linear(width + self.pairs.shape[1], 5), nn.ReLU())
        self.click = nn.Linear(5, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        rows = [table(categories[:, k]) for k, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *rows], 1)
        products = torch.bmm(vectors, vectors.mT)[:, self.pairs[0], self.pairs[1]]
        return self.click(self.top(torch.cat([dense, products], 1)))[:, 0]


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
