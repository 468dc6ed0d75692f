"""Summing clipped gradients: per-sample gradients and weights in, a bounded sum out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from jaxtyping import Float
from torch import Tensor

from hushgrad.types import Bounded, PerSample

SUM_SLACK = 4e-3
"""By how much of its bound one record moves a computed sum beyond its own share (s).

A constant, so that it tells nothing of the batch. It is proved in docs/rounding.md: every piece of
a batch is summed with an error of at most `PIECE_ERROR` of the bound, whatever its records are, and
one record is in one piece.
"""

PIECE_ERROR = 0.49 * SUM_SLACK
"""How far the computed sum of a piece may be from the exact one, relative to the bound.

Twice this is less than `SUM_SLACK`: the rest covers adding up the pieces in float64.
"""

_ORDINARY = 20  # binary exponents of bounds whose weights and sums need no scaling


def piece_error(bound: float, *, share: float = 1.0) -> float:
    """The error allowed to the sum of a micro-batch that is this `share` of its piece."""
    return PIECE_ERROR * share * bound


def aggregate(
    gradients: PerSample,
    weights: Mapping[str, Float[Tensor, " batch"]],
    *,
    bound: float,
    share: float = 1.0,
) -> Bounded:
    """Sum the weighted gradients; `bound` is what the weights' rule promised for one record.

    The records are a `share` of a piece, to whose error this sum may add as much.
    """
    within, l2 = piece_error(bound, share=share), bound * (1 + SUM_SLACK)
    exponent = math.frexp(bound)[1]
    if abs(exponent) <= _ORDINARY:
        return Bounded(gradients.weighted_sum(weights, within=within), l2)
    # Near 1, no weight is subnormal, which would round it by more than the proof allows.
    scale = math.ldexp(1.0, exponent)
    each = {id(w): w / scale for w in weights.values()}
    scaled = {name: each[id(w)] for name, w in weights.items()}
    sums = gradients.weighted_sum(scaled, within=within / scale)
    return Bounded({name: x.double() * scale for name, x in sums.items()}, l2)


def sum_over_same_records(sums: Iterable[Bounded]) -> Bounded:
    """Add sums over the same records, in float64: what bounds a record's share is their sum."""
    total, *others = sums
    for other in others:
        both = {name: x.double() + other.sum[name] for name, x in total.sum.items()}
        total = Bounded(both, total.l2 + other.l2)
    return total
