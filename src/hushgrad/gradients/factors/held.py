"""Certified norms: a parameter's per-sample gradients, held as factors or written out, by cost.

A norm that comes from the factors is computed by another route than the vector that is summed. It
carries a bound on its rounding error, and where that would be large, or the factors cancel, the
record's gradient is written out and both come from one tensor.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hushgrad.gradients.factors.gram import (
    Rough,
    exact_where_zero,
    gram_square,
    norms_of,
)
from hushgrad.gradients.factors.kinds import Dense, Factor, OneHot, Outer
from hushgrad.gradients.factors.sums import Extent, Summation
from hushgrad.numerics import RELATIVE_SLACK, Square, rounding, square_norms, without_slack_at_zero
from hushgrad.types import Shape


class Materialised:
    """A gradient held as one tensor, from which both its norm and its sum are taken."""

    form = "materialised"
    measured = None

    def __init__(
        self, factors: tuple[Factor, ...], shape: Shape, rough: Rough | None = None
    ) -> None:
        self._shape = shape
        if rough is not None:
            self.rough = rough
        values = [_reshape(factor.materialised(), shape) for factor in factors]
        self._dense = Dense(torch.stack(values).sum(0) if len(values) > 1 else values[0])

    @property
    def leaves(self) -> list[Materialised | Gram]:
        return [self]

    @property
    def held(self) -> tuple[Dense, ...]:
        """What it consists of."""
        return (self._dense,)

    @cached_property
    def rough(self) -> Rough:
        return Rough(*norms_of(self._dense.values))

    def believe(self) -> None:
        """Take the rough squares as they are."""
        self.square = self.rough.square

    @cached_property
    def square(self) -> Square:
        """Certified squares; a record that under- or overflows float32 is redone in float64."""
        square = without_slack_at_zero(self.rough.square, self._dense.values)
        loose = _indices(square.loose)
        if not loose:
            return square
        estimate, slack = (part.clone() for part in square)
        for i in loose:
            exact = square_norms(self._dense.record(i)[None])
            estimate[i], slack[i] = exact.estimate[0], exact.slack[0]
        return Square(estimate, slack)

    @property
    def extents(self) -> list[Extent]:
        """What its sum's rounding depends on."""
        return [_extent(self.held, self.square.upper.sqrt())]

    def weighted_sum(self, weights: Float[Tensor, " batch"], how: Summation) -> Tensor:
        dense = self._dense if how.keep is None else self._dense.masked(how.keep)
        (rows,) = how.rows
        return dense.weighted_sum(weights, rows)


def _reshape(each: Tensor, shape: Shape) -> Tensor:
    return each if each.shape[1:] == shape else each.reshape(each.shape[0], *shape)


# A float32 sum of factors that cancel by more than this keeps too few digits of the result, so
# beyond it norm and sum are both taken from the record's gradient in float64.
_LARGEST_CANCELLATION = 100.0
LARGEST_PRODUCT = 2.0**120  # of a factor's entry and its weight, in float32
LARGEST_FACTOR = 2.0**80  # of a factor's entry: what the other loses by underflow stays tiny


def _extent(factors: tuple[Factor, ...], lengths: Tensor) -> Extent:
    ratio = rounding(factors[0].dtype) / rounding(torch.float32)
    terms, cheap = sum(f.terms for f in factors), all(f.cheap for f in factors)
    return Extent(ratio * lengths, terms, cheap)


class Measured(NamedTuple):
    """What is known of a gradient's factors once its norms are."""

    square: Square
    largest: Tensor  # the square of no entry of a factor is above this
    fragile: list[int]  # the records that are written out
    lengths: Tensor  # an upper bound on Σ‖a‖‖b‖ over a record's terms, written out ones aside


class Gram:
    """A gradient held as factors; its norm comes from inner products of their rows.

    `known` is what another `Gram` of the same factors has measured.
    """

    form = "Gram"

    def __init__(
        self,
        factors: tuple[Outer | OneHot, ...],
        shape: Shape,
        rough: Rough | None = None,
        known: Measured | None = None,
    ) -> None:
        self.held, self._shape, self._known = factors, shape, known
        if rough is not None:
            self.rough = rough

    @property
    def leaves(self) -> list[Materialised | Gram]:
        return [self]

    @cached_property
    def rough(self) -> Rough:
        return gram_square(self.held)

    def believe(self) -> None:
        """Take the rough squares as they are."""
        rough = self.rough
        assert rough.largest is not None
        self.measured = Measured(rough.square, rough.largest, [], rough.lengths)

    @cached_property
    def measured(self) -> Measured:
        """The norms, and what the sum must mind."""
        if self._known is not None:
            return self._known
        rough = exact_where_zero(self.rough, self.held)
        estimate, slack, length, largest = (None if x is None else x.clone() for x in rough)
        assert estimate is not None and slack is not None and largest is not None
        for i in _indices(Square(estimate, slack).loose):
            wide = tuple(_one_in_double(factor, i) for factor in self.held)
            finer = exact_where_zero(gram_square(wide), wide)
            for part, redone in zip((estimate, slack, length, largest), finer, strict=True):
                if part is not None and redone is not None:
                    part[i] = redone[0]
        doubtful = Square(estimate, slack).loose
        if length is not None:
            doubtful |= _cancellation(length, estimate) > 0
        fragile = _indices(doubtful)
        for i in fragile:
            exact = square_norms(self._record(i)[None])
            estimate[i], slack[i] = exact.estimate[0], exact.slack[0]
        lengths = Rough(estimate, slack, length, largest).lengths
        lengths = lengths.index_fill(0, torch.tensor(fragile, device=lengths.device).long(), 0)
        return Measured(Square(estimate, slack), largest, fragile, lengths)

    @property
    def square(self) -> Square:
        """Certified squares: float32 in chunks, then float64, then the record written out.

        Each step takes only the records that the one before left uncertain, one at a time, so
        that a record's bits do not depend on other records.
        """
        return self.measured.square

    def _record(self, index: int) -> Tensor:
        parts = [factor.record(index).reshape(self._shape) for factor in self.held]
        return torch.stack(parts).sum(0)

    @property
    def extents(self) -> list[Extent]:
        """What its sum's rounding depends on."""
        return [_extent(self.held, self.measured.lengths)]

    def weighted_sum(self, weights: Float[Tensor, " batch"], how: Summation) -> Tensor:
        _, largest, fragile, _ = self.measured
        apart = fragile
        if not how.fits:
            # A factor may be large where their product is not: it must not overflow by its weight,
            # nor lose digits where the weight makes it tiny.
            heavy = largest * weights.abs().clamp_min(1).square() < LARGEST_PRODUCT**2
            apart = sorted({*fragile, *_indices(~(heavy & (largest < LARGEST_FACTOR**2)))})
        places = torch.tensor(apart, dtype=torch.long, device=weights.device) if apart else None
        factored = weights if places is None else weights.index_fill(0, places, 0)
        factors = self.held if how.keep is None else [f.masked(how.keep) for f in self.held]
        (rows,) = how.rows
        total, *others = (f.weighted_sum(factored, rows).reshape(self._shape) for f in factors)
        for other in others:
            total = total + other
        if any(weights[i] != 0 for i in apart):
            total = total.double()  # in float32 each would round what others have added
        for i in apart:
            if weights[i] != 0:
                total += weights[i] * self._record(i)
        return total


class Stacked:
    """A gradient whose rows fall into blocks that have no use in common, each held by itself."""

    def __init__(self, blocks: dict[int, Gradient], shape: Shape) -> None:
        self._blocks, self._shape = blocks, shape
        self.form: str = ", ".join(dict.fromkeys(block.form for block in blocks.values()))

    @property
    def leaves(self) -> list[Materialised | Gram]:
        return [leaf for block in self._blocks.values() for leaf in block.leaves]

    @property
    def extents(self) -> list[Extent]:
        return [extent for block in self._blocks.values() for extent in block.extents]

    @property
    def measured(self) -> dict[int, Any]:
        return {start: block.measured for start, block in self._blocks.items()}

    @cached_property
    def square(self) -> Square:
        """Blocks are orthogonal: their squares, and the bounds on them, add up."""
        parts = [part.square for part in self._blocks.values()]
        estimate = torch.stack([part.estimate for part in parts]).sum(0)
        return Square(estimate, torch.stack([part.slack for part in parts]).sum(0))

    def weighted_sum(self, weights: Float[Tensor, " batch"], how: Summation) -> Tensor:
        sums, rows = {}, iter(how.rows)
        for start, block in self._blocks.items():
            own = how._replace(rows=tuple(itertools.islice(rows, len(block.extents))))
            sums[start] = block.weighted_sum(weights, own)
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in sums.values()))
        total = next(iter(sums.values())).new_zeros(self._shape, dtype=dtype)
        for start, part in sums.items():
            total[start : start + len(part)] = part
        return total


Gradient = Materialised | Gram | Stacked
Known = Measured | dict[int, Any] | None


def measure(gradients: Collection[Gradient]) -> tuple[float, Tensor]:
    """Take all norms with one look at the records, where none needs a second.

    Returns a bound on the factors' entries, inf if some record's norms had to be taken again; and
    the squared norms' upper bounds, [gradient, batch].
    """
    leaves = [leaf for gradient in gradients for leaf in gradient.leaves]
    roughs = [leaf.rough for leaf in leaves]
    estimate, slack = (torch.stack(part) for part in zip(*(r.square for r in roughs), strict=True))
    largest = _most(roughs, estimate, slack) if estimate.numel() else 0.0
    if math.isfinite(largest):
        for leaf in leaves:
            leaf.believe()
        if len(leaves) == len(gradients):
            return largest, estimate + slack
    return largest, torch.stack([gradient.square.upper for gradient in gradients])


def _most(roughs: list[Rough], estimate: Tensor, slack: Tensor) -> float:
    """A bound on the factors' entries; inf where a norm is loose, or its factors cancel."""
    excess = [torch.sub(slack, estimate, alpha=RELATIVE_SLACK).max()]  # nan if there is one
    lengths = [(r.length, r.estimate) for r in roughs if r.length is not None]
    if lengths:
        length, of_them = (torch.stack(parts) for parts in zip(*lengths, strict=True))
        excess.append(_cancellation(length, of_them).max())
    largest = [r.largest for r in roughs if r.largest is not None]
    square = torch.stack(largest).max() if largest else estimate.new_zeros(())
    *too_much, found = torch.stack([*excess, square]).tolist()
    return math.sqrt(found) if all(x <= 0 for x in too_much) else math.inf


def _cancellation(length: Tensor, estimate: Tensor) -> Tensor:
    """Above 0 where factors cancel."""
    return torch.sub(length.square(), estimate, alpha=_LARGEST_CANCELLATION**2)


def _indices(found: Tensor) -> list[int]:
    """Where `found` is true; mostly nowhere, which one look tells."""
    indices: list[int] = found.nonzero().flatten().tolist() if bool(found.any()) else []
    return indices


def _one_in_double(factor: Outer | OneHot, i: int) -> Outer | OneHot:
    if isinstance(factor, Outer):
        return Outer(factor.a[i : i + 1], factor.b[i : i + 1]).to(torch.float64)
    return replace(factor, index=factor.index[i : i + 1], b=factor.b[i : i + 1].double())
