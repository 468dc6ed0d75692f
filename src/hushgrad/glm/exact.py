"""The exact accountant of full-batch descent: Gaussian releases compose to one Gaussian release."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dp_accounting import DpEvent, GaussianDpEvent

from hushgrad.accounting import Accountant
from hushgrad.accounting.accountants import require_delta, require_epsilon
from hushgrad.accounting.closed_forms import gaussian_delta, gaussian_epsilon
from hushgrad.events import count_leaves, joint_multiplier
from hushgrad.types import Refused, Relation


@dataclass(frozen=True)
class ExactGaussian:
    """An accountant for Gaussian releases in closed form: exact, and fast at every ε.

    Reference: Balle and Wang 2018, Theorem 8; Dong et al. 2022, Corollary 3.3, for composition.
    """

    name: str = field(default="exact Gaussian", init=False)
    proves: bool = field(default=True, init=False)

    def sketch(self) -> Accountant:
        """Return itself: it is fast."""
        return self

    def supports(self, event: DpEvent, relation: Relation) -> bool:
        """Tell whether the event consists of Gaussian releases of all records."""
        parts = count_leaves(event)
        return bool(parts) and all(isinstance(part, GaussianDpEvent) for part, _ in parts)

    def epsilon(
        self, event: DpEvent, *, delta: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return ε at this δ."""
        require_delta(delta)
        return gaussian_epsilon(self._multiplier(event, relation), delta=delta)

    def delta(
        self, event: DpEvent, *, epsilon: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """Return δ at this ε."""
        require_epsilon(epsilon)
        return gaussian_delta(self._multiplier(event, relation), epsilon=epsilon)

    def _multiplier(self, event: DpEvent, relation: Relation) -> float:
        """Noise ÷ sensitivity of all releases together."""
        if not self.supports(event, relation):
            raise Refused(
                f"expected Gaussian releases of all records, got {event}; use the pld accountant"
            )
        doubled = 2 if relation is Relation.REPLACE_ONE else 1
        shares = (part.noise_multiplier / math.sqrt(count) for part, count in count_leaves(event))
        return joint_multiplier(shares) / doubled


EXACT = ExactGaussian()
"""The exact accountant of full-batch Gaussian releases."""
