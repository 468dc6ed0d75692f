"""More Hugging Face models as they come: exact in traced form, each gradient held as expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import Forms, assert_held, check, private
from torch import nn

from hushgrad.types import Refused
from zoo.hugging_face import (
    TEXT,
    VISION,
    Loss,
    clip_text,
    clip_vision,
    electra,
    gemma,
    gpt_neo,
    mistral,
    opt,
    qwen2,
    qwen3,
    roused,
    transformers,
    whisper,
)
from zoo.tasks import (
    causal_loss,
    classifier_loss,
    embedding_loss,
    padded_left,
    pictures,
    placed,
    sentences,
    sounds,
    words,
)

WRITTEN = {"*norm*": "materialised", "*.bias": "materialised"}
AS_FACTORS: Forms = {**WRITTEN, "*.weight": "Gram"}
LN: Forms = {"*.ln_*": "materialised", "*.bias": "materialised", "*.weight": "Gram"}

Made = tuple[Callable[[], nn.Module], Callable[[nn.Module], Loss], Callable[[], Any], Forms]

MODELS: dict[str, Made] = {
    "Electra": (electra, classifier_loss, sentences, AS_FACTORS),
    "OPT": (opt, causal_loss, words, AS_FACTORS),
    "OPT, padded left": (opt, causal_loss, padded_left, AS_FACTORS),
    "GPT-Neo": (gpt_neo, causal_loss, words, LN),
    "GPT-Neo, padded left": (gpt_neo, causal_loss, placed, LN),
    "Qwen2": (qwen2, causal_loss, words, AS_FACTORS),
    "Qwen2, padded left": (qwen2, causal_loss, padded_left, AS_FACTORS),
    "Qwen2, positions": (qwen2, causal_loss, placed, AS_FACTORS),
    "Qwen3": (qwen3, causal_loss, words, {"*norm*": "materialised", "*.weight": "Gram"}),
    "Mistral": (mistral, causal_loss, words, {"*norm*": "materialised", "*.weight": "Gram"}),
    "Gemma": (gemma, causal_loss, words, {"*norm*": "materialised", "*.weight": "Gram"}),
    "CLIP text": (clip_text, embedding_loss, sentences, AS_FACTORS),
    "CLIP vision": (
        clip_vision,
        embedding_loss,
        pictures,
        {"*class_embedding": "materialised", **AS_FACTORS},
    ),
    "Whisper encoder": (
        whisper,
        classifier_loss,
        sounds,
        # The first convolution meets more positions than it has entries.
        {"*conv1.weight": "materialised", **AS_FACTORS},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_unmodified_model_is_exact(name: str) -> None:
    build, loss, batch, forms = MODELS[name]
    model = roused(build()).train()
    gradients = check(loss(model), model, batch())
    assert_held(gradients, model, forms)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_may_be_of_either_kind(attention: str) -> None:
    model = roused(qwen2(attn_implementation=attention)).train()
    assert model.config._attn_implementation == attention
    check(causal_loss(model), model, padded_left())


def test_the_cache_of_keys_and_values_may_stay_on() -> None:
    model = roused(qwen2()).train()
    kept = []
    model.register_forward_hook(lambda *x: kept.append(x[-1].past_key_values is not None))
    check(causal_loss(model), model, words())
    assert all(kept)


def test_a_decoder_in_bfloat16() -> None:
    model = roused(qwen2()).bfloat16().train()
    check(causal_loss(model), model, padded_left())


def test_a_decoder_under_autocast() -> None:
    model = roused(qwen2()).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(causal_loss(model), model, padded_left())


def test_a_layer_that_a_model_leaves_out_is_named() -> None:
    """CLIP's classifier of pictures averages the patches ahead of the last norm."""
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, num_labels=3)
    model = roused(transformers.CLIPForImageClassification(config)).train()
    unused = "vision_model.post_layernorm"
    with pytest.raises(Refused, match=rf"{unused}.*freeze it.*name it in idle"):
        check(classifier_loss(model), model, pictures())
    idle = [name for name in private(model) if unused in name]
    gradients = check(classifier_loss(model), model, pictures(), idle=idle)
    assert not any(name in gradients.held_gradients for name in idle)
