"""Per-sample gradients of a linear model in closed form, without autograd.

A record's gradient is ℓ'(z, y) ⊗ x, so its norm is ‖ℓ'‖·‖x‖ and a weighted sum is one matrix
product. The rows' norms are computed only once. Everything is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from dp_accounting import DpEvent, GaussianDpEvent
from jaxtyping import Float64
from torch import Tensor

from hushgrad.clipping.aggregate import aggregate
from hushgrad.clipping.rules import Clip
from hushgrad.glm.losses import ScoreLoss
from hushgrad.glm.rows import PART, RowSource
from hushgrad.run.query import BatchPass, answerable
from hushgrad.types import Bounded

NAME = "coef"
"""The one parameter θ of a linear model, [classes, width]; one class for scalar scores."""


@dataclass(frozen=True)
class LinearGradients:
    """Per-sample gradients `slopes ⊗ rows`, with the interface that clipping and algorithms need.

    Guarantees: `sq_norms` is an upper bound on the squared norm of what `weighted_sum` adds for
    that record, at most 1e-12 above it; a record that is not finite has norm inf.
    """

    rows: RowSource
    slopes: Float64[Tensor, "padded classes"]
    value: Callable[[], Float64[Tensor, " batch"]]

    @cached_property
    def losses(self) -> Float64[Tensor, " batch"]:
        """Each record's loss. Private: it must not leave the process without noise."""
        return self.value()

    def sq_norms(self) -> dict[str, Float64[Tensor, " batch"]]:
        """An upper bound on each record's squared norm."""
        squares = self.slopes.square()
        total = squares[:, 0]
        # Columns are added one by one: the order of `sum` could depend on the batch.
        for column in range(1, squares.shape[1]):
            total = total + squares[:, column]
        up = 1 + (squares.shape[1] + 8) * 2.0**-52  # covers all roundings, with a margin
        upper = (total * self.rows.sq_norms * up)[: self.rows.count]
        return {NAME: torch.nan_to_num(upper, nan=torch.inf, posinf=torch.inf)}

    def weighted_sum(
        self, weights: Mapping[str, Float64[Tensor, " batch"]], *, within: float = math.inf
    ) -> dict[str, Float64[Tensor, "classes width"]]:
        """Sum the records' gradients with these weights; weight 0 leaves out a record, NaN or not.

        In float64 the error for n records is at most n²·2⁻⁵² of the largest contribution. For
        parts of 1024 records that is far below every `within` that is asked for.
        """
        padded = F.pad(weights[NAME], (0, len(self.slopes) - self.rows.count))[:, None]
        return {NAME: self.rows.combine(torch.where(padded == 0, 0.0, padded * self.slopes))}

    def __add__(self, other: LinearGradients) -> LinearGradients:
        """Add gradients of the same records, at another iterate or of another loss."""
        self._require_same(other)
        slopes = self.slopes + other.slopes
        return LinearGradients(self.rows, slopes, lambda: self.losses + other.losses)

    def __rmul__(self, factor: float) -> LinearGradients:
        return LinearGradients(self.rows, factor * self.slopes, lambda: factor * self.losses)

    def _require_same(self, other: LinearGradients) -> None:
        if self.rows is not other.rows:
            raise ValueError(
                f"expected gradients of the same records, got those of {self.rows.count} and "
                f"{other.rows.count} records of two draws; compute both from the same rows"
            )


def linear_gradients(
    rows: RowSource, labels: Tensor, theta: Float64[Tensor, "classes width"], *, loss: ScoreLoss
) -> LinearGradients:
    """Return the gradient of every record's loss at θ; `labels` has one entry for each record."""
    z, y = rows.scores(theta), labels
    extra = len(z) - rows.count
    if extra:
        y = torch.cat([labels, labels.new_zeros(extra)])  # for the padding rows, which are 0
    scores = z if loss.vector else z[:, 0]
    slopes = loss.derivative(scores, y)
    return LinearGradients(
        rows,
        slopes if loss.vector else slopes[:, None],
        lambda: loss.value(scores, y)[: rows.count],
    )


def linear_difference(new: LinearGradients, old: LinearGradients) -> LinearGradients:
    """Return per-sample differences of gradients at two iterates: (ℓ'(z') − ℓ'(z)) ⊗ x."""
    return new + (-1.0) * old


@answerable
@dataclass(frozen=True)
class ClippedLinearSum:
    """The sum of the clipped gradients of these records at θ."""

    rows: RowSource
    labels: Tensor
    theta: Float64[Tensor, "classes width"]
    loss: ScoreLoss
    clip: Clip
    of_each_record: ClassVar[bool] = False

    def bounded(self, work: BatchPass | None) -> Bounded:
        """See `clipped_linear_sum`."""
        return clipped_linear_sum(
            self.rows, self.labels, self.theta, loss=self.loss, clip=self.clip
        )

    def event(self, noise_multiplier: float) -> DpEvent:
        """One Gaussian release."""
        return GaussianDpEvent(noise_multiplier)


def clipped_linear_sum(
    rows: RowSource,
    labels: Tensor,
    theta: Float64[Tensor, "classes width"],
    *,
    loss: ScoreLoss,
    clip: Clip,
) -> Bounded:
    """Sum the clipped gradients of these records, in parts of at most 1024.

    Guarantees: adding or removing one record moves the sum by at most `l2`.
    """
    total: Bounded | None = None
    for start in range(0, max(rows.count, 1), PART):
        stop = min(start + PART, rows.count)
        part = rows if rows.count <= PART else rows.take(slice(start, stop))
        gradients = linear_gradients(part, labels[start:stop], theta, loss=loss)
        norms = gradients.sq_norms()[NAME].sqrt()
        weights = clip.weights(norms[:, None])[:, 0]
        bounded = aggregate(gradients, {NAME: weights}, bound=clip.bound(1))
        total = bounded if total is None else total + bounded
    assert total is not None
    return total
