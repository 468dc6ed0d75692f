"""Batches of a fixed size: random sets, shuffled epochs, or all records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import dp_accounting as dp
import numpy as np

from hushgrad.events import Participation, ShuffledDpEvent, on_one_batch, repeated
from hushgrad.rng import Rng
from hushgrad.sampling.draws import Positions, slice_of_shuffle, subset
from hushgrad.sampling.scheme import (
    ANY_RELATION,
    SAME_SIZE,
    Sampling,
    every_position,
    refuse_resizing,
    require_batch,
    require_whole,
)
from hushgrad.types import Relation


@dataclass(frozen=True)
class WithoutReplacement:
    """Sampling without replacement: `batch` different records at each step, drawn anew.

    Guarantees: all sets of this size are equally likely. Batches have a fixed size, so there is
    no add/remove guarantee.

    Args:
        batch: the number of records in each batch.

    Raises:
        ValueError: if `batch` is not a whole number above 0.

    Example:
        >>> WithoutReplacement(3).draw(10, step=0, rng=Rng.fixed(0))
        array([0, 3, 9])

    Reference: Wang, Balle and Kasiviswanathan 2019, Subsampled Rényi DP, Theorem 9.
    """

    batch: int
    relations: ClassVar[frozenset[Relation]] = SAME_SIZE
    sees_all: ClassVar[bool] = False
    participation: ClassVar[None] = None
    loader: ClassVar[None] = None

    def __post_init__(self) -> None:
        require_whole("batch", self.batch)

    @property
    def statement(self) -> str:
        """The words by which a guarantee names the sampling."""
        return f"{self.batch} records without replacement"

    def span(self, num_records: int, *, length: int) -> int:
        """Return the public count: neighbours have the same size; missing records stay empty."""
        return num_records

    def draw(self, num_records: int, *, step: int, rng: Rng) -> Positions:
        """Return the positions in the batch of one step."""
        require_batch(self.batch, num_records)
        return subset(self.batch, num_records=num_records, rng=rng.derive("sample", step))

    def expected_batch(self, num_records: int) -> float:
        """Return the size of every batch."""
        return float(self.batch)

    def resized(self, batch: int, *, num_records: int) -> WithoutReplacement | FullBatch:
        """Return sampling with batches of another size; `FullBatch` for all records."""
        return FullBatch() if batch == num_records else WithoutReplacement(batch)

    def epoch(self, num_records: int) -> None:
        """None: each step draws independently."""

    def amplify(self, event: dp.DpEvent, *, num_records: int) -> dp.DpEvent:
        """Return the event, sampled without replacement from the public number of records."""
        require_batch(self.batch, num_records)
        event = on_one_batch(event)
        if isinstance(event, dp.NonPrivateDpEvent):
            return event
        return dp.SampledWithoutReplacementDpEvent(num_records, self.batch, event)

    def run_event(self, event: dp.DpEvent, *, num_records: int, num_steps: int) -> dp.DpEvent:
        """Return one sampled event for each step."""
        return repeated(num_steps, self.amplify(event, num_records=num_records))


@dataclass(frozen=True)
class FullBatch:
    """Full batches: all records at every step, as in gradient descent; no amplification.

    Example:
        >>> FullBatch().draw(4, step=0, rng=Rng.fixed(0))
        array([0, 1, 2, 3])
    """

    relations: ClassVar[frozenset[Relation]] = ANY_RELATION
    sees_all: ClassVar[bool] = True
    participation: ClassVar[Participation] = Participation(1, 1.0)
    loader: ClassVar[None] = None

    @property
    def statement(self) -> str:
        """The words by which a guarantee names the sampling."""
        return "full batches"

    def span(self, num_records: int, *, length: int) -> int:
        """Return a span that covers every record."""
        return every_position(num_records, length)

    def draw(self, num_records: int, *, step: int, rng: Rng) -> Positions:
        """Return every position."""
        require_whole("num_records", num_records)
        return np.arange(num_records)

    def expected_batch(self, num_records: int) -> float:
        """Return the public number of records."""
        return float(num_records)

    def resized(self, batch: int, *, num_records: int) -> Sampling:
        """Raise `Refused`: a full batch cannot have another size."""
        raise refuse_resizing(self)

    def epoch(self, num_records: int) -> None:
        """None: each step takes all records."""

    def amplify(self, event: dp.DpEvent, *, num_records: int) -> dp.DpEvent:
        """Return the event unchanged: nothing is random."""
        return event

    def run_event(self, event: dp.DpEvent, *, num_records: int, num_steps: int) -> dp.DpEvent:
        """Return the event once for each step."""
        return repeated(num_steps, event)


@dataclass(frozen=True)
class Shuffled:
    """Shuffled epochs in batches of `batch`; no amplification is claimed.

    Guarantees: each record is in exactly one batch of an epoch. The last batch of an epoch may be
    smaller; its sum is divided by `batch` like the others.

    Args:
        batch: the number of records in a batch.

    Raises:
        ValueError: if `batch` is not a whole number above 0.

    Example:
        >>> scheme = Shuffled(2)
        >>> [scheme.draw(5, step=step, rng=Rng.fixed(0)).tolist() for step in range(3)]
        [[1, 2], [3, 4], [0]]

    Reference: Chua et al. 2024, How Private are DP-SGD Implementations?, on why shuffling must not
    be accounted for as Poisson sampling.
    """

    batch: int
    relations: ClassVar[frozenset[Relation]] = SAME_SIZE
    sees_all: ClassVar[bool] = False
    participation: ClassVar[None] = None
    loader: ClassVar[None] = None

    def __post_init__(self) -> None:
        require_whole("batch", self.batch)

    @property
    def statement(self) -> str:
        """The words by which a guarantee names the sampling."""
        return f"shuffled epochs in batches of {self.batch}, no amplification"

    def epoch(self, num_records: int) -> int:
        """Return the number of batches in an epoch, in which each record comes once."""
        require_batch(self.batch, num_records)
        return -(-num_records // self.batch)

    def span(self, num_records: int, *, length: int) -> int:
        """Return the public count: neighbours have the same size; missing records stay empty."""
        return num_records

    def draw(self, num_records: int, *, step: int, rng: Rng) -> Positions:
        """Return the positions in the batch of one step."""
        epoch, place = divmod(step, self.epoch(num_records))
        start = place * self.batch
        key = rng.derive("sample", "epoch", epoch)
        return slice_of_shuffle(num_records, start=start, stop=start + self.batch, rng=key)

    def expected_batch(self, num_records: int) -> float:
        """Return the size of every batch, except perhaps the last of an epoch."""
        return float(self.batch)

    def resized(self, batch: int, *, num_records: int) -> Sampling:
        """Raise `Refused`: all batches of an epoch have one size."""
        raise refuse_resizing(self)

    def amplify(self, event: dp.DpEvent, *, num_records: int) -> dp.DpEvent:
        """Return the event of a whole epoch: adding it up per step is sound, but loose."""
        return ShuffledDpEvent(1, event)

    def run_event(self, event: dp.DpEvent, *, num_records: int, num_steps: int) -> dp.DpEvent:
        """Return the event once for each epoch that begins.

        The order does not depend on the data. Given the order, replacing a record changes one
        batch of the epoch, and the other steps only through what was released, so an epoch costs
        as much as one of its batches (parallel composition). The event refuses add/remove.
        """
        epochs = -(-num_steps // self.epoch(num_records))
        return ShuffledDpEvent(epochs, event) if epochs else repeated(0, event)
