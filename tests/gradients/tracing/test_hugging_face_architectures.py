"""More Hugging Face models as they come: exact in traced form, each gradient held as expected."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import TOLERANCE, agree, check, expected, pick, private, size_of
from hf import (
    BATCH,
    ENCODER,
    SMALL,
    VOCABULARY,
    Loss,
    bert,
    causal_loss,
    classifier_loss,
    pictures,
    placed,
    roused,
    sentences,
    vit,
    words,
)
from rich.console import Console
from torch import Tensor, nn

from hushgrad import doctor
from hushgrad.gradients import Gradients, auto, certificate_for, per_sample, traced
from hushgrad.types import Refused

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

DECODER: dict[str, Any] = {
    **SMALL,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 10,
}
TOWER: dict[str, Any] = {
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TEXT = {**TOWER, **SMALL, "bos_token_id": 0, "eos_token_id": 28, "pad_token_id": 1}
VISION = {**TOWER, "image_size": 8, "patch_size": 4}


# --- the models ---------------------------------------------------------------------------------


def electra() -> nn.Module:
    config = transformers.ElectraConfig(
        **ENCODER,
        embedding_size=8,
        num_hidden_layers=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ElectraForSequenceClassification(config)


def opt() -> nn.Module:
    """Words are narrower than the layers, so a matrix leads in and another leads out."""
    config = transformers.OPTConfig(
        **SMALL,
        hidden_size=12,
        word_embed_proj_dim=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=10,
        dropout=0.0,
    )
    return transformers.OPTForCausalLM(config)


def gpt_neo() -> nn.Module:
    """A layer that sees all words before, and one that sees three."""
    config = transformers.GPTNeoConfig(
        **SMALL,
        hidden_size=12,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=3,
        intermediate_size=10,
        bos_token_id=0,
        eos_token_id=0,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
    )
    return transformers.GPTNeoForCausalLM(config)


def qwen2(**options: Any) -> nn.Module:
    """Four heads of queries on two of keys, rotary positions, RMSNorm, and the cache left on."""
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER, **options))


def qwen3() -> nn.Module:
    """Queries and keys are normalised too."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=4))


def mistral() -> nn.Module:
    config = transformers.MistralConfig(**DECODER, sliding_window=3)
    return transformers.MistralForCausalLM(config)


def gemma() -> nn.Module:
    """Norms multiply by `1 + weight`, and the words are tied."""
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**DECODER, head_dim=4))


def clip_text() -> nn.Module:
    config = transformers.CLIPTextConfig(**TEXT, projection_dim=3)
    return transformers.CLIPTextModelWithProjection(config)


def clip_vision() -> nn.Module:
    config = transformers.CLIPVisionConfig(**VISION, projection_dim=3)
    return transformers.CLIPVisionModelWithProjection(config)


def clip() -> nn.Module:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=8)
    return transformers.CLIPModel(config)


def whisper() -> nn.Module:
    """Two convolutions over time, then an encoder on a fixed table of sines."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=12,
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=10,
        num_mel_bins=5,
        max_source_positions=7,
        num_labels=3,
        classifier_proj_size=6,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    return transformers.WhisperForAudioClassification(config)


def embedding_loss(model: nn.Module) -> Loss:
    """The embedding of a text or a picture, read as logits."""

    def loss(batch: dict[str, Tensor]) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        found = model(**inputs)
        embeds = found.text_embeds if "input_ids" in batch else found.image_embeds
        return F.cross_entropy(embeds, batch["labels"], reduction="none")

    return loss


def sounds() -> dict[str, Tensor]:
    return {"input_features": torch.randn(BATCH, 5, 14), "labels": torch.randint(3, (BATCH,))}


def pairs() -> dict[str, Tensor]:
    return {**words(), "pixel_values": torch.randn(BATCH, 3, 8, 8)}


def padded_left() -> dict[str, Tensor]:
    """The model is left to find the positions."""
    return {key: value.flip(1) for key, value in words().items()}


# --- how each gradient is held ------------------------------------------------------------------

Forms = dict[str, str]
"""How gradients are held, by pattern of their parameters' names; the first that fits counts."""

WRITTEN = {"*norm*": "materialised", "*.bias": "materialised"}
AS_FACTORS: Forms = {**WRITTEN, "*.weight": "Gram"}
LN: Forms = {"*.ln_*": "materialised", "*.bias": "materialised", "*.weight": "Gram"}


def assert_held(gradients: Gradients, model: nn.Module, forms: Forms) -> None:
    """Every parameter is held as the table says, and every line of the table is about some."""
    fitted = {name: _pattern(name, forms) for name in private(model)}
    held = {name: gradients.held_gradients[name].form for name in fitted}
    assert held == {name: forms[pattern] for name, pattern in fitted.items()}
    assert set(fitted.values()) == forms.keys()


def _pattern(name: str, forms: Forms) -> str:
    return next(pattern for pattern in forms if fnmatch(name.lower(), pattern))


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


# --- types --------------------------------------------------------------------------------------


def test_a_decoder_in_bfloat16() -> None:
    model = roused(qwen2()).bfloat16().train()
    check(causal_loss(model), model, padded_left())


def test_a_decoder_under_autocast() -> None:
    model = roused(qwen2()).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(causal_loss(model), model, padded_left())


# --- kernels that follow the batch --------------------------------------------------------------


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


# --- the contrastive loss -----------------------------------------------------------------------


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


# --- adapters -----------------------------------------------------------------------------------

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


# --- activation checkpointing -------------------------------------------------------------------


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


# --- what the doctor says -----------------------------------------------------------------------


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
