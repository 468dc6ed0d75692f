"""Sums over records in float32, with a bound on their rounding that is proved.

A float32 product of many rows can err by more than one record's share, and its error depends on all
of its rows. So rows are added up a few at a time: as many as their lengths allow, and in float64
where they allow too few. docs/rounding.md has the proof that the limits below belong to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
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
_SMALL = 2**22  # multiplications of a product that float64 does in the time of a few calls
_TILE = 2**20  # entries of a sum that stay in the processor's cache while products are added


class Extent(NamedTuple):
    """What the rounding of a gradient's weighted sum depends on.

    `lengths` bounds Σ‖a‖‖b‖ over each record's terms, in units of float32's rounding; `terms` is
    how many rows all records have, and `cheap` whether float64 takes no longer than a few calls.
    """

    lengths: Float[Tensor, " batch"]
    terms: int
    cheap: bool


class Total(NamedTuple):
    """A sum: its length `Σ w‖a‖‖b‖` over the terms, their number, whether float64 is cheap."""

    length: float
    terms: int
    cheap: bool = False


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
        found = torch.where(w == 0, 0.0, w * lengths).sum(1).tolist()
        totals = [Total(x, e.terms, e.cheap) for x, (e, _) in zip(found, each, strict=True)]
        rows = rows_per_product(totals, within=within)
    left = iter(rows)
    return {name: tuple(itertools.islice(left, len(held))) for name, held in extents.items()}


def is_cheap(terms: int, p: int, d: int) -> bool:
    """Does float64 take about as long for the product of so many rows as a few calls?"""
    return terms * p * d <= _SMALL


def rows_per_product(totals: Sequence[Total], *, within: float) -> list[int]:
    """How many rows one product may add up, for each of several sums that are released together.

    Guarantees: the sums, taken in float32 with so many rows to a product, or in float64, are
    together off by at most `within` in Euclidean norm.

    >>> rows_per_product([Total(100.0, 512), Total(1.0, 32)], within=2e-3)
    [327, 32]
    >>> rows_per_product([Total(5000.0, 512), Total(1.0, 32)], within=2e-3)
    [0, 32]
    """
    budget = within / (_MARGIN * rounding(torch.float32))
    single = {i: total for i, total in enumerate(totals) if total.length > 0}
    rows = [max(total.terms, 1) for total in totals]
    while single:
        limit = _roundings_allowed(single.values(), budget)
        chosen = {i: _rows(limit, total.terms) for i, total in single.items()}
        cut = [i for i in single if chosen[i] < single[i].terms]
        double = [i for i in cut if single[i].cheap] or _longest(
            {i: single[i] for i in cut if chosen[i] == DOUBLE}
        )
        if not double:
            break
        for i in double:
            del single[i]
            rows[i] = DOUBLE
    return [chosen[i] if i in single else count for i, count in enumerate(rows)]


def _longest(totals: Mapping[int, Total]) -> list[int]:
    """Those of at least half the largest length."""
    most = max((total.length for total in totals.values()), default=0.0)
    return [i for i, total in totals.items() if total.length >= most / 2]


def _roundings_allowed(totals: Iterable[Total], budget: float) -> float:
    """The largest n such that `hypot(min(n, roundings of one product)·length)` is in the budget."""
    whole, limit = 0.0, 0.0
    rest = [(total.length, total.terms + 1 + _OTHER) for total in totals]
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
    terms = len(a)
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
    if rows == DOUBLE:
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
