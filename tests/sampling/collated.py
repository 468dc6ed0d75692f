"""Records to collate, and collate functions, right and wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hushgrad.sampling import Loader

N, LONGEST = 40, 12
LENGTHS = [3 + i % 7 for i in range(N)]
WORDS = [torch.arange(1, length + 1) + i for i, length in enumerate(LENGTHS)]
TEXTS = ["word " * length for length in LENGTHS]
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
PAIRS = [(x, i % 3) for i, x in enumerate(X)]


def first_batch(data: Any, collate: Any, workers: int = 0, size: int = 10) -> Any:
    loader = Loader(data, collate=collate, workers=workers)
    return next(iter(loader.load_each([np.arange(size)])))


def longest(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)


def longest_with_mask(rows: list[Tensor]) -> dict[str, Tensor]:
    padded = longest(rows)
    return {"ids": padded, "mask": padded != 0}


def right_aligned(rows: list[Tensor]) -> Tensor:
    """To a fixed length, but shifted by the longest: the shape tells nothing."""
    most = max(map(len, rows))
    return torch.stack([fixed([torch.cat([r.new_zeros(most - len(r)), r])])[0] for r in rows])


def fixed(rows: list[Tensor]) -> Tensor:
    return torch.stack(
        [torch.nn.functional.pad(r[:LONGEST], (0, LONGEST - len(r[:LONGEST]))) for r in rows]
    )


def standardised(rows: list[Tensor]) -> Tensor:
    x = torch.stack(rows)
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


OWN = np.random.default_rng(0)


def augmented(rows: list[Tensor]) -> Tensor:
    x = torch.stack(rows)
    return x * torch.rand(len(x), 1) + torch.from_numpy(np.random.rand(len(x), 5))
