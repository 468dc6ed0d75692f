"""The guarantee of a run, with everything that its two numbers rest on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hushgrad.plan import Plan
from hushgrad.types import Relation

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

    @property
    def epsilon(self) -> float:
        """The plan's ε; infinite for a run without noise or with a seed that others can know."""
        return math.inf if self.reproducible else self.plan.epsilon

    def __str__(self) -> str:
        plan = self.plan
        budget = f"({plan.epsilon:.4g}, {plan.delta:g})-DP"
        if plan.epsilon == math.inf:
            budget = "not private: no noise"
        if self.reproducible:
            budget = f"reproducible, not private: {budget} if the seed were unknown"
        return "\n".join(
            [
                f"{budget}, {_NEIGHBOURS[plan.relation]}, {plan.sampling.statement}, "
                f"{plan.accountant.name.upper()} accountant",
                f"noise multiplier {plan.noise_multiplier:.4g}, clipping {plan.clip!r}, "
                f"{self.steps_taken} of {plan.steps} planned steps taken",
                "one record is the unit of privacy; independence of records: tested, not proved; "
                "rounding in a sum: measured below 0.1 % of the bound",
                "not counted: the yes or no of a certification, timing and other side channels",
            ]
        )
