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
    """A loss: the mean of another one over `count` (K) views of each record.

    A record is clipped once, for all its views: more views cost no privacy. A batch is worked on
    in pieces of a Kth of its usual size, so that they cost no memory either, but K times the time.

        loss = Views(lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none"), shifted, 8)

    Reference: De et al. 2022, Unlocking High-Accuracy Differentially Private Image
    Classification through Scale, section 3.2.
    """

    loss: Loss
    augment: Augment
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"expected count >= 1, got {self.count}; 1 is one view of each record")

    def __call__(self, batch: Batch) -> Tensor:
        """One loss for each record of the batch."""
        repeated = map_tensors(lambda x: x.repeat_interleave(self.count, 0), batch)
        losses: Tensor = self.loss(self.augment(repeated)).unflatten(0, (-1, self.count))
        return losses.mean(1)


def rows_per_record(loss: Loss) -> int:
    """How many rows of a model's input a record takes."""
    return loss.count if isinstance(loss, Views) else 1
