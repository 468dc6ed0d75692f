"""The description of an ordinary run: every step adds Gaussian noise to the sum of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from dp_accounting import DpEvent

from hushgrad.accounting.events import gaussian
from hushgrad.sampling.named import SamplingOf, poisson_batches


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
