"""The guarantee of a run, with everything that its two numbers rest on."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from hushgrad.algorithms.algorithm import INDEPENDENT
from hushgrad.ledger import Spend
from hushgrad.ledger.records import figure
from hushgrad.run.plan import Plan
from hushgrad.types import Relation


def up(value: float) -> str:
    """Return a number with four decimals, rounded up: a guarantee must not be rounded down.

    >>> up(6.76871)
    '6.7688'
    """
    if not math.isfinite(value):
        return "∞"
    if value >= 2**40:  # float64 has no room for four decimals here
        return figure(value, up=True)
    return f"{math.ceil(value * 10**4 - 1e-7) / 10**4:.4f}"


_NEIGHBOURS = {
    Relation.ADD_REMOVE: "add/remove one record",
    Relation.REPLACE_ONE: "replace one record",
    Relation.ZERO_OUT: "blank out one record",
}

_ASSUMPTIONS = (
    "one record is the unit of privacy",
    "independence of records: tested, not proved",
    "rounding in a sum over records: proved below 0.4 % of the bound, which the noise covers",
    "a record keeps its bits beside any others, in every block of a batch: tested, not proved",
    "a record whose gradient is NaN or infinite contributes nothing, and nobody is told how many",
)
_NOT_COUNTED = (
    "the yes or no of a certification and of the run's other checks",
    "timing and other side channels",
)


@dataclass(frozen=True)
class Guarantee:
    """The (ε, δ)-DP of a plan, how many of its steps were taken, and under which assumptions.

    A run that ends early keeps its plan's ε: when it ended may depend on what it released. A run
    that took no step guarantees nothing: whatever its model is, the run has not made it.

    Args:
        plan: the plan that was carried out.
        steps_taken: how many steps have changed the model.
        reproducible: whether a public seed determined the noise; nothing is private then.
        charges: what the run cost beyond its plan, such as steps that were released twice.
        steps_unused: how many batches were drawn and not used by a step; the plan's ε covers them.

    Example:
        >>> from hushgrad.run.plan import plan
        >>> p = plan(records=60_000, batch=512, epochs=1, delta=1e-5, noise_multiplier=1.0)
        >>> guarantee = Guarantee(p, steps_taken=118, reproducible=False)
        >>> round(guarantee.epsilon, 2), guarantee.private
        (0.64, True)
    """

    plan: Plan
    steps_taken: int
    reproducible: bool
    charges: tuple[Spend, ...] = ()
    steps_unused: int = 0

    @property
    def epsilon(self) -> float:
        """ε of the plan and all charges; infinite without noise, with a public seed, or without
        steps.
        """
        return math.inf if self.reproducible else self.epsilon_if_secret

    @property
    def epsilon_if_secret(self) -> float:
        """ε of a reproducible run, if nobody knew its seed."""
        return self._spent if self.steps_taken else math.inf

    @property
    def _spent(self) -> float:
        # Basic composition: a charge's event may differ in kind from the plan's.
        return math.fsum([self.plan.epsilon, *(charge.epsilon for charge in self.charges)])

    @property
    def delta(self) -> float:
        """δ of the plan and of all charges."""
        return math.fsum([self.plan.delta, *(charge.delta for charge in self.charges)])

    @property
    def private(self) -> bool:
        """Whether there is a guarantee at all."""
        return math.isfinite(self.epsilon)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why the guarantee is worth less than its numbers suggest."""
        if self.delta * self.plan.records < 1:
            return ()
        return (
            "δ is not below 1 / records: publishing a record at random would pass; plan a smaller",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything in words and numbers that JSON can hold; infinite numbers become None.

        `epsilon` is None where there is no guarantee, and `private` is then False.
        """
        plan = self.plan
        return {
            "private": self.private,
            "epsilon": _finite(self.epsilon),
            "delta": self.delta,
            "epsilon_if_secret": _finite(self.epsilon_if_secret),
            "reproducible": self.reproducible,
            "relation": plan.relation.value,
            "unit": "record",
            "accountant": plan.accountant.name,
            "steps_taken": self.steps_taken,
            "steps_planned": plan.steps,
            "steps_unused": self.steps_unused,
            "returns": plan.parts.output.statement,
            "charges": [
                {"epsilon": _finite(s.epsilon), "delta": s.delta, "relation": s.relation.value}
                for s in self.charges
            ],
            "assumptions": list(_ASSUMPTIONS),
            "not_counted": list(_NOT_COUNTED),
            "warnings": list(self.warnings),
            "plan": plan.terms() | {"epsilon": _finite(plan.epsilon)},
            "text": str(self),
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    @property
    def headline(self) -> str:
        """The two numbers, or why there are none."""
        plan = self.plan
        # Rounded up: a guarantee may only be rounded in the safe direction.
        budget = f"({up(self._spent)}, {figure(self.delta, up=True)})-DP"
        if plan.epsilon == math.inf:
            budget = "not private: no noise"
        if self.charges:
            budget += f", of which the plan's ({up(plan.epsilon)}, {figure(plan.delta, up=True)})"
        if self.reproducible:
            budget = f"reproducible, not private: {budget} if the seed were unknown"
        if not self.steps_taken:
            return f"no guarantee, since the run has taken no step; the plan's would be {budget}"
        return budget

    def __str__(self) -> str:
        plan = self.plan
        unused = (
            f"; {self.steps_unused} more drawn, not used, and charged" if self.steps_unused else ""
        )
        return "\n".join(
            [
                f"{self.headline}, {_NEIGHBOURS[plan.relation]}, {_sampled(plan)}, "
                f"{plan.accountant.name.upper()} accountant",
                f"noise multiplier {plan.noise_multiplier:.4g}{_kind(plan)}, "
                f"clipping {plan.clip!r}, "
                f"{self.steps_taken} of {plan.steps} planned steps taken{unused}",
                f"planned for {plan.records} records, which is public; algorithm "
                f"{plan.algorithm!r}, which returns {plan.parts.output.statement}",
                "; ".join(_ASSUMPTIONS),
                f"not counted: {', '.join(_NOT_COUNTED)}",
                *self.warnings,
            ]
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _kind(plan: Plan) -> str:
    """The kind of noise, where it is not the usual one."""
    return "" if plan.noise == INDEPENDENT else f" of {plan.noise.name} noise"


def _sampled(plan: Plan) -> str:
    """How batches were sampled; where steps differ, each way with the number of its steps."""
    if len(plan.stages) == 1:
        return plan.stages[0][0].sampling.statement
    sigma = plan.noise_multiplier
    each = [
        f"{stage.sampling.statement}, noise multiplier {sigma * stage.noise:.4g}, at {count} of "
        f"{plan.steps} steps"
        for stage, count in plan.stages
    ]
    return "; ".join(each)
