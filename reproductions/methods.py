"""The methods of paper C's Table 2: what each is planned with, and how it was tuned.

Rates, batches and step lengths were chosen by the test objective on a9a, which no guarantee covers:
they are non-private knowledge, and favour the figures. The clipping norms C1 = 1 and C2 = 0.01, and
γ = C2, are the paper's.

Rows that are k times as long have gradients k times as long, and a minimum k times as near: rates
are divided by k², step lengths by k, and the norm of a clip that is tuned is multiplied by it.
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
from hushgrad.clipping.rules import Clip, abadi, automatic
from hushgrad.run.plan import Plan, plan
from hushgrad.sampling import FullBatch, Sampling, WithoutReplacement
from hushgrad.types import Relation

DELTA = 1e-5
C1, C2 = 1.0, 0.01
GAMMA = C2
SMOOTHNESS = 0.25
"""Of the logistic loss of a row with norm 1."""
BOTH_PARTS = 0.006
"""Where DP-SRM clips its two parts as one: the norm for rows of norm 1, against their 0.0199."""


@dataclass(frozen=True)
class Accounting:
    """How a run is accounted for, and with it how its batches are drawn.

    Args:
        name: what the tables call it.
        relation: what makes two data sets neighbours.
        accountant: what turns a run into ε.
        fixed_size: whether batches have one size, or Poisson sizes.
    """

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
    """A budget, and what is known of the records.

    Args:
        epsilon: ε of a run, at δ = 1e-5.
        records: how many there are.
        scaled: whether rows were scaled.
        accounting: how a run is accounted for.
        length: the usual norm of a row, for step sizes and a clip; no guarantee rests on it.
    """

    epsilon: float
    records: int
    scaled: bool
    accounting: Accounting
    length: float = 1.0

    @property
    def small(self) -> bool:
        """Whether the budget is the smaller one of the paper's two."""
        return self.epsilon < 0.35

    @property
    def passes(self) -> int:
        """DP-SRM's passes over the data in the paper."""
        return 4 if self.small else 5

    def rate(self, unclipped: float, *, clipped: float) -> float:
        """For scaled rows, stated for those of norm 1, and for rows as they are, which C1 clips."""
        return unclipped / self.length**2 if self.scaled else clipped

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
        """Plan a run of an algorithm.

        Args:
            algorithm: what is asked of each batch.
            share: a batch as a share of the records.
            passes: expected passes over the data.
            clip: the clipping rule; Abadi's at C1 if left out.
            accountant: the accounting's own if left out.
            private: whether noise is added.
        """
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
    """A row of the table: what is planned for a task, and how it steps.

    Args:
        name: what the table calls it.
        plan: the plan for a task.
        rate: the learning rate of SGD for a task.
        points: how many gradients of a record a step after the first takes.
    """

    name: str
    plan: Callable[[Task], Plan]
    rate: Callable[[Task], float]
    points: int = 1


def _first(task: Task) -> int:
    return task.records // 4  # a quarter of a pass, for the batch that a recursion starts from


_RATE = 30.0  # for rows of norm 1


def _recursion_rate(task: Task) -> float:
    return _RATE / task.length**2


def _step_norm(task: Task, length: float) -> float:
    """Of an estimate, so that a step is so long for rows of norm 1."""
    return length / task.length / _recursion_rate(task)


def _srm(task: Task) -> Plan:
    # C2 clips differences between points that are too far apart: longer rows ask for nearer ones.
    steps, first = 200 if task.scaled else 400, _first(task) / task.records
    share = (task.passes - first) / steps
    rule = Srm(
        GAMMA,
        abadi(C2),
        first_batch=_first(task),
        first_noise=2.0,
        step_norm=_step_norm(task, 20 / steps),
    )
    return task.plan(rule, share=share, passes=steps * share)


def _srm_one_clip(task: Task) -> Plan:
    steps = 200 * task.passes
    share = (task.passes - 1) / steps
    rule = Srm(
        GAMMA,
        None,
        abadi(BOTH_PARTS * task.length),
        first_batch=task.records,
        first_noise=20.0,
        step_norm=_step_norm(task, 22 / steps),
    )
    return task.plan(rule, share=share, passes=steps * share)


def _spiderboost(task: Task) -> Plan:
    steps, period = 100, 50
    share = (task.passes - steps / period / 4) / steps
    rule = SpiderBoost(
        period,
        PerDistance(SMOOTHNESS * task.length**2),
        anchor_batch=_first(task),
        step_norm=_step_norm(task, 0.2),
    )
    return task.plan(rule, share=share, passes=steps * share)


def _agd(task: Task) -> Plan:
    if task.scaled:
        # Losses are cut at a public bound, since DP-AGD selects steps by noisy losses.
        rule = Agd(largest_loss=3.0, longest_step=2.0 / task.length)
    elif task.small:
        rule = Agd(largest_loss=2.0, longest_step=1.0, splits=20, choices=8, output=average(8))
    else:
        rule = Agd(largest_loss=3.0, longest_step=1.0, choices=12, output=average(20))
    return task.plan(rule, share=1, passes=100, accountant=RDP)


def _rrpsgd(task: Task) -> Plan:
    if task.accounting is PAPER:  # its noise grows with the number of steps
        return task.plan(rrpsgd(), share=1 / 10, passes=16)
    return task.plan(rrpsgd(), share=1 / 50, passes=4 * task.passes)


def _rrpsgd_rate(task: Task) -> float:
    if task.accounting is PAPER:
        return task.rate(5.0, clipped=1.0) if task.small else task.rate(10.0, clipped=2.0)
    return task.rate(3.0, clipped=0.3)


def _sgd(clip: Clip) -> Callable[[Task], Plan]:
    return lambda t: t.plan(Sgd(average(50)), share=1 / 25, passes=t.passes, clip=clip)


def _sgd_rate(task: Task) -> float:
    # The paper's accounting needs more noise, which shorter steps make up for.
    rate = task.rate(10.0 if task.small else 30.0, clipped=3.0)
    return rate / 3 if task.accounting is PAPER else rate


METHODS = (
    Method(
        "DP-GD", lambda t: t.plan(Sgd(), share=1, passes=20), lambda t: t.rate(30.0, clipped=3.0)
    ),
    Method("DP-AGD", _agd, lambda t: 1.0),
    Method("RRPSGD", _rrpsgd, _rrpsgd_rate),
    Method("DP-SRM", _srm, _recursion_rate, points=2),
    Method("DP-SRM, one clip", _srm_one_clip, _recursion_rate, points=2),
    Method("SpiderBoost", _spiderboost, _recursion_rate, points=2),
    Method("DP-SGD", _sgd(abadi(C1)), _sgd_rate),
    Method("DP-SGD, AUTO-S", _sgd(automatic()), lambda t: t.rate(10.0, clipped=3.0)),
    Method("DP-SGD, AUTO-S, γ = 1", _sgd(automatic(1.0)), _sgd_rate),
    Method(
        "STORM, not private",
        lambda t: t.plan(
            storm(0.1, first_batch=_first(t)),
            share=1 / 50,
            passes=t.passes,
            clip=unclipped(),
            private=False,
        ),
        lambda t: 10.0 / t.length**2,
        points=2,
    ),
)
