"""Events in, (ε, δ) out: the accountants, and what each can account for under which relation.

`dp_accounting` composes and converts. This module tells it what a noise multiplier means under a
relation, keeps its rounding on the private side, and refuses with a remedy what it does not cover.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from dp_accounting import DpEvent, NonPrivateDpEvent
from dp_accounting.dp_event import NoOpDpEvent
from dp_accounting.rdp.rdp_privacy_accountant import (
    DEFAULT_RDP_ORDERS,
    compute_delta,
    compute_epsilon,
)

from hushgrad.accounting import packaged
from hushgrad.accounting.events import leaves
from hushgrad.accounting.refusals import refuse
from hushgrad.types import Refused, Relation


@runtime_checkable
class Accountant(Protocol):
    """What turns an event into a guarantee under a relation."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def proves(self) -> bool:
        """True if its figures are upper bounds; otherwise they are shown and never relied on."""

    def sketch(self) -> Accountant:
        """A quicker accountant whose figures are close; the first part of a search uses it."""

    def supports(self, event: DpEvent, relation: Relation) -> bool:
        """Tell whether the event is covered under this relation."""

    def epsilon(
        self, event: DpEvent, *, delta: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return ε at this δ, or raise `Refused` with the remedy."""

    def delta(
        self, event: DpEvent, *, epsilon: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return δ at this ε, or raise `Refused` with the remedy."""


@dataclass(frozen=True)
class Pld:
    """Numerical composition of privacy loss distributions: the tightest figure, and the default.

    Guarantees: never below the true ε for δ well above the rounding of its Fourier transforms,
    which is allowed for; a δ below that is refused.
    """

    interval: float = 1e-4
    name: str = field(default="pld", init=False)
    proves: bool = field(default=True, init=False)

    def sketch(self) -> Accountant:
        """The same on a grid ten times as coarse, which over-states ε by about 0.1 %."""
        return Pld(10 * self.interval)

    def supports(self, event: DpEvent, relation: Relation) -> bool:
        """Tell whether the event is covered under this relation."""
        return not self._gaps(event, relation)

    def epsilon(
        self, event: DpEvent, *, delta: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return ε at this δ, or raise `Refused` with the remedy."""
        require_delta(delta)
        accountant = self._composed(event, relation)
        usable = delta - _fourier_slack(event)
        found = float(accountant.get_epsilon(usable)) if usable > 0 else math.inf
        if found == math.inf and not _bare(event):
            raise Refused(
                f"expected a delta that the pld accountant can resolve, got {delta}, which is "
                "within its rounding; use the rdp accountant or a larger delta"
            )
        return found

    def delta(
        self, event: DpEvent, *, epsilon: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return δ at this ε, or raise `Refused` with the remedy."""
        require_epsilon(epsilon)
        found = float(self._composed(event, relation).get_delta(epsilon))
        return min(1.0, max(0.0, found) + _fourier_slack(event))

    def _gaps(self, event: DpEvent, relation: Relation) -> list[DpEvent]:
        accountant = packaged.PldAccountant(relation, self.interval)
        return [p for p, _ in packaged.parts(event, relation) if not accountant.supports(p)]

    def _composed(self, event: DpEvent, relation: Relation) -> packaged.PldAccountant:
        for gap in self._gaps(event, relation):
            refuse(self, gap, relation, among=(PLD, RDP))
        interval = packaged.interval_for(event, relation, self.interval)
        accountant = packaged.PldAccountant(relation, interval)
        for part, count in packaged.parts(event, relation):
            accountant.compose(part, count)
        return accountant


@dataclass(frozen=True)
class Rdp:
    """Rényi DP at a fixed list of orders: looser than PLD, and additive over events."""

    orders: tuple[float, ...] = tuple(DEFAULT_RDP_ORDERS)
    name: str = field(default="rdp", init=False)
    proves: bool = field(default=True, init=False)

    def sketch(self) -> Accountant:
        """Itself: it is quick."""
        return self

    def supports(self, event: DpEvent, relation: Relation) -> bool:
        """Tell whether the event is covered under this relation."""
        return not self._gaps(event, relation)

    def curve(self, event: DpEvent, relation: Relation) -> tuple[np.ndarray, np.ndarray]:
        """Return the orders that could be computed, and ε(α) at each of them."""
        for gap in self._gaps(event, relation):
            refuse(self, gap, relation, among=(PLD, RDP))
        accountant = packaged.RenyiAccountant(relation, self.orders)
        releases = 0
        with packaged.quiet():
            for part, count in packaged.parts(event, relation):
                accountant.compose(packaged.told_to_rdp(part, relation), count)
                releases += 0 if isinstance(part, NoOpDpEvent) else count
        orders, values = accountant.orders, accountant.rdp
        # A value of 0 or less is rounding, and the package would take it for no release at all.
        return orders, np.maximum(values, 0.0) + releases * 2.0**-50 / (orders - 1)

    def _gaps(self, event: DpEvent, relation: Relation) -> list[DpEvent]:
        accountant = packaged.RenyiAccountant(relation, self.orders)
        return [
            part
            for part, _ in packaged.parts(event, relation)
            if not accountant.supports(packaged.told_to_rdp(part, relation))
        ]

    def epsilon(
        self, event: DpEvent, *, delta: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return ε at this δ, or raise `Refused` with the remedy."""
        require_delta(delta)
        return float(compute_epsilon(*self.curve(event, relation), delta)[0])

    def delta(
        self, event: DpEvent, *, epsilon: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return δ at this ε, or raise `Refused` with the remedy."""
        require_epsilon(epsilon)
        return float(compute_delta(*self.curve(event, relation), epsilon)[0])


PLD = Pld()
"""Privacy loss distributions, the default."""

RDP = Rdp()
"""Rényi DP."""


def require_delta(delta: float) -> None:
    """Raise unless δ is a probability strictly between 0 and 1."""
    if not 0 < delta < 1:
        raise ValueError(f"expected 0 < delta < 1, got {delta}; a value below 1/records is usual")


def require_epsilon(epsilon: float) -> None:
    """Raise unless ε is 0 or more and finite."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"expected epsilon >= 0 and finite, got {epsilon}; 1 to 8 is usual")


def _bare(event: DpEvent) -> bool:
    return any(isinstance(part, NonPrivateDpEvent) for part, _ in leaves(event))


def _fourier_slack(event: DpEvent) -> float:
    # Composing T times in the Fourier domain was seen to take up to 2.4e-17·T off δ (T to 1e6,
    # against the exact Gaussian mechanism; tests/accounting/test_reference_values.py): 2⁻⁵²·T
    # is nine times that.
    return sum(count for _, count in leaves(event)) * 2.0**-52
