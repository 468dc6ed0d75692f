"""Summing clipped gradients: per-sample gradients and weights in, a bounded sum out."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from hushgrad.types import Bounded, PerSample

SUM_SLACK = 1e-3
"""Rounding in a float32 sum over records moves one record's share by less than this part of it.

A constant, so that it tells nothing of the batch; `tests/test_sensitivity.py` prints the worst
excess that was measured.
"""


def aggregate(
    gradients: PerSample, weights: Mapping[str, Float[Tensor, " batch"]], *, bound: float
) -> Bounded:
    """Sum the weighted gradients; `bound` is what the weights' rule promised for one record."""
    return Bounded(gradients.weighted_sum(weights), bound * (1 + SUM_SLACK))
