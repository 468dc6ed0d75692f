"""Small networks of plain layers, and one of everything that is hard."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(
    *widths: int, act: type[nn.Module] = nn.Tanh, dropout: float = 0.0, bias: bool = True
) -> nn.Sequential:
    """Linear layers of these widths with an activation in between; dropout before the last."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths[:-1]):
        layers += [nn.Linear(inputs, outputs, bias=bias), act()]
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1], bias=bias))


def perceptron() -> nn.Sequential:
    """The network of most tests: 3-6-4 with tanh."""
    return mlp(3, 6, 4)


def from_seed(*widths: int, dropout: float = 0.0, bias: bool = True) -> nn.Sequential:
    """An `mlp` that has the same weights each time; torch's generator stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return mlp(*widths, dropout=dropout, bias=bias)


class TiedWords(nn.Module):
    """A table of words that is the output head too, with a normalisation in between."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.norm(self.table(ids)), self.table.weight).mean(1)


class Everything(nn.Module):
    """Tied and reused weights, a grouped convolution, norms and bare parameters in one model."""

    def __init__(self, words: int = 9, length: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 8)
        self.positions = nn.Parameter(0.1 * torch.randn(length, 8))
        self.mix = nn.Conv1d(8, 8, 3, padding=1, groups=4)
        self.norm = nn.GroupNorm(2, 8)
        self.shared = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.tensor(1.2))

    def forward(self, tokens: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        h = self.words(tokens) + self.positions + shift
        h = self.norm(self.mix(h.mT)).mT
        h = torch.relu_(self.shared(h)) * self.gain
        h = h + self.shared(h)
        return h @ self.words.weight.T


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
