"""The accountants PLD and RDP, and what each covers under which relation.

`dp_accounting` composes and converts. This module translates noise multipliers for it under each
relation, makes sure that its rounding over-states ε, and refuses events that it does not cover,
with a remedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from dp_accounting import DpEvent, NonPrivateDpEvent
from dp_accounting.rdp.rdp_privacy_accountant import (
    DEFAULT_RDP_ORDERS,
    compute_delta,
    compute_epsilon,
)
from scipy.special import logsumexp

from hushgrad.accounting import backend
from hushgrad.accounting.refusals import refuse
from hushgrad.accounting.spread import interval_for
from hushgrad.events import MixedDpEvent
from hushgrad.types import Refused, Relation

_COARSEST = 100.0  # the largest grid step of privacy losses: the package computes e to its power


@runtime_checkable
class Accountant(Protocol):
    """The protocol of an accountant, which turns an event into (ε, δ) under a relation.

    Example:
        >>> isinstance(PLD, Accountant), PLD.name, PLD.proves
        (True, 'pld', True)
    """

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def proves(self) -> bool:
        """True if its figures are proven upper bounds; others are shown but never relied on."""

    def sketch(self) -> Accountant:
        """Return a faster accountant with similar figures, with which a search begins."""

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
    """The PLD accountant composes privacy loss distributions numerically; tightest, the default.

    Guarantees: ε is never below the true one. The rounding of its Fourier transforms is taken off
    δ, and a δ below that rounding is refused.

    Args:
        interval: the step of the grid on which privacy losses are rounded up.

    Example:
        >>> from hushgrad.accounting import gaussian
        >>> f"{Pld().epsilon(gaussian(1.0), delta=1e-5):.2f}"
        '4.38'

    Reference: Koskela, Jälkö and Honkela 2020, Computing Tight DP Guarantees Using FFT; Doroshenko
    et al. 2022, Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions.
    """

    interval: float = 1e-4
    name: str = field(default="pld", init=False)
    proves: bool = field(default=True, init=False)

    def sketch(self) -> Accountant:
        """Return PLD on a grid ten times as coarse, which over-states ε by about 0.1 %."""
        return Pld(10 * self.interval)

    def supports(self, event: DpEvent, relation: Relation) -> bool:
        """Tell whether the event is covered under this relation."""
        alone = not backend.composes_a_mixture(event, relation)
        return alone and not self._gaps(event, relation)

    def epsilon(
        self, event: DpEvent, *, delta: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return ε at this δ, or raise `Refused` with the remedy."""
        require_delta(delta)
        bare = _bare(event, relation)
        usable = delta - _fourier_slack(event, relation)
        found = math.inf
        if usable > 0 or bare:
            found = float(self._composed(event, relation).get_epsilon(max(usable, 0.0)))
        if found == math.inf and not bare:
            raise Refused(
                f"expected a delta above the rounding error of the pld accountant, got {delta}; "
                "use the rdp accountant or a larger delta"
            )
        return found

    def delta(
        self, event: DpEvent, *, epsilon: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return δ at this ε, or raise `Refused` with the remedy."""
        require_epsilon(epsilon)
        found = float(self._composed(event, relation).get_delta(epsilon))
        return min(1.0, max(0.0, found) + _fourier_slack(event, relation))

    def _gaps(self, event: DpEvent, relation: Relation) -> list[DpEvent]:
        accountant = backend.PldAccountant(relation, self.interval)
        return [p for p in backend.kinds(event, relation) if not accountant.supports(p)]

    def _composed(self, event: DpEvent, relation: Relation) -> backend.PldAccountant:
        for gap in self._gaps(event, relation):
            refuse(self, gap, relation, among=(PLD, RDP))
        if backend.composes_a_mixture(event, relation):
            raise Refused(
                "expected a single mixture for the pld accountant, got one that is composed with "
                "other events; use the rdp accountant"
            )
        interval = interval_for(event, relation, self.interval)
        if interval > _COARSEST:
            raise Refused(
                "expected enough noise for the grid of the pld accountant, got so little that "
                "almost nothing is hidden; use more noise, or the rdp accountant"
            )
        return backend.pld_of(event, relation, interval)


@dataclass(frozen=True)
class Rdp:
    """The RDP accountant adds up Rényi DP at a list of orders: looser than PLD, but simple.

    Args:
        orders: the orders α.

    Example:
        >>> from hushgrad.accounting import gaussian
        >>> f"{Rdp().epsilon(gaussian(1.0), delta=1e-5):.2f}"
        '4.73'

    Reference: Mironov 2017, Rényi Differential Privacy; Mironov, Talwar and Zhang 2019, Rényi DP
    of the Sampled Gaussian Mechanism; conversion: Canonne, Kamath and Steinke 2020, Prop. 12.
    """

    orders: tuple[float, ...] = tuple(DEFAULT_RDP_ORDERS)
    name: str = field(default="rdp", init=False)
    proves: bool = field(default=True, init=False)

    def sketch(self) -> Accountant:
        """Return itself: it is fast."""
        return self

    def supports(self, event: DpEvent, relation: Relation) -> bool:
        """Tell whether the event is covered under this relation."""
        return not self._gaps(event, relation)

    def curve(self, event: DpEvent, relation: Relation) -> tuple[np.ndarray, np.ndarray]:
        """Return the orders, and ε(α) at each of them."""
        for gap in self._gaps(event, relation):
            refuse(self, gap, relation, among=(PLD, RDP))
        return np.array(self.orders), self._added(event, relation, {})

    def _added(
        self, event: DpEvent, relation: Relation, known: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Add up ε(α) of the parts; `known` caches those of parts that occur more than once."""
        total = np.zeros(len(self.orders))
        for part, count in backend.parts(event, relation):
            key = repr(part)
            if key not in known:
                mixed = isinstance(part, MixedDpEvent)
                found = self._mixed(part, relation, known) if mixed else self._one(part, relation)
                known[key] = found
            total += count * known[key]
        return total

    def _one(self, part: DpEvent, relation: Relation) -> np.ndarray:
        accountant = backend.RenyiAccountant(relation, self.orders)
        with backend.silence_warnings():
            accountant.compose(backend.rdp_event(part, relation))
        # A value of 0 or less is a rounding error, which the package would treat as "no release".
        padding = 2.0**-50 / (np.array(self.orders) - 1)
        return np.asarray(np.maximum(accountant.rdp, 0.0) + padding)

    def _mixed(
        self, event: MixedDpEvent, relation: Relation, known: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return log(Σ p_t e^((α-1) ε_t(α))) / (α-1), the divergence of a public draw."""
        above = np.array(self.orders) - 1
        drawn = [
            math.log(chance) + above * self._added(each, relation, known)
            for each, chance in zip(event.events, event.probabilities, strict=True)
            if chance > 0
        ]
        return np.asarray(logsumexp(np.stack(drawn), axis=0) / above)

    def _gaps(self, event: DpEvent, relation: Relation) -> list[DpEvent]:
        accountant = backend.RenyiAccountant(relation, self.orders)
        return [
            part
            for part in backend.kinds(event, relation)
            if not accountant.supports(backend.rdp_event(part, relation))
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
"""The default accountant, which composes privacy loss distributions."""

RDP = Rdp()
"""The accountant of Rényi DP."""


def require_delta(delta: float) -> None:
    """Raise unless δ is a probability strictly between 0 and 1."""
    if not 0 < delta < 1:
        raise ValueError(f"expected 0 < delta < 1, got {delta}; a value below 1/records is usual")


def require_epsilon(epsilon: float) -> None:
    """Raise unless ε is 0 or more and finite."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"expected epsilon >= 0 and finite, got {epsilon}; 1 to 8 is usual")


def _bare(event: DpEvent, relation: Relation) -> bool:
    return any(isinstance(part, NonPrivateDpEvent) for part in backend.kinds(event, relation))


def _fourier_slack(event: DpEvent, relation: Relation) -> float:
    # Composing T times in the Fourier domain was measured to lose up to 2.4e-17·T of δ (T to 1e6,
    # compared with the exact Gaussian mechanism; tests/accounting/test_reference_values.py).
    # 2⁻⁵²·T is nine times that.
    return backend.releases(event, relation) * 2.0**-52
