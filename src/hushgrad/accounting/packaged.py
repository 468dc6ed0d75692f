"""`dp_accounting` as it is told about our events: what a multiplier means, and what is covered.

Under replace-one its RDP accountant takes noise ÷ sensitivity, which is noise/(2C), and its PLD
accountant takes noise/C and doubles by itself. Both were tried against version 0.6 and are pinned
by tests/accounting/test_relations.py.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Iterator
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
    MixtureOfGaussiansDpEvent,
    NoOpDpEvent,
    RepeatAndSelectDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from dp_accounting.pld import PLDAccountant, common, privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant

from hushgrad.events import MixedDpEvent, PureDpEvent, ShuffledDpEvent, merged, on_one_batch
from hushgrad.types import Refused, Relation

_RELATIONS = {
    Relation.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
    Relation.REPLACE_ONE: NeighboringRelation.REPLACE_ONE,
    Relation.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
}
_MOST_POINTS = 1e6  # of all grids; beyond, they are made coarser, which over-states ε

Parts = list[tuple[DpEvent, int]]
"""Events that are no compositions, with the number of times that each happens."""


class PldAccountant(PLDAccountant):  # type: ignore[misc]
    """The package's PLD accountant, which also knows `PureDpEvent` and mixtures."""

    def __init__(self, relation: Relation, interval: float) -> None:
        super().__init__(_RELATIONS[relation], interval)
        self._pld: Any
        self._relation = relation

    def _maybe_compose(self, event: DpEvent, count: int, do_compose: bool) -> Any:
        ours = isinstance(event, PureDpEvent)
        if do_compose and (ours or _is_slow(event)):
            one = _once(event, self._relation, self._value_discretization_interval)
            self._pld = self._pld.compose(one.self_compose(count))
            return None
        return None if ours else super()._maybe_compose(event, count, do_compose)

    def mix(self, found: Iterable[tuple[PldAccountant, float]]) -> None:
        """Become one of these, each with its probability: their losses, so weighted."""
        total = 0.0
        for other, chance in found:
            total += chance
            if chance > 0:
                self._pld = other._losses().compute_mixture(self._pld, chance / total)

    def _losses(self) -> Any:
        if not self._contains_non_dp_event:
            return self._pld
        nothing = common.DifferentialPrivacyParameters(0.0, 1.0)
        return privacy_loss_distribution.from_privacy_parameters(
            nothing, self._value_discretization_interval
        )


def _is_slow(event: DpEvent) -> bool:
    """Tell whether one step takes the package longer than composing many."""
    match event:
        case PoissonSampledDpEvent(event=GaussianDpEvent(noise_multiplier=z)):
            return bool(z > 0)
        case MixtureOfGaussiansDpEvent(z, tuple(lengths), tuple()):
            return bool(z > 0 and len(lengths) > 1)
    return False


@functools.lru_cache(maxsize=4)
def _once(event: DpEvent, relation: Relation, interval: float) -> Any:
    """The privacy loss of one step, kept for the next number of steps that is asked about."""
    losses = privacy_loss_distribution
    if isinstance(event, PureDpEvent):
        pure = common.DifferentialPrivacyParameters(event.epsilon, 0.0)
        return losses.from_privacy_parameters(pure, interval)
    if isinstance(event, MixtureOfGaussiansDpEvent):
        return losses.from_mixture_gaussian_mechanism(
            standard_deviation=event.standard_deviation,
            sensitivities=event.sensitivities,
            sampling_probs=event.sampling_probs,
            value_discretization_interval=interval,
        )
    return losses.from_gaussian_mechanism(
        standard_deviation=event.event.noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=event.sampling_probability,
        neighboring_relation=_RELATIONS[relation],
    )


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
            found += [(p, count * c) for p, c in merged(part.event)]
        elif not isinstance(part, NoOpDpEvent):
            found.append((_on_one_batch(part), count))
    return found


def kinds(event: DpEvent, relation: Relation) -> Iterator[DpEvent]:
    """Every part of `event` that is neither a composition nor a mixture, those inside one too."""
    for part, _ in parts(event, relation):
        if isinstance(part, MixedDpEvent):
            for drawn in part.events:
                yield from kinds(drawn, relation)
        else:
            yield part


def composes_a_mixture(event: DpEvent, relation: Relation) -> bool:
    """Tell whether a mixture happens more than once, or together with another event."""
    found = parts(event, relation)
    mixed = [part for part, _ in found if isinstance(part, MixedDpEvent)]
    if mixed and (len(found) > 1 or found[0][1] > 1):
        return True
    return any(composes_a_mixture(drawn, relation) for part in mixed for drawn in part.events)


def releases(event: DpEvent, relation: Relation) -> int:
    """Count the releases of `event`; of a mixture those of its longest event."""
    return sum(
        count * max(releases(drawn, relation) for drawn in part.events)
        if isinstance(part, MixedDpEvent)
        else count
        for part, count in parts(event, relation)
    )


def composed(event: DpEvent, relation: Relation, interval: float) -> PldAccountant:
    """Return the PLD accountant that was told `event`, of which it covers every part."""
    accountant = PldAccountant(relation, interval)
    for part, count in parts(event, relation):
        if isinstance(part, MixedDpEvent):
            drawn = (composed(each, relation, interval) for each in part.events)
            accountant.mix(zip(drawn, part.probabilities, strict=True))
        else:
            accountant.compose(part, count)
    return accountant


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
    return max(interval, _spread_of(event, relation) / _MOST_POINTS)


def _spread_of(event: DpEvent, relation: Relation) -> float:
    return sum(
        math.fsum(_spread_of(drawn, relation) for drawn in part.events)
        if isinstance(part, MixedDpEvent)
        else _spread(part, count, relation)
        for part, count in parts(event, relation)
    )


def _spread(part: DpEvent, count: int, relation: Relation) -> float:
    """Estimate how far the privacy loss of `count` such events spreads; a guide to speed only."""
    one, each = _losses_of(part, relation)
    return _reach(count * one) if each == one else _reach(one) + _reach(count * each)


def _losses_of(part: DpEvent, relation: Relation) -> tuple[float, float]:
    """µ² of the noise alone and of one sampled step by the central limit; 0 where unknown."""
    double = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    if isinstance(part, GaussianDpEvent):
        one = (double / part.noise_multiplier) ** 2
        return one, one
    if isinstance(part, PoissonSampledDpEvent) and isinstance(part.event, GaussianDpEvent):
        rate, one = part.sampling_probability, (double / part.event.noise_multiplier) ** 2
    elif isinstance(part, TruncatedSubsampledGaussianDpEvent):
        rate, one = part.sampling_probability, (4 / part.noise_multiplier) ** 2
    else:
        return 0.0, 0.0
    return one, min(one, rate**2 * math.expm1(min(one, 50.0)))


def about_mu(event: DpEvent, relation: Relation) -> float | None:
    """About µ of the Gaussian mechanism that `event` is like; None where nobody can tell.

    By the central limit theorem, so it may under-state: good for a first guess and nothing else.
    """
    found = [(_losses_of(part, relation)[1], count) for part, count in parts(event, relation)]
    if not found or not all(each for each, _ in found):
        return None
    return math.sqrt(math.fsum(each * count for each, count in found))


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
