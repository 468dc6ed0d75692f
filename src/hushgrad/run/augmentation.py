"""Augmentation multiplicity: several views of a record, averaged inside it before it is clipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hushgrad.batches.records import map_tensors
from hushgrad.types import Batch, Loss

Augment = Callable[[Batch], Batch]
"""Draws a random view of each record of a batch, each by itself."""


@dataclass(frozen=True)
class Views:
    """A loss: the mean of another loss over `count` (K) random views of each record.

    Guarantees: a record is clipped once, for all its views, so more views cost no privacy.

    A batch is processed in micro-batches of a Kth of their usual size, so views need no more
    memory, but K times the computation.

    Args:
        loss: maps a batch of views to one loss for each.
        augment: draws a random view of each record, independently of the others.
        count: K, the number of views.

    Raises:
        ValueError: if `count` is below 1.

    Example:
        >>> import torch
        >>> noisy = lambda x: x + torch.randn_like(x)
        >>> loss = Views(lambda x: x.square().sum(1), noisy, count=8)
        >>> loss(torch.zeros(5, 3)).shape
        torch.Size([5])

    Reference: De et al. 2022, Unlocking High-Accuracy Differentially Private Image Classification
    through Scale, section 3.2.
    """

    loss: Loss
    augment: Augment
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"expected count >= 1, got {self.count}; 1 is one view of each record")

    def __call__(self, batch: Batch) -> Tensor:
        """Return one loss for each record of the batch."""
        # A record's views follow one another, so that unflatten puts them together.
        repeated = map_tensors(lambda x: x.repeat_interleave(self.count, 0), batch)
        losses: Tensor = self.loss(self.augment(repeated)).unflatten(0, (-1, self.count))
        return losses.mean(1)


def rows_per_record(loss: Loss) -> int:
    """Return how many rows of a model's input a record takes."""
    return loss.count if isinstance(loss, Views) else 1
