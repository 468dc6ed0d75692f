"""Pieces of a large batch: each record draws its piece, so that removing one moves no other.

The rounding error of a float32 sum depends on all of its records. If a large batch were cut by
position, removing one record would shift all later ones, and every sum would round differently. So
each record draws its piece from the run's key, and one record affects the rounding of one sum only.
docs/rounding.md has the proof.
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
"""Positions in a batch, ascending."""

LARGEST_PIECE = 1024
"""The largest expected number of records in a piece.

In a larger piece, float32 could only add a few rows at a time within the error of a piece.
"""

_MOST_ADDITIONS = 2**38
"""The largest product of records and partial sums for which the proof covers float64 rounding."""


@dataclass(frozen=True)
class Pieces:
    """A public number of pieces, and the key by which records are assigned to them.

    >>> pieces = Pieces(3, Rng.fixed(0))
    >>> [places.tolist() for places in pieces.places(5)]
    [[0, 2, 4], [3], [1]]
    """

    count: int
    rng: Rng

    def places(self, records: int) -> list[PiecePlaces]:
        """Return the positions of each piece's records, in ascending order.

        Guarantees: each record draws its piece independently, and each piece has the same
        probability up to 2⁻⁴⁰.
        """
        drawn = (self.rng.words(records) % np.uint64(self.count)).astype(np.int64)
        order = np.argsort(drawn, kind="stable")
        return np.split(order, np.searchsorted(drawn[order], np.arange(1, self.count)))

    def require_few_sums(self, micro_batch: int) -> None:
        """Refuse a batch whose pieces and micro-batches give too many partial sums to add."""
        records = self.count * LARGEST_PIECE
        sums = max(self.count, records // micro_batch)
        if records * sums > _MOST_ADDITIONS:
            raise Refused(
                f"expected batches that are added up from fewer sums, got {sums} sums of about "
                f"{micro_batch} records, for which no rounding bound is proved; sample smaller "
                "batches, or pass a larger micro_batch"
            )


def pieces_for(expected_batch: float, rng: Rng) -> Pieces | None:
    """Return the pieces of a batch of this public expected size; None if one piece suffices."""
    count = _count(expected_batch)
    return Pieces(count, rng) if count > 1 else None


def piece_size(expected_batch: float) -> float:
    """Return the expected number of records in a piece."""
    return expected_batch / _count(expected_batch)


def _count(expected_batch: float) -> int:
    return max(1, math.ceil(expected_batch / LARGEST_PIECE))
