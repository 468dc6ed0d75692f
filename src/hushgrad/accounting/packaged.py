"""`dp_accounting` as it is told about our events: what a multiplier means, and what is covered.

Under replace-one its RDP accountant takes noise ÷ sensitivity, which is noise/(2C), and its PLD
accountant takes noise/C and doubles by itself. Both were tried against version 0.6 and are pinned
by tests/accounting/test_relations.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attr
import numpy as np
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)
from dp_accounting.dp_event import (
    LaplaceDpEvent,
    RepeatAndSelectDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from dp_accounting.pld import PLDAccountant, common, privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant

from hushgrad.accounting.events import PureDpEvent, ShuffledDpEvent, merged, on_one_batch
from hushgrad.types import Refused, Relation

_RELATIONS = {
    Relation.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
    Relation.REPLACE_ONE: NeighboringRelation.REPLACE_ONE,
    Relation.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
}
_MOST_POINTS = 1e6  # of a grid; beyond, the grid is made coarser, which over-states ε

Parts = list[tuple[DpEvent, int]]
"""Events that are no compositions, with the number of times that each happens."""


class PldAccountant(PLDAccountant):  # type: ignore[misc]
    """The package's PLD accountant, which also knows `PureDpEvent`."""

    def __init__(self, relation: Relation, interval: float) -> None:
        super().__init__(_RELATIONS[relation], interval)

    def _maybe_compose(self, event: DpEvent, count: int, do_compose: bool) -> Any:
        if not isinstance(event, PureDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if do_compose:
            pair = privacy_loss_distribution.from_privacy_parameters(
                common.DifferentialPrivacyParameters(event.epsilon, 0.0),
                self._value_discretization_interval,
            )
            self._pld: Any = self._pld.compose(pair.self_compose(count))
        return None


class RenyiAccountant(RdpAccountant):  # type: ignore[misc]
    """The package's RDP accountant, which also knows `PureDpEvent`."""

    def __init__(self, relation: Relation, orders: tuple[float, ...]) -> None:
        super().__init__(orders, _RELATIONS[relation])

    def _maybe_compose(self, event: DpEvent, count: int, do_compose: bool) -> Any:
        if not isinstance(event, PureDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if do_compose:
            # Randomised response is the worst that ε-DP can be: e^ε against 1, and the reverse.
            alpha, total = self._orders, np.logaddexp(0, event.epsilon)
            worst = np.logaddexp(alpha * event.epsilon, (1 - alpha) * event.epsilon)
            self._rdp += count * (worst - total) / (alpha - 1)
        return None


def parts(event: DpEvent, relation: Relation) -> Parts:
    """Take a composition apart; shuffled passes count one by one where they may count at all."""
    found: Parts = []
    for part, count in merged(event):
        if isinstance(part, ShuffledDpEvent) and relation is not Relation.ADD_REMOVE:
            found += [(p, count * part.epochs * c) for p, c in merged(part.event)]
        else:
            found.append((_on_one_batch(part), count))
    return found


def _on_one_batch(part: DpEvent) -> DpEvent:
    if not isinstance(part, PoissonSampledDpEvent | SampledWithoutReplacementDpEvent):
        return part
    try:
        return attr.evolve(part, event=on_one_batch(part.event))
    except Refused:  # left as it is, for the accountant to refuse
        return part


def told_to_rdp(part: DpEvent, relation: Relation) -> DpEvent:
    """Return what the RDP accountant has to be told: noise ÷ sensitivity.

    An event that it does not know stays as it is, to be refused.
    """
    if relation is not Relation.REPLACE_ONE:
        return part
    if isinstance(part, GaussianDpEvent | LaplaceDpEvent):
        return attr.evolve(part, noise_multiplier=part.noise_multiplier / 2)
    if isinstance(part, SampledWithoutReplacementDpEvent | RepeatAndSelectDpEvent):
        return attr.evolve(part, event=_nested(part.event))
    return part


def _nested(event: DpEvent) -> DpEvent:
    if hasattr(event, "events"):
        return attr.evolve(event, events=[_nested(inner) for inner in event.events])
    if hasattr(event, "count"):
        return attr.evolve(event, event=_nested(event.event))
    return told_to_rdp(event, Relation.REPLACE_ONE)


def interval_for(event: DpEvent, relation: Relation, interval: float) -> float:
    """Return the grid's step: `interval`, or more where the losses spread too far for it."""
    return max(
        interval, sum(_spread(p, n, relation) for p, n in parts(event, relation)) / _MOST_POINTS
    )


def _spread(part: DpEvent, count: int, relation: Relation) -> float:
    """Estimate how far the privacy loss of `count` such events spreads; a guide to speed only."""
    double = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    if isinstance(part, GaussianDpEvent):
        return _reach(count * (double / part.noise_multiplier) ** 2)
    if isinstance(part, PoissonSampledDpEvent) and isinstance(part.event, GaussianDpEvent):
        rate, one = part.sampling_probability, (double / part.event.noise_multiplier) ** 2
    elif isinstance(part, TruncatedSubsampledGaussianDpEvent):
        rate, one = part.sampling_probability, (4 / part.noise_multiplier) ** 2
    else:
        return 0.0
    each = min(one, rate**2 * math.expm1(min(one, 50.0)))
    return _reach(one) + _reach(count * each)


def _reach(mu_squared: float) -> float:
    return mu_squared / 2 + 10 * math.sqrt(mu_squared)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the package's warnings that an order was left out, which is on the private side."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
