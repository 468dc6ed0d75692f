"""Work on long vectors in pieces, over as many threads as torch uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

PIECE = 1 << 18
"""Entries that a thread takes at a time."""

CHUNK = 1 << 14
"""Entries whose words stay in the cache."""

Work = TypeVar("Work")
_Result = TypeVar("_Result")


def in_threads(work: Callable[[Work], _Result], pieces: Sequence[Work]) -> list[_Result]:
    """Do all pieces, in as many threads as torch uses; they end here, so a fork finds none."""
    threads = min(torch.get_num_threads(), len(pieces))
    if threads <= 1:
        return [work(piece) for piece in pieces]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, pieces))


def pieces_of(lengths: Iterable[int]) -> list[tuple[int, slice]]:
    """Vectors of these lengths in pieces: the number of the vector, and a part of it."""
    return [
        (k, slice(start, min(start + PIECE, length)))
        for k, length in enumerate(lengths)
        for start in range(0, length, PIECE)
    ]


def chunks(length: int) -> Iterator[slice]:
    """A piece in parts that stay in the cache."""
    return (slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK))


def even(count: int) -> int:
    """The next even number: a pair of words makes a pair of values."""
    return count + count % 2
