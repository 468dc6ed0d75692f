"""A quick search for the noise: a straight line in log σ and log ε, by figures ever more exact.

log ε is nearly straight in log σ, so that two or three figures of each kind are enough: first those
of the central limit, which cost nothing; then those of a coarse grid; and in the end, mostly once,
that of the accountant that was asked for, which alone decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dp_accounting import DpEvent

from hushgrad.accounting.accountants import Accountant, Pld
from hushgrad.accounting.closed_forms import gaussian_epsilon
from hushgrad.accounting.spread import about_mu
from hushgrad.types import Refused, Relation

CostOf = Callable[[float], float]
"""A number of a run, such as its noise multiplier, to the ε that it costs."""

_TRIES = 6


@dataclass(frozen=True)
class NoiseSearch:
    """Which noise spends between `least` and `most` by this accountant at this δ."""

    event_of: Callable[[float], DpEvent]
    accountant: Accountant
    delta: float
    relation: Relation
    least: float
    most: float

    def spend_by(self, accountant: Accountant) -> CostOf:
        """What a noise multiplier costs by some accountant."""
        return lambda z: accountant.epsilon(
            self.event_of(z), delta=self.delta, relation=self.relation
        )

    def about(self, z: float) -> float:
        """The same by the central limit; nan where it says nothing."""
        mu = about_mu(self.event_of(z), self.relation)
        return gaussian_epsilon(1 / mu, delta=self.delta) if mu else math.nan


def aim_noise(asked: NoiseSearch) -> tuple[float, float] | None:
    """A noise multiplier whose ε was confirmed to be within the limits, and that ε.

    None where the quick way does not get there; a slower search then has to.
    """
    try:
        return _aim_noise(asked)
    except (Refused, OverflowError, ZeroDivisionError):
        return None


def _aim_noise(asked: NoiseSearch) -> tuple[float, float] | None:
    aim = math.sqrt(asked.least * asked.most)
    line = _Line(1.0, 1.0)
    if not line.follow(asked.about, (0.99 * aim, 1.01 * aim)):
        return None
    exact = asked.accountant
    if isinstance(exact, Pld) and not _by_coarse_grids(line, asked, exact.interval, aim):
        return None
    found = line.follow(asked.spend_by(exact), (asked.least, asked.most))
    return (line.last, line.spent) if found else None


def _by_coarse_grids(line: _Line, asked: NoiseSearch, interval: float, aim: float) -> bool:
    """Go near the aim on a grid ten times as coarse, less what that one over-states."""
    if not line.follow(asked.spend_by(Pld(10 * interval)), (0.99 * aim, 1.01 * aim)):
        return False
    # It is quadratic in the interval: 400 - 100 parts between the two, 100 - 1 to be taken off.
    over = asked.spend_by(Pld(20 * interval))(line.last) - line.spent
    line.spent -= min(99 / 300 * over, line.spent / 2)
    line.move(aim)
    return True


@dataclass
class _Line:
    """log ε as a straight function of log σ: the last point that is known, and the steepness."""

    value: float
    steepness: float
    last: float = 0.0
    spent: float = 0.0

    def follow(self, spend: CostOf, limits: tuple[float, float]) -> bool:
        """Go where the line meets the middle of the limits, until what is spent is within them.

        `last` is then that noise and `spent` its cost, and `value` where the line goes on.
        """
        low, high = limits
        before: tuple[float, float] | None = None
        for _ in range(_TRIES):
            self.last, self.spent = self.value, spend(self.value)
            if not 0 < self.spent < math.inf:
                return False
            if before is not None and before[0] != self.last and before[1] != self.spent:
                rise = math.log(self.spent / before[1]) / math.log(before[0] / self.last)
                self.steepness = min(max(rise, 0.3), 8.0)
            before = (self.last, self.spent)
            self.move(math.sqrt(low * high))
            if low <= self.spent <= high:
                return True
        return False

    def move(self, aim: float) -> None:
        """Go to where the line meets the aim."""
        self.value = self.last * min(max((self.spent / aim) ** (1 / self.steepness), 1e-3), 1e3)
