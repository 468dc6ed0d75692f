"""The methods of paper C's Table 2: what each is planned with, and how it was tuned.

Rates, batches and step lengths were tried out on a9a itself, which no guarantee covers: they are
non-private knowledge. The clipping norms C1 = 1 and C2 = 0.01, and γ = C2, are the paper's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hushgrad.accounting import PLD, RDP, Accountant
from hushgrad.algorithms import (
    Agd,
    Algorithm,
    PerDistance,
    Sgd,
    SpiderBoost,
    Srm,
    average,
    rrpsgd,
    storm,
    unclipped,
)
from hushgrad.clipping import Clip, abadi, automatic
from hushgrad.plan import Plan, plan
from hushgrad.sampling import FullBatch, Sampling, WithoutReplacement
from hushgrad.types import Relation

DELTA = 1e-5
C1, C2 = 1.0, 0.01
GAMMA = C2
SMOOTHNESS = 0.25
"""Of the logistic loss of a row with norm 1."""
SQUARE = 14.0
"""‖x‖² of a row that is not scaled, for step sizes; no bound rests on it."""


@dataclass(frozen=True)
class Accounting:
    """How a run is accounted for, and with it how its batches are drawn."""

    name: str
    relation: Relation
    accountant: Accountant
    fixed_size: bool

    def sampling(self, batch: int, records: int) -> Sampling | None:
        """None is Poisson sampling."""
        if batch == records:
            return FullBatch()
        return WithoutReplacement(batch) if self.fixed_size else None


PAPER = Accounting("paper", Relation.REPLACE_ONE, RDP, fixed_size=True)
"""Replace one record, batches of a fixed size, the Rényi accountant."""
TIGHT = Accounting("tight", Relation.ADD_REMOVE, PLD, fixed_size=False)
"""Add or remove one record, Poisson sampling, privacy loss distributions."""


@dataclass(frozen=True)
class Task:
    """A budget, and what is known of the records: how many, and whether rows were scaled."""

    epsilon: float
    records: int
    scaled: bool
    accounting: Accounting

    @property
    def stretch(self) -> float:
        """By how much steps are longer where rows were scaled to norm 1."""
        return 1.0 if self.scaled else 1 / SQUARE

    @property
    def passes(self) -> int:
        """DP-SRM's passes over the data in the paper."""
        return 4 if self.epsilon < 0.35 else 5

    def plan(
        self,
        algorithm: Algorithm,
        *,
        share: float,
        passes: float,
        clip: Clip | None = None,
        accountant: Accountant | None = None,
        private: bool = True,
    ) -> Plan:
        """Batches of this share of the records, for so many passes."""
        batch = max(1, round(share * self.records))
        return plan(
            records=self.records,
            batch=batch,
            epochs=passes,
            epsilon=self.epsilon if private else None,
            noise_multiplier=None if private else 0.0,
            delta=DELTA,
            relation=self.accounting.relation,
            clip=abadi(C1) if clip is None else clip,
            accountant=self.accounting.accountant if accountant is None else accountant,
            sampling=self.accounting.sampling(batch, self.records),
            algorithm=algorithm,
        )


@dataclass(frozen=True)
class Method:
    """A name, a plan, a rate of SGD, and how many gradients of a record a later step takes."""

    name: str
    plan: Callable[[Task], Plan]
    rate: Callable[[Task], float]
    points: int = 1


def _first(task: Task) -> int:
    return task.records // 4


def _srm(task: Task) -> Plan:
    steps, first = 200, _first(task) / task.records
    share = (task.passes - first) / steps
    rule = Srm(
        GAMMA,
        abadi(C2),
        first_batch=_first(task),
        first_noise=2.0,
        step_norm=0.1 / _RATE if task.scaled else 0.01,
    )
    return task.plan(rule, share=share, passes=steps * share)


_RATE = 30.0


def _spiderboost(task: Task) -> Plan:
    steps, period = 100, 50
    share = (task.passes - steps / period / 4) / steps
    rule = SpiderBoost(
        period,
        PerDistance(SMOOTHNESS if task.scaled else SMOOTHNESS * SQUARE),
        anchor_batch=_first(task),
        step_norm=0.2 / _RATE if task.scaled else 0.05,
    )
    return task.plan(rule, share=share, passes=steps * share)


METHODS = (
    Method(
        "DP-GD", lambda t: t.plan(Sgd(), share=1, passes=20), lambda t: 30.0 if t.scaled else 3.0
    ),
    Method(
        "DP-AGD",
        lambda t: t.plan(
            Agd(largest_loss=3.0),
            share=1,
            passes=100,
            accountant=RDP,
        ),
        lambda t: 1.0,
    ),
    Method(
        "RRPSGD",
        lambda t: t.plan(rrpsgd(), share=1 / 50, passes=4 * t.passes),
        lambda t: 3.0 if t.scaled else 0.3,
    ),
    Method("DP-SRM", _srm, lambda t: _RATE if t.scaled else 1.0, points=2),
    Method("SpiderBoost", _spiderboost, lambda t: _RATE if t.scaled else 1.0, points=2),
    Method(
        "DP-SGD",
        lambda t: t.plan(Sgd(average(50)), share=1 / 25, passes=t.passes),
        lambda t: (10.0 if t.epsilon < 0.35 else 30.0) if t.scaled else 3.0,
    ),
    Method(
        "DP-SGD, AUTO-S",
        lambda t: t.plan(Sgd(average(50)), share=1 / 25, passes=t.passes, clip=automatic()),
        lambda t: 10.0 if t.scaled else 3.0,
    ),
    Method(
        "STORM, not private",
        lambda t: t.plan(
            storm(0.1, first_batch=_first(t)),
            share=1 / 50,
            passes=t.passes,
            clip=unclipped(),
            private=False,
        ),
        lambda t: 10.0 if t.scaled else 10.0 / SQUARE,
        points=2,
    ),
)
