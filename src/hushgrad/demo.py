"""Two small models to try the library on: each function returns a model, its loss and a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad.types import Batch, Loss


def cnn() -> tuple[nn.Module, Loss, Batch]:
    """A small image classifier: a convolution, group norm, and two linear layers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.GroupNorm(4, 8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 32),
        nn.ReLU(inplace=True),
        nn.Dropout(0.1),
        nn.Linear(32, 10),
    )
    batch = (torch.randn(32, 1, 8, 8), torch.randint(10, (32,)))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels, reduction="none")

    return model, loss, batch


class _LanguageModel(nn.Module):
    """A transformer layer between an embedding and the same embedding, transposed."""

    def __init__(self, words: int = 64, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens) + self.positions[: tokens.shape[1]]
        q, k, v = self.query_key_value(self.norm(h)).chunk(3, dim=-1)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits: Tensor = (h + self.feed(h)) @ self.words.weight.T
        return logits


def transformer() -> tuple[nn.Module, Loss, Batch]:
    """A small language model with tied embeddings and learned positions."""
    torch.manual_seed(0)
    model = _LanguageModel()

    def loss(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1]).transpose(1, 2)
        return F.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)

    return model, loss, torch.randint(64, (16, 16))
