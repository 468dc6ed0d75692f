"""Batches of a fixed size: random sets, shuffled epochs, or all records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import dp_accounting as dp
import numpy as np

from hushgrad.events import Participation, ShuffledDpEvent, on_one_batch, repeated
from hushgrad.rng import Rng
from hushgrad.sampling.draws import Positions, dealt, subset
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
    """`batch` different records at each step, every set of them equally likely."""

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
        """The public count: data sets have one size, and positions without a record are empty."""
        return num_records

    def draw(self, num_records: int, *, step: int, rng: Rng) -> Positions:
        """The positions in the batch of one step."""
        require_batch(self.batch, num_records)
        return subset(self.batch, num_records=num_records, rng=rng.derive("sample", step))

    def expected_batch(self, num_records: int) -> float:
        """The size of every batch."""
        return float(self.batch)

    def resized(self, batch: int, *, num_records: int) -> WithoutReplacement | FullBatch:
        """Sets of another size; all records where that is their number."""
        return FullBatch() if batch == num_records else WithoutReplacement(batch)

    def epoch(self, num_records: int) -> None:
        """Each step draws by itself."""

    def amplify(self, event: dp.DpEvent, *, num_records: int) -> dp.DpEvent:
        """The event sampled without replacement from the public number of records."""
        require_batch(self.batch, num_records)
        event = on_one_batch(event)
        if isinstance(event, dp.NonPrivateDpEvent):
            return event
        return dp.SampledWithoutReplacementDpEvent(num_records, self.batch, event)

    def run_event(self, event: dp.DpEvent, *, num_records: int, num_steps: int) -> dp.DpEvent:
        """One sampled event for each step."""
        return repeated(num_steps, self.amplify(event, num_records=num_records))


@dataclass(frozen=True)
class FullBatch:
    """All records at every step, as in gradient descent."""

    relations: ClassVar[frozenset[Relation]] = ANY_RELATION
    sees_all: ClassVar[bool] = True
    participation: ClassVar[Participation] = Participation(1, 1.0)
    loader: ClassVar[None] = None

    @property
    def statement(self) -> str:
        """The words by which a guarantee names the sampling."""
        return "full batches"

    def span(self, num_records: int, *, length: int) -> int:
        """Every record takes part."""
        return every_position(num_records, length)

    def draw(self, num_records: int, *, step: int, rng: Rng) -> Positions:
        """Every position."""
        require_whole("num_records", num_records)
        return np.arange(num_records)

    def expected_batch(self, num_records: int) -> float:
        """The public number of records."""
        return float(num_records)

    def resized(self, batch: int, *, num_records: int) -> Sampling:
        """Refused: these are all records."""
        raise refuse_resizing(self)

    def epoch(self, num_records: int) -> None:
        """Each step takes all."""

    def amplify(self, event: dp.DpEvent, *, num_records: int) -> dp.DpEvent:
        """The event as it is: nothing is left to chance."""
        return event

    def run_event(self, event: dp.DpEvent, *, num_records: int, num_steps: int) -> dp.DpEvent:
        """The event once for each step."""
        return repeated(num_steps, event)


@dataclass(frozen=True)
class Shuffled:
    """Epochs in a random order cut into batches of `batch`; no amplification is claimed.

    The last batch of an epoch holds what is left, and is divided by `batch` like the others.
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
        """The number of batches in which each record comes once."""
        require_batch(self.batch, num_records)
        return -(-num_records // self.batch)

    def span(self, num_records: int, *, length: int) -> int:
        """The public count: data sets have one size, and positions without a record are empty."""
        return num_records

    def draw(self, num_records: int, *, step: int, rng: Rng) -> Positions:
        """The positions in the batch of one step."""
        epoch, place = divmod(step, self.epoch(num_records))
        start = place * self.batch
        key = rng.derive("sample", "epoch", epoch)
        return dealt(num_records, start=start, stop=start + self.batch, rng=key)

    def expected_batch(self, num_records: int) -> float:
        """The size of every batch but the last of an epoch."""
        return float(self.batch)

    def resized(self, batch: int, *, num_records: int) -> Sampling:
        """Refused: an epoch is cut into batches of one size."""
        raise refuse_resizing(self)

    def amplify(self, event: dp.DpEvent, *, num_records: int) -> dp.DpEvent:
        """The event of a whole epoch. Adding up every step's is sound; `run_event` is tighter."""
        return ShuffledDpEvent(1, event)

    def run_event(self, event: dp.DpEvent, *, num_records: int, num_steps: int) -> dp.DpEvent:
        """The event once for each epoch begun.

        The order is drawn without looking at the data. Given it, replacing a record changes one
        batch of the epoch and the others only through what was released, so that an epoch costs
        what one of its batches does. The event itself refuses add/remove.
        """
        epochs = -(-num_steps // self.epoch(num_records))
        return ShuffledDpEvent(epochs, event) if epochs else repeated(0, event)
