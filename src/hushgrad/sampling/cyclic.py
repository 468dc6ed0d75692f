"""Cyclic Poisson sampling: records in groups that take turns, each sampled at random.

Between two steps that a record can be in lie `cycle` − 1 others. Noise that is correlated over no
more than `cycle` steps is then amplified by sampling, as independent noise is.

Reference: Choquette-Choo et al. 2023, (Amplified) Banded Matrix Factorization, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import dp_accounting as dp
import numpy as np

from hushgrad.events import Participation, on_one_batch, repeated
from hushgrad.rng import Rng
from hushgrad.sampling.draws import Positions, independent_draws
from hushgrad.sampling.scheme import (
    ANY_RELATION,
    every_position,
    require_rate,
    require_whole,
)
from hushgrad.types import Relation

_SURE = 1 - 1e-12
"""A chance above it is taken for 1: cycle · (1 / cycle) need not be 1 in floating point."""


@dataclass(frozen=True)
class CyclicPoisson:
    """Each record in one of `cycle` (b) groups for the whole run; groups take turns.

    Step t draws from group t mod b, each record by itself with probability b·`rate`, so that a
    batch has n·`rate` records on average, as with `Poisson(rate)`. A record's group is drawn from
    the run's key by its position alone: it does not depend on the data, and every group is as
    likely as any other.

    Args:
        rate: the expected batch ÷ the number of records (q), at most 1 / cycle.
        cycle: the number of groups (b), and of the steps between two turns of a record.

    Raises:
        ValueError: if a group would have to be sampled at a rate above 1.

    >>> CyclicPoisson(rate=0.1, cycle=4).draw(20, step=0, rng=Rng.fixed(0))
    array([1])
    """

    rate: float
    cycle: int
    relations: ClassVar[frozenset[Relation]] = ANY_RELATION
    loader: ClassVar[None] = None

    def __post_init__(self) -> None:
        require_rate(self.rate)
        require_whole("cycle", self.cycle)
        if self.rate * self.cycle > 2 - _SURE:
            raise ValueError(
                f"expected rate * cycle <= 1, got {self.rate:g} * {self.cycle}, by which a group "
                "would have too few records for a batch; use a smaller cycle or a smaller batch"
            )

    @property
    def group_rate(self) -> float:
        """The probability b·q with which a record is drawn when its group's turn comes."""
        chance = self.rate * self.cycle
        return 1.0 if chance > _SURE else chance

    @property
    def statement(self) -> str:
        """The words by which a guarantee names the sampling."""
        return f"cyclic Poisson sampling, {self.cycle} groups, q = {self.group_rate:g} of a group"

    @property
    def sees_all(self) -> bool:
        """True for one group that is taken whole."""
        return self.cycle == 1 and self.group_rate == 1

    @property
    def participation(self) -> Participation:
        """At the turns of its group."""
        return Participation(self.cycle, self.group_rate)

    def span(self, num_records: int, *, length: int) -> int:
        """Every record takes part."""
        return every_position(num_records, length)

    def draw(self, num_records: int, *, step: int, rng: Rng) -> Positions:
        """The positions in the batch of one step."""
        require_whole("num_records", num_records)
        members = np.flatnonzero(self.groups(num_records, rng=rng) == step % self.cycle)
        taken = independent_draws(
            len(members), rate=self.group_rate, rng=rng.derive("sample", step)
        )
        return np.take(members, taken)

    def groups(self, num_records: int, *, rng: Rng) -> Positions:
        """The group of each position, the same for every step; a longer list begins with it.

        Each is uniform, up to 2⁻⁵² for each of the groups.
        """
        chances = rng.derive("group", self.cycle).uniforms(num_records)
        groups: Positions = (chances * self.cycle).astype(np.int64)  # cut off towards 0
        return groups

    def expected_batch(self, num_records: int) -> float:
        """The mean size n·q: the divisor, whatever the size of a batch turns out to be."""
        return num_records * self.rate

    def resized(self, batch: int, *, num_records: int) -> CyclicPoisson:
        """The same groups, sampled at another rate."""
        return CyclicPoisson(batch / num_records, self.cycle)

    def epoch(self, num_records: int) -> None:
        """Each step draws by itself."""

    def amplify(self, event: dp.DpEvent, *, num_records: int) -> dp.DpEvent:
        """The Poisson-sampled event of a step at which it is the record's turn."""
        event = on_one_batch(event)
        if self.group_rate == 1 or isinstance(event, dp.NonPrivateDpEvent):
            return event
        return dp.PoissonSampledDpEvent(self.group_rate, event)

    def run_event(self, event: dp.DpEvent, *, num_records: int, num_steps: int) -> dp.DpEvent:
        """One Poisson-sampled event for each turn of a record's group, ⌈T/b⌉ at most.

        Given the groups, the steps of other groups do not depend on the record. A run whose
        groups are drawn is a mixture of such runs, and no worse than the worst of them.
        """
        turns = -(-num_steps // self.cycle)
        return repeated(turns, self.amplify(event, num_records=num_records))
