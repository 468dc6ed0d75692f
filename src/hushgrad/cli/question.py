"""What the accounting commands were asked: the options put together and checked."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dp_accounting import DpEvent

from hushgrad.accounting import gaussian
from hushgrad.sampling import Sampling
from hushgrad.sampling.named import SAMPLERS, Sampler
from hushgrad.types import Relation


@dataclass(frozen=True)
class Batches:
    """How batches are drawn, as the options say.

    Args:
        name: the sampler's name in `SAMPLERS`.
        sampling: what draws the batches and states their cost.
        among: the number of records that the cost is computed for.
        rate: the share of the records that a batch is expected to have, q.
        records: the number of records, None where only the rate was given.
        batch: the size of a batch, None where only the rate was given.
        max_batch: where batches are cut, None where they are not.
    """

    name: str
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
    """A run whose ε is asked for, for one record and for a group of them.

    Args:
        batches: how its batches are drawn.
        noise_multiplier: σ.
        steps: how many batches are released, T.
        delta: δ.
        relation: what makes two data sets neighbours.
        group: how many records a second ε is to protect at once, k.

    Raises:
        ValueError: there is no step.
    """

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
    name: str,
    *,
    rate: float | None,
    records: int | None,
    batch: int | None,
    max_batch: int | None,
) -> Batches:
    """Put the options on sampling together.

    Args:
        name: a sampler's name in `SAMPLERS`.
        rate: batch ÷ records, in place of the two.
        records: the number of records.
        batch: the size of a batch, or its expectation.
        max_batch: where batches are cut.

    Raises:
        ValueError: the options do not go together; the message says which ones to give.

    >>> drawn = batches_from_options("poisson", rate=0.01, records=None, batch=None, max_batch=None)
    >>> drawn.sampling
    Poisson(rate=0.01)
    """
    sampler = SAMPLERS[name]
    _require_sizes(records, batch)
    if max_batch is not None and sampler.capped is None:
        cut = ", ".join(other for other, each in SAMPLERS.items() if each.capped is not None)
        raise ValueError(f"expected --max-batch with {cut} only, got it with {name}; leave it out")
    if sampler.whole:
        return _whole(name, rate, records, batch)
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
    sampling, max_batch = _drawn(sampler, batch, records, max_batch)
    return Batches(name, sampling, records, batch / records, records, batch, max_batch)


def _drawn(
    sampler: Sampler, batch: int, records: int, max_batch: int | None
) -> tuple[Sampling, int | None]:
    """The sampling, and where its batches are cut: at the expected size if nothing was said."""
    if sampler.capped is None:
        return sampler.of(batch, records), None
    most = batch if max_batch is None else max_batch
    if not 1 <= most <= records:
        raise ValueError(
            f"expected 1 <= --max-batch <= --records, got {most} of {records}; pass where batches "
            "are cut"
        )
    return sampler.capped(most)(batch, records), most


def _require_sizes(records: int | None, batch: int | None) -> None:
    if records is not None and records < 1:
        raise ValueError(f"expected --records of 1 or more, got {records}; pass the data's size")
    if batch is not None and not 1 <= batch <= (records or batch):
        raise ValueError(
            f"expected 1 <= --batch <= --records, got {batch} of {records}; pass a smaller batch"
        )


def _by_rate(name: str, rate: float) -> Batches:
    if not 0 < rate <= 1:
        raise ValueError(f"expected 0 < --rate <= 1, got {rate}; pass batch / records")
    if not SAMPLERS[name].by_rate:
        raise ValueError(
            f"expected --records and --batch with {name}, whose cost depends on the number of "
            "records, got --rate; give the two"
        )
    # Only the ratio counts for these events, and a decimal rate is a ratio of whole numbers.
    ratio = Fraction(str(rate))
    sampling = SAMPLERS[name].of(ratio.numerator, ratio.denominator)
    return Batches(name, sampling, ratio.denominator, rate)


def _whole(name: str, rate: float | None, records: int | None, batch: int | None) -> Batches:
    if rate not in (None, 1.0) or batch not in (None, records):
        raise ValueError(
            f"expected every record in each batch with {name}, got a --rate below 1 or a --batch "
            "other than --records; leave it out, or use poisson"
        )
    among = records or 1  # the cost of full batches does not depend on it
    sampling = SAMPLERS[name].of(among, among)
    return Batches(name, sampling, among, 1.0, records, records)
