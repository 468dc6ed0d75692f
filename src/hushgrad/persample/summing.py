"""Sums over records in float32, with a bound on their rounding that is proved.

A float32 product of many rows can err by more than one record's share, and its error depends on all
of its rows. So rows are added up a few at a time: as many as their lengths allow, and in float64
where they allow too few. docs/rounding.md has the proof that the limits below belong to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hushgrad.numerics import product, rounding

DOUBLE = 0
"""In place of a number of rows: the sum is taken in float64."""

_FEWEST = 16  # rows; with fewer to a product, float64 is faster
_OTHER = 3  # roundings of a weight, of a weighted row, and of the sum of two factors
_MARGIN = 1.01  # for lengths that are rounded themselves, and for 1/(1 − nu) in the proof
_SMALL = 2**22  # multiplications that float64 does in less time than several calls take
_TILE = 2**20  # entries of a sum that stay in the processor's cache while products are added


class Extent(NamedTuple):
    """What the rounding of a gradient's weighted sum depends on.

    `lengths` bounds Σ‖a‖‖b‖ over each record's terms, in units of float32's rounding; `terms` is
    how many rows all records have.
    """

    lengths: Float[Tensor, " batch"]
    terms: int


class Summation(NamedTuple):
    """How a gradient is summed.

    `keep` is False where a record is left out, if some gradient may not be finite; with `fits` no
    product of an entry and a weight can overflow. `rows` has, for each of the gradient's extents,
    how many rows one product adds up.
    """

    keep: Tensor | None
    fits: bool
    rows: tuple[int, ...]


def rows_within(
    extents: Mapping[str, Sequence[Extent]],
    weights: Mapping[str, Float[Tensor, " batch"]],
    *,
    within: float,
) -> dict[str, tuple[int, ...]]:
    """For each gradient, how many rows one product may add up, so that all sums are `within`."""
    each = [(extent, weights[name]) for name, held in extents.items() for extent in held]
    rows = [max(extent.terms, 1) for extent, _ in each]
    if each and math.isfinite(within):
        w = torch.stack([w.abs().double() for _, w in each])
        lengths = torch.stack([extent.lengths for extent, _ in each])
        total = torch.where(w == 0, 0.0, w * lengths).sum(1)
        rows = rows_per_product(total.tolist(), rows, within=within)
    left = iter(rows)
    return {name: tuple(itertools.islice(left, len(held))) for name, held in extents.items()}


def rows_per_product(lengths: Sequence[float], terms: Sequence[int], *, within: float) -> list[int]:
    """How many rows one product may add up, for each of several sums that are released together.

    A sum's length is `Σ w‖a‖‖b‖` over its terms. Guarantees: the sums, taken in float32 with so
    many rows to a product, are together off by at most `within` in Euclidean norm.

    >>> rows_per_product([100.0, 1.0], [512, 32], within=2e-3)
    [327, 32]
    >>> rows_per_product([5000.0, 1.0], [512, 32], within=2e-3)
    [0, 32]
    """
    budget = within / (_MARGIN * rounding(torch.float32))
    rows = [max(count, 1) for count in terms]
    single = {i for i, length in enumerate(lengths) if length > 0}
    while single:
        limit = _roundings_allowed([(lengths[i], terms[i]) for i in single], budget)
        chosen = {i: _rows(limit, terms[i]) for i in single}
        too_few = [i for i in single if chosen[i] == DOUBLE]
        if not too_few:
            break
        longest = max(lengths[i] for i in too_few)
        for i in too_few:
            if lengths[i] >= longest / 2:
                single.remove(i)
                rows[i] = DOUBLE
    return [chosen[i] if i in single else count for i, count in enumerate(rows)]


def _roundings_allowed(sums: Sequence[tuple[float, int]], budget: float) -> float:
    """The largest n such that `hypot(min(n, roundings of one product)·length)` is in the budget."""
    whole, limit = 0.0, 0.0
    rest = [(length, terms + 1 + _OTHER) for length, terms in sums]
    while rest:
        left = budget**2 - whole
        limit = math.sqrt(max(left, 0.0)) / math.hypot(*(length for length, _ in rest))
        fit = [(length, n) for length, n in rest if n <= limit]
        if not fit:
            return limit
        whole += sum((length * n) ** 2 for length, n in fit)
        rest = [(length, n) for length, n in rest if n > limit]
    return math.inf


def _rows(limit: float, terms: int) -> int:
    """The most rows r with at most `limit` roundings: r in a product, one for each product more."""
    if terms + 1 + _OTHER <= limit:
        return max(terms, 1)
    room = limit - _OTHER
    if room * room < 4 * terms:
        return DOUBLE
    rows = int((room + math.sqrt(room * room - 4 * terms)) / 2)
    while rows >= _FEWEST and rows + -(-terms // rows) > room:
        rows -= 1
    return rows if rows >= _FEWEST else DOUBLE


def sum_of_products(
    b: Float[Tensor, "terms p"], a: Float[Tensor, "terms d"], *, rows: int
) -> Float[Tensor, "p d"]:
    """`Σ b ⊗ a`, by products of at most `rows` rows that are added in turn.

    Factors of a sum in float64 are float64 themselves. A large result is made a tile at a time, so
    that it stays in the cache while it is added to.
    """
    terms, work = len(a), a.numel() * b.shape[1]
    if rows < terms and work <= _SMALL:
        return b.double().mT @ a.double()
    if rows == DOUBLE or rows >= terms:
        return product(b.mT, a)
    rows = -(-terms // -(-terms // rows))  # alike, in as many products
    width = max(_TILE // a.shape[1], 1)
    if b.shape[1] <= width:
        return _in_turn(b, a, rows)
    total = a.new_empty(b.shape[1], a.shape[1])
    for part, tile in zip(b.split(width, 1), total.split(width), strict=True):
        tile.copy_(_in_turn(part, a, rows))
    return total


def _in_turn(b: Tensor, a: Tensor, rows: int) -> Tensor:
    first, *others = zip(b.split(rows), a.split(rows), strict=True)
    total = product(first[0].mT, first[1])
    for left, right in others:
        total += product(left.mT, right)
    return total


def sum_of_rows(
    weights: Float[Tensor, " batch"], values: Float[Tensor, "batch n"], *, rows: int
) -> Float[Tensor, " n"]:
    """`Σ w v`, by products of at most `rows` records that are added up."""
    batch = len(values)
    if rows == DOUBLE or (rows < batch and values.numel() <= _SMALL >> 6):
        return weights.double() @ values.double()
    w = weights.to(values.dtype)
    if rows >= batch:
        return w @ values
    whole = batch // rows * rows
    sums = torch.bmm(
        w[:whole].view(-1, 1, rows), values[:whole].view(whole // rows, rows, -1)
    ).squeeze(1)
    if whole < batch:
        sums = torch.cat([sums, (w[whole:] @ values[whole:])[None]])
    return sums.sum(0)
