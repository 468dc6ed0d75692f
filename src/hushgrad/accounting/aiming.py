"""A fast search for the noise: a secant method in log σ and log ε, with increasing precision.

log ε is nearly linear in log σ, so that two or three evaluations at each precision suffice: first
the central-limit approximation, which is free; then a coarse grid; and finally, usually once, the
accountant that was asked for, which alone decides.
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
"""Maps a number of a run, such as its noise multiplier, to the ε that it costs."""

_TRIES = 6


@dataclass(frozen=True)
class NoiseSearch:
    """A search for the noise with an ε between `least` and `most`, by this accountant at this δ."""

    event_of: Callable[[float], DpEvent]
    accountant: Accountant
    delta: float
    relation: Relation
    least: float
    most: float

    def spend_by(self, accountant: Accountant) -> CostOf:
        """Return the function from noise multiplier to ε by this accountant."""
        return lambda z: accountant.epsilon(
            self.event_of(z), delta=self.delta, relation=self.relation
        )

    def about(self, z: float) -> float:
        """Return ε by the central-limit approximation; NaN if there is none."""
        mu = about_mu(self.event_of(z), self.relation)
        return gaussian_epsilon(1 / mu, delta=self.delta) if mu else math.nan


def aim_noise(asked: NoiseSearch) -> tuple[float, float] | None:
    """Return a noise multiplier whose confirmed ε is within the limits, and that ε.

    None if the fast search fails; then a slower search is needed.
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
    """Approach the aim on a grid ten times as coarse, correcting for what it over-states."""
    if not line.follow(asked.spend_by(Pld(10 * interval)), (0.99 * aim, 1.01 * aim)):
        return False
    # The excess is quadratic in the interval: 400 - 100 parts between the grids, 100 - 1 excess.
    over = asked.spend_by(Pld(20 * interval))(line.last) - line.spent
    line.spent -= min(99 / 300 * over, line.spent / 2)
    line.move(aim)
    return True


@dataclass
class _Line:
    """log ε as a linear function of log σ: the last evaluated point, and the slope."""

    value: float
    steepness: float
    last: float = 0.0
    spent: float = 0.0

    def follow(self, spend: CostOf, limits: tuple[float, float]) -> bool:
        """Evaluate where the line meets the middle of the limits, until ε is within them.

        Then `last` is that noise, `spent` its ε, and `value` the next guess.
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
        """Set the next guess to where the line meets the aim."""
        self.value = self.last * min(max((self.spent / aim) ** (1 / self.steepness), 1e-3), 1e3)
