"""Sums clipped gradients: per-sample gradients and weights in, a bounded sum out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from jaxtyping import Float
from torch import Tensor

from hushgrad.types import Bounded, PerSample

SUM_SLACK = 4e-3
"""s: with rounding, one record moves a computed sum by at most (1 + s) times its bound.

It is a constant, so that it reveals nothing about the batch. docs/rounding.md proves it: every
piece of a batch is summed with an error of at most `PIECE_ERROR` of the bound, for all possible
records, and a record is in one piece only.
"""

PIECE_ERROR = 0.49 * SUM_SLACK
"""The largest error of a piece's computed sum, relative to the bound.

Twice this is less than `SUM_SLACK`; the rest covers adding the pieces in float64.
"""

_ORDINARY = 20  # binary exponents of bounds whose weights and sums need no scaling


def piece_error(bound: float, *, share: float = 1.0) -> float:
    """Return the error allowed in the sum of a micro-batch that is this `share` of its piece."""
    return PIECE_ERROR * share * bound


def aggregate(
    gradients: PerSample,
    weights: Mapping[str, Float[Tensor, " batch"]],
    *,
    bound: float,
    share: float = 1.0,
) -> Bounded:
    """Sum the weighted gradients of a micro-batch.

    Guarantees: one record moves the result by at most its `l2`, rounding included.

    Args:
        gradients: per-sample gradients.
        weights: the clipping weights, by parameter name.
        bound: the norm that the clipping rule guarantees for one weighted record.
        share: the micro-batch's share of its piece, and so of the error allowed for the piece.
    """
    within, l2 = piece_error(bound, share=share), bound * (1 + SUM_SLACK)
    exponent = math.frexp(bound)[1]
    if abs(exponent) <= _ORDINARY:
        return Bounded(gradients.weighted_sum(weights, within=within), l2)
    # Scaled to a bound near 1, no weight is subnormal; subnormals round more than the proof allows.
    scale = math.ldexp(1.0, exponent)
    each = {id(w): w / scale for w in weights.values()}
    scaled = {name: each[id(w)] for name, w in weights.items()}
    sums = gradients.weighted_sum(scaled, within=within / scale)
    return Bounded({name: x.double() * scale for name, x in sums.items()}, l2)


def sum_over_same_records(sums: Iterable[Bounded]) -> Bounded:
    """Add sums over the same records, in float64; their bounds add up."""
    total, *others = sums
    for other in others:
        both = {name: x.double() + other.sum[name] for name, x in total.sum.items()}
        total = Bounded(both, total.l2 + other.l2)
    return total
