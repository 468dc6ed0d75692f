"""Accountants that add up one number: ρ of zero-concentrated DP, µ² of Gaussian DP."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent, PoissonSampledDpEvent
from dp_accounting.dp_event import LaplaceDpEvent, NoOpDpEvent, ZCDpEvent

from hushgrad.accounting import backend
from hushgrad.accounting.accountants import PLD, RDP, Accountant, require_delta, require_epsilon
from hushgrad.accounting.closed_forms import gaussian_delta, gaussian_epsilon
from hushgrad.accounting.refusals import refuse
from hushgrad.events import PureDpEvent
from hushgrad.types import Relation


@dataclass(frozen=True)
class Zcdp:
    """The accountant of zero-concentrated DP: ρ adds up, and sampling is not amplified.

    Example:
        >>> from hushgrad.accounting import gaussian, repeated
        >>> Zcdp().rho(repeated(8, gaussian(2.0)))
        1.0

    Reference: Bun and Steinke 2016, Propositions 1.4 and 1.6.
    """

    name: str = field(default="zcdp", init=False)
    proves: bool = field(default=True, init=False)

    def sketch(self) -> Accountant:
        """Return itself: it is fast."""
        return self

    def supports(self, event: DpEvent, relation: Relation) -> bool:
        """Tell whether the event is covered under this relation."""
        return all(_rho(p, relation) is not None for p, _ in backend.parts(event, relation))

    def rho(self, event: DpEvent, *, relation: Relation = Relation.ADD_REMOVE) -> float:
        """Return the smallest ρ that is known to hold, or raise `Refused` with the remedy."""
        total = 0.0
        for part, count in backend.parts(event, relation):
            found = _rho(part, relation)
            if found is None:
                refuse(self, part, relation, among=(PLD, RDP))
            total += count * found
        return total

    def epsilon(
        self, event: DpEvent, *, delta: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return ε at this δ, or raise `Refused` with the remedy."""
        return RDP.epsilon(self._as_one(event, relation), delta=delta, relation=relation)

    def delta(
        self, event: DpEvent, *, epsilon: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return δ at this ε, or raise `Refused` with the remedy."""
        return RDP.delta(self._as_one(event, relation), epsilon=epsilon, relation=relation)

    def _as_one(self, event: DpEvent, relation: Relation) -> DpEvent:
        rho = self.rho(event, relation=relation)
        return ZCDpEvent(rho) if math.isfinite(rho) else NonPrivateDpEvent()


@dataclass(frozen=True)
class Gdp:
    """The accountant of Gaussian DP: a central-limit approximation that can under-state ε.

    Its figures are shown for comparison. `calibrate` and ledgers refuse it.

    Example:
        >>> from hushgrad.accounting import gaussian, poisson, repeated
        >>> round(Gdp().mu(repeated(2250, poisson(0.04, gaussian(1.5)))), 3)
        1.419

    Reference: Bu et al. 2020, Deep Learning with Gaussian Differential Privacy, Theorem 5.
    """

    name: str = field(default="gdp", init=False)
    proves: bool = field(default=False, init=False)

    def sketch(self) -> Accountant:
        """Return itself: it is fast."""
        return self

    def supports(self, event: DpEvent, relation: Relation) -> bool:
        """Tell whether the event is covered under this relation."""
        found = backend.parts(event, relation)
        return all(_mu_squared(part, relation) is not None for part, _ in found)

    def mu(self, event: DpEvent, *, relation: Relation = Relation.ADD_REMOVE) -> float:
        """Return µ of the limit, or raise `Refused` with the remedy."""
        total = 0.0
        for part, count in backend.parts(event, relation):
            found = _mu_squared(part, relation)
            if found is None:
                refuse(self, part, relation, among=(PLD, RDP))
            total += count * found
        return math.sqrt(total)

    def epsilon(
        self, event: DpEvent, *, delta: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return the approximate ε at this δ, or raise `Refused` with the remedy."""
        require_delta(delta)
        mu = self.mu(event, relation=relation)
        return gaussian_epsilon(1 / mu, delta=delta) if 0 < mu < math.inf else mu

    def delta(
        self, event: DpEvent, *, epsilon: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return the approximate δ at this ε, or raise `Refused` with the remedy."""
        require_epsilon(epsilon)
        mu = self.mu(event, relation=relation)
        return gaussian_delta(1 / mu, epsilon=epsilon) if 0 < mu < math.inf else min(mu, 1.0)


GDP = Gdp()
"""The accountant of Gaussian DP, an approximation: for comparison only."""

ZCDP = Zcdp()
"""The accountant of zero-concentrated DP."""

ACCOUNTANTS: dict[str, Accountant] = {a.name: a for a in (PLD, RDP, GDP, ZCDP)}
"""The accountants by name."""


def _rho(part: DpEvent, relation: Relation) -> float | None:
    double = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    match part:
        case NoOpDpEvent():
            return 0.0
        case NonPrivateDpEvent():
            return math.inf
        case GaussianDpEvent(noise_multiplier=z):
            return float((double / z) ** 2 / 2)
        case LaplaceDpEvent(noise_multiplier=z):
            return float((double / z) ** 2 / 2)
        case PureDpEvent(epsilon=epsilon):
            return float(epsilon**2 / 2)
        case ZCDpEvent(rho=rho, xi=0.0):
            return float(rho)
    return None


def _mu_squared(part: DpEvent, relation: Relation) -> float | None:
    double = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    match part:
        case NoOpDpEvent():
            return 0.0
        case NonPrivateDpEvent():
            return math.inf
        case GaussianDpEvent(noise_multiplier=z):
            return float((double / z) ** 2)
        case PoissonSampledDpEvent(
            sampling_probability=q, event=GaussianDpEvent(noise_multiplier=z)
        ) if relation is not Relation.REPLACE_ONE:
            return float(q**2 * math.expm1(z**-2)) if z > 0.04 else math.inf
    return None
