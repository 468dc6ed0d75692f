"""What the accounting commands were asked: the options put together and checked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from dp_accounting import DpEvent

from hushgrad.accounting import (
    SamplingOf,
    fixed_batches,
    full_batches,
    gaussian,
    poisson_batches,
    shuffled_batches,
    truncated_batches,
)
from hushgrad.sampling import Poisson, Sampling, WithoutReplacement
from hushgrad.types import Relation


class SamplingName(Enum):
    """The ways of drawing a batch, as the command line spells them."""

    POISSON = "poisson"
    TRUNCATED_POISSON = "truncated-poisson"
    WITHOUT_REPLACEMENT = "without-replacement"
    SHUFFLED = "shuffled"
    FULL = "full"


_NEEDS_SIZES = (SamplingName.TRUNCATED_POISSON, SamplingName.SHUFFLED)


@dataclass(frozen=True)
class Batches:
    """How batches are drawn: the sampling, for `among` records, and what was said of it."""

    name: SamplingName
    sampling: Sampling
    among: int
    rate: float
    records: int | None = None
    batch: int | None = None
    max_batch: int | None = None

    def run(self, noise_multiplier: float, steps: int) -> DpEvent:
        """Return the event of Gaussian noise on so many batches."""
        noise = gaussian(noise_multiplier)
        return self.sampling.run_event(noise, num_records=self.among, num_steps=steps)


@dataclass(frozen=True)
class Question:
    """A run whose ε is asked for, for one record and for a group of them."""

    batches: Batches
    noise_multiplier: float
    steps: int
    delta: float
    relation: Relation
    group: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(
                f"expected steps to be a whole number above 0, got {self.steps}; pass 1 or up"
            )

    @property
    def event(self) -> DpEvent:
        """The whole run as one event."""
        return self.after(self.steps)

    def after(self, steps: int) -> DpEvent:
        """Return the event of a run of so many steps."""
        return self.batches.run(self.noise_multiplier, steps)

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


def batches_from_options(
    name: SamplingName,
    *,
    rate: float | None,
    records: int | None,
    batch: int | None,
    max_batch: int | None,
) -> Batches:
    """Put the options on sampling together, or raise a sentence that says which ones to give."""
    _require_sizes(records, batch)
    if max_batch is not None and name is not SamplingName.TRUNCATED_POISSON:
        raise ValueError(
            f"expected --max-batch with truncated-poisson only, got it with {name.value}; "
            "leave it out"
        )
    if name is SamplingName.FULL:
        return _full(rate, records, batch)
    if (rate is None) == (records is None and batch is None):
        given = "neither" if rate is None else "both"
        raise ValueError(
            f"expected either --rate, or --records and --batch, got {given}; give one of the two"
        )
    if rate is not None:
        return _by_rate(name, rate)
    if records is None or batch is None:
        missing = "--records" if records is None else "--batch"
        raise ValueError(f"expected --records and --batch together, got no {missing}; give both")
    if name is SamplingName.TRUNCATED_POISSON:
        max_batch = batch if max_batch is None else max_batch
        if not 1 <= max_batch <= records:
            raise ValueError(
                f"expected 1 <= --max-batch <= --records, got {max_batch} of {records}; "
                "pass where batches are cut"
            )
    sampling = _drawn(name, max_batch)(batch, records)
    return Batches(name, sampling, records, batch / records, records, batch, max_batch)


def _drawn(name: SamplingName, max_batch: int | None) -> SamplingOf:
    if max_batch is not None:
        return truncated_batches(max_batch)
    return {
        SamplingName.POISSON: poisson_batches,
        SamplingName.WITHOUT_REPLACEMENT: fixed_batches,
        SamplingName.SHUFFLED: shuffled_batches,
    }[name]


def _require_sizes(records: int | None, batch: int | None) -> None:
    if records is not None and records < 1:
        raise ValueError(f"expected --records of 1 or more, got {records}; pass the data's size")
    if batch is not None and not 1 <= batch <= (records or batch):
        raise ValueError(
            f"expected 1 <= --batch <= --records, got {batch} of {records}; pass a smaller batch"
        )


def _by_rate(name: SamplingName, rate: float) -> Batches:
    if not 0 < rate <= 1:
        raise ValueError(f"expected 0 < --rate <= 1, got {rate}; pass batch / records")
    if name in _NEEDS_SIZES:
        raise ValueError(
            f"expected --records and --batch with {name.value}, whose cost depends on the number "
            "of records, got --rate; give the two"
        )
    if name is SamplingName.POISSON:  # its event does not depend on the number of records
        return Batches(name, Poisson(rate), 1, rate)
    # Only the ratio counts for this event, and a decimal rate is a ratio of whole numbers.
    ratio = Fraction(str(rate))
    return Batches(name, WithoutReplacement(ratio.numerator), ratio.denominator, rate)


def _full(rate: float | None, records: int | None, batch: int | None) -> Batches:
    if rate not in (None, 1.0) or batch not in (None, records):
        raise ValueError(
            "expected every record in each batch with full, got a --rate below 1 or a --batch "
            "other than --records; leave it out, or use poisson"
        )
    among = records or 1
    everything = full_batches(among, among)
    return Batches(SamplingName.FULL, everything, among, 1.0, records, records)
