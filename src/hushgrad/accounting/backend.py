"""The adapter to `dp_accounting`: translates our events and multipliers into the package's.

Under replace-one the package's RDP accountant expects noise ÷ sensitivity, which is noise/(2C),
while its PLD accountant expects noise/C and doubles by itself. tests/accounting/test_coverage.py
pins both conventions, found in version 0.6.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attr
import numpy as np
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    NeighboringRelation,
    NonPrivateDpEvent,
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

from hushgrad.events import MixedDpEvent, PureDpEvent, ShuffledDpEvent, count_leaves, on_one_batch
from hushgrad.types import Refused, Relation

_RELATIONS = {
    Relation.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
    Relation.REPLACE_ONE: NeighboringRelation.REPLACE_ONE,
    Relation.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
}
_MOST_NOISE = 2.0**50
"""Multipliers above this count as this, and below its inverse as no noise: both over-state ε.

Accountants square the multiplier and its inverse, which must not overflow.
"""

_SPARSE = 1000  # steps; up to this many, the package's sparse composition is fast enough

CountedParts = list[tuple[DpEvent, int]]
"""Events that are not compositions, with the number of times that each happens."""


class PldAccountant(PLDAccountant):  # type: ignore[misc]
    """The package's PLD accountant, extended by `PureDpEvent` and mixtures."""

    def __init__(self, relation: Relation, interval: float) -> None:
        super().__init__(_RELATIONS[relation], interval)
        self._pld: Any
        self._relation = relation

    def _maybe_compose(self, event: DpEvent, count: int, do_compose: bool) -> Any:
        ours = isinstance(event, PureDpEvent)
        if do_compose and (ours or _is_slow(event)):
            one = _pld_of_step(event, self._relation, self._value_discretization_interval)
            self._pld = self._pld.compose(_compose_pld(one, count))
            return None
        return None if ours else super()._maybe_compose(event, count, do_compose)

    def mix(self, found: Iterable[tuple[PldAccountant, float]]) -> None:
        """Take the privacy loss of a mixture of these accountants, with these probabilities."""
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
    """Tell whether computing one step's privacy loss takes longer than composing many steps."""
    match event:
        case PoissonSampledDpEvent(event=GaussianDpEvent(noise_multiplier=z)):
            return bool(z > 0)
        case MixtureOfGaussiansDpEvent(z, tuple(lengths), tuple()):
            return bool(z > 0 and len(lengths) > 1)
        case TruncatedSubsampledGaussianDpEvent():
            sizes = (event.sampling_probability, event.truncated_batch_size, event.dataset_size)
            return bool(event.noise_multiplier > 0 and all(sizes))
    return False


def _compose_pld(one: Any, count: int) -> Any:
    """Compose `count` independent steps of this privacy loss.

    For a sparse distribution the package would first compute size**count, an integer with millions
    of digits, so it is made dense.
    """
    if count > _SPARSE:
        pmf = (one._pmf_remove.to_dense_pmf(), one._pmf_add.to_dense_pmf())
        one = privacy_loss_distribution.PrivacyLossDistribution(*pmf)
    return one.self_compose(count)


@functools.lru_cache(maxsize=4)
def _pld_of_step(event: DpEvent, relation: Relation, interval: float) -> Any:
    """Return the privacy loss of one step, cached because searches vary the number of steps."""
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
    if isinstance(event, TruncatedSubsampledGaussianDpEvent):
        return losses.from_truncated_subsampled_gaussian_mechanism(
            dataset_size=event.dataset_size,
            sampling_probability=event.sampling_probability,
            truncated_batch_size=event.truncated_batch_size,
            noise_multiplier=event.noise_multiplier,
            value_discretization_interval=interval,
            neighboring_relation=_RELATIONS[relation],
        )
    return losses.from_gaussian_mechanism(
        standard_deviation=event.event.noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=event.sampling_probability,
        neighboring_relation=_RELATIONS[relation],
    )


class RenyiAccountant(RdpAccountant):  # type: ignore[misc]
    """The package's RDP accountant, extended by `PureDpEvent`."""

    def __init__(self, relation: Relation, orders: tuple[float, ...]) -> None:
        super().__init__(orders, _RELATIONS[relation])

    def _maybe_compose(self, event: DpEvent, count: int, do_compose: bool) -> Any:
        if not isinstance(event, PureDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if do_compose:
            # Randomised response is the worst case of ε-DP: odds of e^ε against 1, and the reverse.
            alpha, total = self._orders, np.logaddexp(0, event.epsilon)
            worst = np.logaddexp(alpha * event.epsilon, (1 - alpha) * event.epsilon)
            self._rdp += count * (worst - total) / (alpha - 1)
        return None


def parts(event: DpEvent, relation: Relation) -> CountedParts:
    """Split a composition; shuffled epochs become their events, except under add/remove."""
    found: CountedParts = []
    for part, count in count_leaves(_in_range(event)):
        if isinstance(part, ShuffledDpEvent) and relation is not Relation.ADD_REMOVE:
            found += [(p, count * c) for p, c in count_leaves(part.event)]
        elif not isinstance(part, NoOpDpEvent):
            found.append((_on_one_batch(part), count))
    return found


def _in_range(event: DpEvent) -> DpEvent:
    """Clamp every multiplier to the range that can be squared, making the event less private."""
    if hasattr(event, "events"):
        return attr.evolve(event, events=[_in_range(inner) for inner in event.events])
    if hasattr(event, "event"):
        return attr.evolve(event, event=_in_range(event.event))
    mixture = isinstance(event, MixtureOfGaussiansDpEvent)
    name = "standard_deviation" if mixture else "noise_multiplier"
    noise = getattr(event, name, 1.0)
    if noise < 1 / _MOST_NOISE:
        return NonPrivateDpEvent()
    return attr.evolve(event, **{name: _MOST_NOISE}) if noise > _MOST_NOISE else event


def kinds(event: DpEvent, relation: Relation) -> Iterator[DpEvent]:
    """Yield every part of `event` that is neither a composition nor a mixture, recursively."""
    for part, _ in parts(event, relation):
        if isinstance(part, MixedDpEvent):
            for drawn in part.events:
                yield from kinds(drawn, relation)
        else:
            yield part


def composes_a_mixture(event: DpEvent, relation: Relation) -> bool:
    """Tell whether a mixture is composed with itself or with another event."""
    found = parts(event, relation)
    mixed = [part for part, _ in found if isinstance(part, MixedDpEvent)]
    if mixed and (len(found) > 1 or found[0][1] > 1):
        return True
    return any(composes_a_mixture(drawn, relation) for part in mixed for drawn in part.events)


def releases(event: DpEvent, relation: Relation) -> int:
    """Count the releases of `event`; for a mixture, those of its longest event."""
    return sum(
        count * max(releases(drawn, relation) for drawn in part.events)
        if isinstance(part, MixedDpEvent)
        else count
        for part, count in parts(event, relation)
    )


def pld_of(event: DpEvent, relation: Relation, interval: float) -> PldAccountant:
    """Return a PLD accountant that has composed `event`; it must cover every part."""
    accountant = PldAccountant(relation, interval)
    for part, count in parts(event, relation):
        if isinstance(part, MixedDpEvent):
            drawn = (pld_of(each, relation, interval) for each in part.events)
            accountant.mix(zip(drawn, part.probabilities, strict=True))
        else:
            accountant.compose(part, count)
    return accountant


def _on_one_batch(part: DpEvent) -> DpEvent:
    if not isinstance(part, PoissonSampledDpEvent | SampledWithoutReplacementDpEvent):
        return part
    try:
        return attr.evolve(part, event=on_one_batch(part.event))
    except Refused:  # unchanged, so that the accountant refuses it with a remedy
        return part


def rdp_event(part: DpEvent, relation: Relation) -> DpEvent:
    """Return the event that the RDP accountant expects: with noise ÷ sensitivity.

    An event that it does not know stays unchanged, and is refused later.
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
    return rdp_event(event, Relation.REPLACE_ONE)


@contextmanager
def silence_warnings() -> Iterator[None]:
    """Silence the package's warnings that it skips an order, which only over-states ε."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
