"""Summing clipped gradients: per-sample gradients and weights in, a bounded sum out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxtyping import Float
from torch import Tensor

from hushgrad.types import Bounded, PerSample

SUM_SLACK = 1e-3
"""Rounding in the sum over records moves one record's share by less than this part of its bound.

A constant, so that it tells nothing of the batch. It is measured, not proved: rounding grows with
the records that one float32 sum adds up, so there are at most `LARGEST_SUM` of them, and several
sums are added in float64. `tests/test_sensitivity.py` prints what was measured.
"""

LARGEST_SUM = 1024
"""The most records that are added up in float32."""


def aggregate(
    gradients: PerSample, weights: Mapping[str, Float[Tensor, " batch"]], *, bound: float
) -> Bounded:
    """Sum the weighted gradients; `bound` is what the weights' rule promised for one record."""
    records = max((len(each) for each in weights.values()), default=0)
    if records > LARGEST_SUM:
        raise ValueError(
            f"expected at most {LARGEST_SUM} records in one sum, got {records}, which would round "
            "too much; cut the batch into micro-batches and add up their sums"
        )
    return Bounded(gradients.weighted_sum(weights), bound * (1 + SUM_SLACK))


def together(sums: Iterable[Bounded]) -> Bounded:
    """Add sums over the same records, in float64: what bounds a record's share is their sum."""
    total, *others = sums
    for other in others:
        both = {name: x.double() + other.sum[name] for name, x in total.sum.items()}
        total = Bounded(both, total.l2 + other.l2)
    return total
