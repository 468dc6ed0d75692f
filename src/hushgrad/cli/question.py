"""What the accounting commands were asked: the options put together and checked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from dp_accounting import DpEvent

from hushgrad.accounting import (
    gaussian,
    poisson,
    repeated,
    truncated_poisson,
    without_replacement,
)
from hushgrad.types import Relation


class Sampling(Enum):
    """The ways of drawing a batch, as the command line spells them."""

    POISSON = "poisson"
    TRUNCATED_POISSON = "truncated-poisson"
    WITHOUT_REPLACEMENT = "without-replacement"
    FULL = "full"


@dataclass(frozen=True)
class Batches:
    """How batches are drawn, and the event of noise on one of them."""

    sampling: Sampling
    rate: float
    records: int | None
    batch: int | None
    max_batch: int | None

    def event(self, noise_multiplier: float) -> DpEvent:
        """Return the event of Gaussian noise on one batch."""
        noise = gaussian(noise_multiplier)
        if self.sampling is Sampling.FULL:
            return noise
        if self.sampling is Sampling.POISSON:
            return poisson(self.rate, noise)
        if self.sampling is Sampling.TRUNCATED_POISSON:
            assert self.max_batch is not None and self.records is not None
            records = self.records
            return truncated_poisson(self.rate, noise, max_batch=self.max_batch, records=records)
        # Only the ratio counts for this event, and a decimal rate is a ratio of whole numbers.
        ratio = Fraction(str(self.rate))
        batch, records = self.batch or ratio.numerator, self.records or ratio.denominator
        return without_replacement(batch, noise, records=records)


@dataclass(frozen=True)
class Question:
    """A run whose ε is asked for."""

    batches: Batches
    noise_multiplier: float
    steps: int
    delta: float
    relation: Relation

    @property
    def event(self) -> DpEvent:
        """The whole run as one event."""
        return self.after(self.steps)

    def after(self, steps: int) -> DpEvent:
        """Return the event of a run of so many steps."""
        return repeated(steps, self.batches.event(self.noise_multiplier))

    @property
    def warnings(self) -> list[str]:
        """What is allowed and rarely meant."""
        records = self.batches.records
        if records is None or self.delta * records < 1:
            return []
        return [
            f"delta {self.delta:g} is not below 1 / records = {1 / records:.2g}: publishing a "
            "record chosen at random would pass; use a smaller delta"
        ]


def batches_of(
    sampling: Sampling,
    *,
    rate: float | None,
    records: int | None,
    batch: int | None,
    max_batch: int | None,
) -> Batches:
    """Put the options on sampling together, or raise a sentence that says which ones to give."""
    _require_sizes(records, batch)
    if max_batch is not None and sampling is not Sampling.TRUNCATED_POISSON:
        raise ValueError(
            f"expected --max-batch with truncated-poisson only, got it with {sampling.value}; "
            "leave it out"
        )
    if sampling is Sampling.FULL:
        return _full(rate, records, batch)
    if (rate is None) == (records is None and batch is None):
        given = "neither" if rate is None else "both"
        raise ValueError(
            f"expected either --rate, or --records and --batch, got {given}; give one of the two"
        )
    if rate is not None:
        if not 0 < rate <= 1:
            raise ValueError(f"expected 0 < --rate <= 1, got {rate}; pass batch / records")
        if sampling is Sampling.TRUNCATED_POISSON:
            raise ValueError(
                "expected --records and --batch with truncated-poisson, whose cost depends on the "
                "number of records, got --rate; give the two"
            )
        return Batches(sampling, rate, None, None, None)
    if records is None or batch is None:
        missing = "--records" if records is None else "--batch"
        raise ValueError(f"expected --records and --batch together, got no {missing}; give both")
    if sampling is Sampling.TRUNCATED_POISSON:
        max_batch = batch if max_batch is None else max_batch
        if not 1 <= max_batch <= records:
            raise ValueError(
                f"expected 1 <= --max-batch <= --records, got {max_batch} of {records}; "
                "pass where batches are cut"
            )
    return Batches(sampling, batch / records, records, batch, max_batch)


def _require_sizes(records: int | None, batch: int | None) -> None:
    if records is not None and records < 1:
        raise ValueError(f"expected --records of 1 or more, got {records}; pass the data's size")
    if batch is not None and not 1 <= batch <= (records or batch):
        raise ValueError(
            f"expected 1 <= --batch <= --records, got {batch} of {records}; pass a smaller batch"
        )


def _full(rate: float | None, records: int | None, batch: int | None) -> Batches:
    if rate not in (None, 1.0) or batch not in (None, records):
        raise ValueError(
            "expected every record in each batch with full, got a --rate below 1 or a --batch "
            "other than --records; leave it out, or use poisson"
        )
    return Batches(Sampling.FULL, 1.0, records, records, None)
