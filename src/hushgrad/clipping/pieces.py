"""Pieces of a batch: where each record's draw puts it, so that leaving one out moves no other.

A sum over records rounds by all of its records. Cut by place, a large batch would be cut otherwise
once a record is left out, and every sum would round anew. So each record of a large batch draws its
piece from the run's key, and one record is part of one sum. docs/rounding.md has the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from hushgrad.rng import Rng
from hushgrad.types import Refused

PiecePlaces = Int64[ndarray, "_"]
"""Places in a batch, ascending."""

LARGEST_PIECE = 1024
"""The most records, on average, that one piece holds.

With more, float32 could add up only a few rows at a time to keep within the error of a piece.
"""

_MOST_ADDITIONS = 2**38
"""Records times sums that are added up: of so many the proof covers the rounding in float64."""


@dataclass(frozen=True)
class Pieces:
    """How many pieces there are, a public number, and the key by which records are dealt to them.

    >>> pieces = Pieces(3, Rng.fixed(0))
    >>> [places.tolist() for places in pieces.places(5)]
    [[0, 2, 4], [3], [1]]
    """

    count: int
    rng: Rng

    def places(self, records: int) -> list[PiecePlaces]:
        """The places of each piece's records, in ascending order.

        Guarantees: every record draws its piece by itself, each piece with the same probability up
        to 2⁻⁴⁰.
        """
        drawn = (self.rng.words(records) % np.uint64(self.count)).astype(np.int64)
        order = np.argsort(drawn, kind="stable")
        return np.split(order, np.searchsorted(drawn[order], np.arange(1, self.count)))

    def require_few_sums(self, micro_batch: int) -> None:
        """Refuse a batch of which too many sums would be added up."""
        records = self.count * LARGEST_PIECE
        sums = max(self.count, records // micro_batch)
        if records * sums > _MOST_ADDITIONS:
            raise Refused(
                f"expected batches that are added up from fewer sums, got {sums} of about "
                f"{micro_batch} records, whose rounding is not proved to be small; sample smaller "
                "batches, or pass a larger micro_batch"
            )


def pieces_for(expected_batch: float, rng: Rng) -> Pieces | None:
    """The pieces of a batch of this public expected size; None for a batch in one piece."""
    count = _count(expected_batch)
    return Pieces(count, rng) if count > 1 else None


def piece_size(expected_batch: float) -> float:
    """How many records a piece of such a batch has on average."""
    return expected_batch / _count(expected_batch)


def _count(expected_batch: float) -> int:
    return max(1, math.ceil(expected_batch / LARGEST_PIECE))
