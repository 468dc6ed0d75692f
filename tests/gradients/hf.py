"""Small Hugging Face models, made from their configurations, with batches and losses for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

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


def classifier_loss(model: nn.Module) -> Loss:
    def loss(batch: dict[str, Tensor]) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return F.cross_entropy(model(**inputs).logits.float(), batch["labels"], reduction="none")

    return loss


def causal_loss(model: nn.Module) -> Loss:
    """The mean over a record's own next words, padding left out."""

    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = model(**batch).logits[:, :-1].float()
        words, kept = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:]
        each = F.cross_entropy(logits.mT, words, reduction="none") * kept
        return each.sum(1) / kept.sum(1)

    return loss


def masked_loss(model: nn.Module) -> Loss:
    """`ignore_index` where a word is not asked for, as data collators write it."""

    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["input_ids"], batch["attention_mask"]).logits.float()
        return F.cross_entropy(logits.mT, batch["labels"], reduction="none").sum(1)

    return loss


def words(length: int = LENGTH) -> dict[str, Tensor]:
    """Records of different lengths, all padded on the right."""
    lengths = torch.arange(BATCH) % (length - 3) + 3
    kept = (torch.arange(length) < lengths[:, None]).long()
    ids = torch.randint(2, VOCABULARY, (BATCH, length)) * kept + (1 - kept)
    return {"input_ids": ids, "attention_mask": kept}


def sentences() -> dict[str, Tensor]:
    return {**words(), "labels": torch.randint(3, (BATCH,))}


def blanks() -> dict[str, Tensor]:
    batch = words()
    asked = batch["attention_mask"].bool() & (torch.arange(LENGTH) % 2 == 0)
    labels = batch["input_ids"].masked_fill(~asked, -100)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(asked, 3), "labels": labels}


def placed() -> dict[str, Tensor]:
    """Padding on the left, so that positions differ from record to record."""
    batch = {key: value.flip(1) for key, value in words().items()}
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    return {**batch, "position_ids": positions}


def pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8), "labels": torch.randint(3, (BATCH,))}


def bert_config(layers: int = 1, dropout: float = 0.0, **options: Any) -> Any:
    return transformers.BertConfig(
        **ENCODER,
        num_hidden_layers=layers,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **options,
    )


def bert(**options: Any) -> nn.Module:
    return transformers.BertForSequenceClassification(bert_config(**options))


def blank_filling_bert(**options: Any) -> nn.Module:
    return transformers.BertForMaskedLM(bert_config(**options))


def roberta(**options: Any) -> nn.Module:
    config = transformers.RobertaConfig(
        **ENCODER,
        num_hidden_layers=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )
    return transformers.RobertaForSequenceClassification(config)


def distilbert(**options: Any) -> nn.Module:
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
