"""An ordinary run: Gaussian noise on a batch of the same kind at every step."""

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
"""A batch's size and the number of records, to the sampling that draws such batches."""


def poisson_batches(batch: int, records: int) -> Sampling:
    """Each record by itself with probability batch / records: the default."""
    return Poisson(batch / records)


def fixed_batches(batch: int, records: int) -> Sampling:
    """Batches of one size, drawn without replacement and anew at each step."""
    return WithoutReplacement(batch)


def shuffled_batches(batch: int, records: int) -> Sampling:
    """Shuffled epochs in batches of one size, without amplification."""
    return Shuffled(batch)


def full_batches(batch: int, records: int) -> Sampling:
    """Every record at every step."""
    return FullBatch()


def truncated_batches(max_batch: int) -> SamplingOf:
    """Poisson sampling in which a batch larger than `max_batch` is cut to it at random."""
    return lambda batch, records: TruncatedPoisson(batch / records, max_batch)


@dataclass(frozen=True)
class Training:
    """A run of `steps` steps (T) on batches of `batch` out of `records`.

    `noise_multiplier` (σ) is noise ÷ the bound on one record, under every relation. One of
    `batch`, `noise_multiplier` and `steps` may be None, for `calibrate` to find.
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
        """The names of what is None."""
        names = ("batch", "noise_multiplier", "steps")
        return [name for name in names if getattr(self, name) is None]

    @property
    def event(self) -> DpEvent:
        """The whole run as one event, which its sampling states."""
        if self.batch is None or self.noise_multiplier is None or self.steps is None:
            raise ValueError(
                f"expected a run with every number given, got none for "
                f"{', '.join(self.missing)}; find it with calibrate"
            )
        sampling, noise = self.drawn(self.batch, self.records), gaussian(self.noise_multiplier)
        return sampling.run_event(noise, num_records=self.records, num_steps=self.steps)
