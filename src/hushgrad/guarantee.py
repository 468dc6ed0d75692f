"""The guarantee of a run, with everything that its two numbers rest on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hushgrad.ledger import Spend
from hushgrad.ledger.records import figure
from hushgrad.plan import Plan
from hushgrad.types import Relation


def up(value: float) -> str:
    """Write a number with four decimals, rounded up: a guarantee must not be rounded down.

    >>> up(6.76871)
    '6.7688'
    """
    if not math.isfinite(value):
        return "∞"
    if value >= 2**40:  # all of whose digits are before the point, and float has no room for more
        return figure(value, up=True)
    return f"{math.ceil(value * 10**4 - 1e-7) / 10**4:.4f}"


_NEIGHBOURS = {
    Relation.ADD_REMOVE: "add/remove one record",
    Relation.REPLACE_ONE: "replace one record",
    Relation.ZERO_OUT: "blank out one record",
}


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-DP of a plan, how many of its steps were taken, and under which assumptions.

    A run that ends early keeps its plan's ε: when it ended may depend on what it released.
    """

    plan: Plan
    steps_taken: int
    reproducible: bool
    charges: tuple[Spend, ...] = ()

    @property
    def epsilon(self) -> float:
        """ε of the plan and of what was released again; infinite without noise or secrecy."""
        if self.reproducible:
            return math.inf
        return math.fsum([self.plan.epsilon, *(charge.epsilon for charge in self.charges)])

    @property
    def delta(self) -> float:
        """δ of the plan and of what was released again."""
        return math.fsum([self.plan.delta, *(charge.delta for charge in self.charges)])

    def __str__(self) -> str:
        plan = self.plan
        spent = math.fsum([plan.epsilon, *(charge.epsilon for charge in self.charges)])
        budget = f"({up(spent)}, {figure(self.delta, up=True)})-DP"
        if plan.epsilon == math.inf:
            budget = "not private: no noise"
        if self.charges:
            budget += f", of which the plan's ({up(plan.epsilon)}, {figure(plan.delta, up=True)})"
        if self.reproducible:
            budget = f"reproducible, not private: {budget} if the seed were unknown"
        lax = (
            ["δ is not below 1 / records: publishing a record at random would pass; plan a smaller"]
            if self.delta * plan.records >= 1
            else []
        )
        return "\n".join(
            [
                f"{budget}, {_NEIGHBOURS[plan.relation]}, {_sampled(plan)}, "
                f"{plan.accountant.name.upper()} accountant",
                f"noise multiplier {plan.noise_multiplier:.4g}, clipping {plan.clip!r}, "
                f"{self.steps_taken} of {plan.steps} planned steps taken",
                f"algorithm {plan.algorithm!r}, which gives out {plan.algorithm.output.statement}",
                "one record is the unit of privacy; independence of records: tested, not proved; "
                "rounding in a sum: measured below 0.1 % of the bound",
                "not counted: the yes or no of a certification, timing and other side channels",
                *lax,
            ]
        )


def _sampled(plan: Plan) -> str:
    """How batches were sampled; where an algorithm's steps differ, each way with its steps."""
    if len(plan.stages) == 1:
        return plan.stages[0][0].sampling.statement
    sigma = plan.noise_multiplier
    each = [
        f"{stage.sampling.statement}, noise multiplier {sigma * stage.noise:.4g}, at {count} of "
        f"{plan.steps} steps"
        for stage, count in plan.stages
    ]
    return "; ".join(each)
