"""Poisson sampling: each record is drawn independently, with or without a largest batch size.

Reference: for truncation, https://arxiv.org/abs/2508.15089.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import dp_accounting as dp
import numpy as np
from scipy import stats

from hushgrad.events import Participation, on_one_batch, repeated
from hushgrad.rng import Rng
from hushgrad.sampling.draws import Positions, independent_draws, subset
from hushgrad.sampling.fixed import FullBatch
from hushgrad.sampling.scheme import (
    ANY_RELATION,
    Sampling,
    every_position,
    refuse_resizing,
    require_rate,
    require_whole,
)
from hushgrad.types import Refused, Relation


@dataclass(frozen=True)
class Poisson:
    """Poisson sampling: each record is in a batch independently with probability `rate` (q).

    Guarantees: the drawn probability is `rate` up to 2⁻⁴⁹. Batches vary in size and can be empty;
    sums are divided by the expected size.

    Args:
        rate: q, the batch size ÷ the number of records.

    Raises:
        ValueError: if `rate` is not between 2⁻³² and 1.

    Example:
        >>> scheme = Poisson(rate=0.2)
        >>> scheme.expected_batch(12), scheme.draw(12, step=0, rng=Rng.fixed(0))
        (2.4000000000000004, array([ 3,  9, 10]))

    Reference: Abadi et al. 2016, Deep Learning with Differential Privacy, Algorithm 1.
    """

    rate: float
    relations: ClassVar[frozenset[Relation]] = ANY_RELATION
    sees_all: ClassVar[bool] = False
    loader: ClassVar[None] = None

    def __post_init__(self) -> None:
        require_rate(self.rate)

    @property
    def statement(self) -> str:
        """The words by which a guarantee names the sampling."""
        return f"Poisson sampling, q = {self.rate:g}"

    @property
    def participation(self) -> Participation:
        """At any step."""
        return Participation(1, self.rate)

    def span(self, num_records: int, *, length: int) -> int:
        """Return a span that covers every record."""
        return every_position(num_records, length)

    def draw(self, num_records: int, *, step: int, rng: Rng) -> Positions:
        """Return the positions in the batch of one step.

        >>> Poisson(rate=0.2).draw(12, step=0, rng=Rng.fixed(0))
        array([ 3,  9, 10])
        """
        require_whole("num_records", num_records)
        return independent_draws(num_records, rate=self.rate, rng=rng.derive("sample", step))

    def expected_batch(self, num_records: int) -> float:
        """Return the mean size n·q, by which every sum is divided whatever its batch's size."""
        return num_records * self.rate

    def resized(self, batch: int, *, num_records: int) -> Poisson | FullBatch:
        """Return Poisson sampling at another rate; `FullBatch` for a rate of 1."""
        return FullBatch() if batch == num_records else Poisson(batch / num_records)

    def epoch(self, num_records: int) -> None:
        """None: each step draws independently."""

    def amplify(self, event: dp.DpEvent, *, num_records: int) -> dp.DpEvent:
        """Return the Poisson-sampled event, which does not depend on the number of records."""
        event = on_one_batch(event)
        if self.rate == 1 or isinstance(event, dp.NonPrivateDpEvent):
            return event
        return dp.PoissonSampledDpEvent(self.rate, event)

    def run_event(self, event: dp.DpEvent, *, num_records: int, num_steps: int) -> dp.DpEvent:
        """Return one Poisson-sampled event for each step."""
        return repeated(num_steps, self.amplify(event, num_records=num_records))


@dataclass(frozen=True)
class TruncatedPoisson:
    """Poisson sampling that cuts batches above `max_batch` to a random subset of that size.

    Its accounting depends on the public `num_records`, which must be at least the number of
    records. Positions without a record are drawn and truncated like the others, and add nothing.
    So, given truncation, the batches of neighbours differ by replacing one record, as
    dp_accounting's event assumes.

    Args:
        rate: q, the probability of each record.
        max_batch: the largest batch.

    Raises:
        ValueError: if `rate` is not between 2⁻³² and 1, or `max_batch` is not a whole number.

    Example:
        >>> scheme = TruncatedPoisson(rate=0.5, max_batch=4)
        >>> scheme.draw(12, step=0, rng=Rng.fixed(0))
        array([1, 4, 5, 6])

    Reference: https://arxiv.org/abs/2508.15089.
    """

    rate: float
    max_batch: int
    relations: ClassVar[frozenset[Relation]] = ANY_RELATION
    sees_all: ClassVar[bool] = False
    participation: ClassVar[None] = None
    loader: ClassVar[None] = None

    def __post_init__(self) -> None:
        require_rate(self.rate)
        require_whole("max_batch", self.max_batch)

    @property
    def statement(self) -> str:
        """The words by which a guarantee names the sampling."""
        return f"Poisson sampling, q = {self.rate:g}, truncated to {self.max_batch} records"

    def span(self, num_records: int, *, length: int) -> int:
        """Return the public count, on which the accounting depends.

        Raises:
            Refused: if there are more records than that.
        """
        if length > num_records:
            raise Refused(
                "expected at most num_records records with TruncatedPoisson, whose accounting "
                f"depends on their number, got more than {num_records}; plan for a larger public "
                "number, or use Poisson"
            )
        return num_records

    def draw(self, num_records: int, *, step: int, rng: Rng) -> Positions:
        """Return the positions in the batch of one step."""
        require_whole("num_records", num_records)
        key = rng.derive("sample", step)
        drawn = independent_draws(num_records, rate=self.rate, rng=key)
        if len(drawn) <= self.max_batch:
            return drawn
        kept = subset(self.max_batch, num_records=len(drawn), rng=key.derive("truncate"))
        return np.take(drawn, kept)

    def expected_batch(self, num_records: int) -> float:
        """Return the mean size E[min(K, max_batch)], K binomial (n, q)."""
        most, rate = self.max_batch, self.rate
        whole = num_records * rate * stats.binom.cdf(most - 1, num_records - 1, rate)
        return float(whole + most * stats.binom.sf(most, num_records, rate))

    def resized(self, batch: int, *, num_records: int) -> Sampling:
        """Raise `Refused`: truncated batches have one maximal size."""
        raise refuse_resizing(self)

    def epoch(self, num_records: int) -> None:
        """None: each step draws independently."""

    def amplify(self, event: dp.DpEvent, *, num_records: int) -> dp.DpEvent:
        """Return the truncated event, which exists for Gaussian noise only."""
        event = on_one_batch(event)
        if isinstance(event, dp.NonPrivateDpEvent):
            return event
        if not isinstance(event, dp.GaussianDpEvent):
            raise Refused(
                f"expected Gaussian noise on truncated batches, got {event}; sample with "
                f"Poisson({self.rate:g}), or add Gaussian noise"
            )
        return dp.TruncatedSubsampledGaussianDpEvent(
            dataset_size=num_records,
            sampling_probability=self.rate,
            truncated_batch_size=self.max_batch,
            noise_multiplier=event.noise_multiplier,
        )

    def run_event(self, event: dp.DpEvent, *, num_records: int, num_steps: int) -> dp.DpEvent:
        """Return one truncated event for each step."""
        return repeated(num_steps, self.amplify(event, num_records=num_records))
