"""Slots: in which rows of a pass the records of a batch stand, and how that is drawn.

Kernels may round a row by its place: a product of narrow matrices by where the row begins in
memory, so that every second or fourth row is rounded alike. Were records laid out one behind the
other, all that follow one that is left out would move up by a place and be rounded otherwise. Where
a model does so, each record draws its place modulo the kernel's period and keeps to such places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from hushgrad.batches.records import pad, padded_size, take
from hushgrad.types import Batch

Places = slice | Int64[Tensor, " records"]


@dataclass(frozen=True, eq=False)
class Slots:
    """The rows of a pass, and the places of a batch's records among them.

    The other rows are copies of the first record, which count for nothing. Rows are rounded alike
    if their places are equal modulo `period`.
    """

    records: int
    rows: int
    places: Places
    period: int = 1

    def fill(self, batch: Batch) -> Batch:
        """The rows of the pass."""
        if isinstance(self.places, slice):
            return pad(batch, self.records, self.rows)
        # The first record fills the gaps: a real one, so that no kernel meets unusual values.
        source = torch.zeros(self.rows, dtype=torch.long)
        source[self.places] = torch.arange(self.records)
        return take(batch, source.numpy())

    def of_records(self, x: Tensor) -> Tensor:
        """What the records have of something that all rows have in its last dimension."""
        return x if self.all_records else x[..., self.places]

    def of_rows(self, weights: Float[Tensor, " records"]) -> Float[Tensor, " rows"]:
        """The records' weights where they stand, and zero elsewhere."""
        if self.all_records:
            return weights
        spread = weights.new_zeros(self.rows)
        spread[self.places] = weights
        return spread

    @property
    def all_records(self) -> bool:
        """Does every row hold its own record, in the batch's order?"""
        return self.rows == self.records and isinstance(self.places, slice)

    def same_as(self, other: Slots) -> bool:
        """Do records of one batch stand at the same places in both?"""
        if self.rows != other.rows or self.records != other.records:
            return False
        one, two = self.places, other.places
        if isinstance(one, slice) or isinstance(two, slice):
            return isinstance(one, slice) and isinstance(two, slice)
        return torch.equal(one, two)


def in_turn(records: int, rows: int | None = None, period: int = 1) -> Slots:
    """The records one behind the other; copies fill up the rows after them.

    >>> in_turn(3, 8).of_rows(torch.ones(3)).tolist()
    [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    return Slots(records, records if rows is None else rows, slice(records), period)


def room(records: int, multiple: int, period: int) -> int:
    """So many rows have room for drawn places of so many records, but once in 10 000 times.

    >>> room(512, multiple=8, period=1), room(512, multiple=8, period=4)
    (512, 696)
    """
    if period == 1:
        return padded_size(records, multiple)
    each = records / period
    return padded_size(math.ceil(each + 4 * math.sqrt(each)) * period, multiple)


def draw_slots(records: int, multiple: int, period: int) -> Slots:
    """Slots in a multiple of rows, at places that each record draws modulo the period.

    Guarantees: the draws are independent of one another and alike for all records, from torch's
    generator, which follows from the key in a run. Whoever leaves moves others by whole periods.

    >>> _ = torch.manual_seed(0)
    >>> slots = draw_slots(5, multiple=8, period=2)
    >>> slots.places.tolist(), slots.rows
    ([0, 1, 3, 2, 5], 8)
    """
    if period == 1:
        return in_turn(records, padded_size(records, multiple))
    return arrange(torch.randint(period, (records,)), multiple, period)


def arrange(residues: Int64[Tensor, " records"], multiple: int, period: int) -> Slots:
    """Records in the first places that are free for what they have drawn."""
    counts = torch.bincount(residues, minlength=period)
    order = residues.argsort(stable=True)
    turns = torch.empty_like(order)  # how many before it have drawn the same
    turns[order] = torch.arange(len(residues)) - (counts.cumsum(0) - counts)[residues[order]]
    rows = padded_size(int(counts.max()) * period, multiple)
    return Slots(len(residues), rows, turns * period + residues, period)
