"""Losses and batches for the models of Hugging Face in this zoo."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.hugging_face import BATCH, LENGTH, VOCABULARY, Loss


def classifier_loss(model: nn.Module) -> Loss:
    """Cross-entropy of each record's label."""

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
    """Words with a label for each record."""
    return {**words(), "labels": torch.randint(3, (BATCH,))}


def blanks() -> dict[str, Tensor]:
    """Words of which every second is to be filled in."""
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
    """Pictures with a label each."""
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8), "labels": torch.randint(3, (BATCH,))}


def embedding_loss(model: nn.Module) -> Loss:
    """The embedding of a text or a picture, read as logits."""

    def loss(batch: dict[str, Tensor]) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        found = model(**inputs)
        embeds = found.text_embeds if "input_ids" in batch else found.image_embeds
        return F.cross_entropy(embeds, batch["labels"], reduction="none")

    return loss


def sounds() -> dict[str, Tensor]:
    """Spectra with a label each."""
    return {"input_features": torch.randn(BATCH, 5, 14), "labels": torch.randint(3, (BATCH,))}


def pairs() -> dict[str, Tensor]:
    """Words with the picture that belongs to them."""
    return {**words(), "pixel_values": torch.randn(BATCH, 3, 8, 8)}


def padded_left() -> dict[str, Tensor]:
    """The model is left to find the positions."""
    return {key: value.flip(1) for key, value in words().items()}
