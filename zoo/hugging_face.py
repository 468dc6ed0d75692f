"""Small Hugging Face models, made from their configurations, with batches and losses for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, LENGTH, BATCH = 29, 6, 5
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 12}
ENCODER: dict[str, Any] = {
    **SMALL,
    "hidden_size": 12,
    "num_attention_heads": 2,
    "intermediate_size": 10,
    "num_labels": 3,
}

Loss = Callable[[Any], Tensor]


def bert_config(layers: int = 1, dropout: float = 0.0, **options: Any) -> Any:
    """A small BERT, of so many layers."""
    return transformers.BertConfig(
        **ENCODER,
        num_hidden_layers=layers,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **options,
    )


def bert(**options: Any) -> nn.Module:
    """BERT that classifies."""
    return transformers.BertForSequenceClassification(bert_config(**options))


def blank_filling_bert(**options: Any) -> nn.Module:
    """BERT that fills in blanks."""
    return transformers.BertForMaskedLM(bert_config(**options))


def roberta(**options: Any) -> nn.Module:
    """RoBERTa that classifies."""
    config = transformers.RobertaConfig(
        **ENCODER,
        num_hidden_layers=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )
    return transformers.RobertaForSequenceClassification(config)


def distilbert(**options: Any) -> nn.Module:
    """DistilBERT that classifies."""
    config = transformers.DistilBertConfig(
        **SMALL,
        dim=12,
        hidden_dim=10,
        n_layers=1,
        n_heads=2,
        num_labels=3,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        **options,
    )
    return transformers.DistilBertForSequenceClassification(config)


def gpt2(layers: int = 1, dropout: float = 0.0, **options: Any) -> nn.Module:
    """GPT-2 with its tied head, of so many layers."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=12,
        n_embd=12,
        n_layer=layers,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**options: Any) -> nn.Module:
    """Llama with a tied head and shared keys."""
    config = transformers.LlamaConfig(
        **SMALL,
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=10,
        tie_word_embeddings=True,
        use_cache=False,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def vit(layers: int = 1, **options: Any) -> nn.Module:
    """A vision transformer that classifies, of so many layers."""
    sizes = {key: value for key, value in ENCODER.items() if key not in SMALL}
    config = transformers.ViTConfig(
        **sizes,
        num_hidden_layers=layers,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )
    return transformers.ViTForImageClassification(config)


def roused(model: nn.Module) -> nn.Module:
    """Weights large enough that no part of the gradient is lost beside the others."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return model


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


def electra() -> nn.Module:
    """Electra that classifies."""
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
    """Mistral with a sliding window."""
    config = transformers.MistralConfig(**DECODER, sliding_window=3)
    return transformers.MistralForCausalLM(config)


def gemma() -> nn.Module:
    """Norms multiply by `1 + weight`, and the words are tied."""
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**DECODER, head_dim=4))


def clip_text() -> nn.Module:
    """The text tower of CLIP."""
    config = transformers.CLIPTextConfig(**TEXT, projection_dim=3)
    return transformers.CLIPTextModelWithProjection(config)


def clip_vision() -> nn.Module:
    """The vision tower of CLIP."""
    config = transformers.CLIPVisionConfig(**VISION, projection_dim=3)
    return transformers.CLIPVisionModelWithProjection(config)


def clip() -> nn.Module:
    """CLIP with both of its towers."""
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


def t5(*, tied: bool, gated: bool = False) -> nn.Module:
    """T5, with its words as output head or with another."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
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
        model.lm_head.weight = nn.Parameter(torch.randn(VOCABULARY, 12))
    return model


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
    """ConvNeXt that classifies."""
    config = transformers.ConvNextConfig(
        patch_size=2, num_stages=2, hidden_sizes=[6, 8], depths=[1, 1], num_labels=3
    )
    return transformers.ConvNextForImageClassification(config)
