"""The description of an ordinary run: every step adds Gaussian noise to the sum of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dp_accounting import DpEvent

from hushgrad.accounting.events import gaussian
from hushgrad.sampling import (
    FullBatch,
    Poisson,
    Sampling,
    Shuffled,
    TruncatedPoisson,
    WithoutReplacement,
)

SamplingOf = Callable[[int, int], Sampling]
"""Maps a batch size and the number of records to the sampling that draws such batches."""


def poisson_batches(batch: int, records: int) -> Sampling:
    """Return Poisson sampling with probability batch / records, the default.

    Args:
        batch: the expected batch size.
        records: the public number of records.

    Example:
        >>> poisson_batches(10, 1000)
        Poisson(rate=0.01)
    """
    return Poisson(batch / records)


def fixed_batches(batch: int, records: int) -> Sampling:
    """Return sampling without replacement, independently at each step.

    Args:
        batch: the batch size.
        records: the public number of records; ignored.

    Example:
        >>> fixed_batches(10, 1000)
        WithoutReplacement(batch=10)
    """
    return WithoutReplacement(batch)


def shuffled_batches(batch: int, records: int) -> Sampling:
    """Return shuffled epochs in batches of one size, without amplification.

    Args:
        batch: the batch size.
        records: the public number of records; ignored.

    Example:
        >>> shuffled_batches(10, 1000)
        Shuffled(batch=10)
    """
    return Shuffled(batch)


def full_batches(batch: int, records: int) -> Sampling:
    """Return full batches: every record at every step.

    Args:
        batch: ignored.
        records: the public number of records; ignored.

    Example:
        >>> full_batches(1000, 1000)
        FullBatch()
    """
    return FullBatch()


def truncated_batches(max_batch: int) -> SamplingOf:
    """Return a choice of Poisson sampling that truncates batches above `max_batch`.

    Args:
        max_batch: the largest batch.

    Example:
        >>> truncated_batches(16)(10, 1000)
        TruncatedPoisson(rate=0.01, max_batch=16)
    """
    return lambda batch, records: TruncatedPoisson(batch / records, max_batch)


@dataclass(frozen=True)
class Training:
    """An ordinary run: steps of Gaussian noise on sampled batches.

    One of `batch`, `noise_multiplier` and `steps` may be None, for `calibrate` to find.

    Args:
        records: the public number of records.
        batch: the (expected) batch size.
        noise_multiplier: σ, noise ÷ the bound on one record, under every relation.
        steps: T, the number of steps.
        drawn: how batches are sampled: `poisson_batches`, `fixed_batches`, ….

    Raises:
        ValueError: if the batch exceeds the records, or there are no steps.

    Example:
        >>> Training(records=1000, batch=10, noise_multiplier=None, steps=100).missing
        ['noise_multiplier']
    """

    records: int
    batch: int | None
    noise_multiplier: float | None
    steps: int | None
    drawn: SamplingOf = poisson_batches

    def __post_init__(self) -> None:
        if self.batch is not None and not 1 <= self.batch <= self.records:
            raise ValueError(
                f"expected 1 <= batch <= records, got batch {self.batch} of {self.records} "
                "records; pass a smaller batch"
            )
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"expected steps >= 1, got {self.steps}; pass how many to take")

    @property
    def missing(self) -> list[str]:
        """The names of the numbers that are None."""
        names = ("batch", "noise_multiplier", "steps")
        return [name for name in names if getattr(self, name) is None]

    @property
    def event(self) -> DpEvent:
        """The whole run as one event."""
        if self.batch is None or self.noise_multiplier is None or self.steps is None:
            raise ValueError(
                f"expected a run with all numbers, got None for {', '.join(self.missing)}; find "
                "it with calibrate"
            )
        sampling, noise = self.drawn(self.batch, self.records), gaussian(self.noise_multiplier)
        return sampling.run_event(noise, num_records=self.records, num_steps=self.steps)
