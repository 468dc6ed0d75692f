"""Privacy of several records at once: a group of k, or a user who has at most k."""

from __future__ import annotations

import math

import attr
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.dp_event import (
    LaplaceDpEvent,
    MixtureOfGaussiansDpEvent,
    NoOpDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from scipy.stats import binom

from hushgrad.accounting.accountants import PLD, Accountant, Pld, require_delta
from hushgrad.accounting.calibration import require_proof
from hushgrad.accounting.events import PureDpEvent
from hushgrad.accounting.packaged import Parts, parts
from hushgrad.types import Refused, Relation


def group_epsilon(
    event: DpEvent,
    *,
    size: int,
    delta: float,
    relation: Relation = Relation.ADD_REMOVE,
    accountant: Accountant = PLD,
) -> float:
    """Return ε for any `size` records (k) at once, or for a user who has at most that many.

    Noise on whole batches is accounted for at k times the sensitivity. Poisson sampling by PLD
    counts how many of the k are drawn, a mixture of Gaussians. Anything else goes through
    (ε, δ) → (kε, δ(e^kε − 1)/(e^ε − 1)), which is far from tight.

    Reference: Ganesh 2024, Tight Group-Level DP Guarantees for DP-SGD; Vadhan 2017, Lemma 2.2.
    """
    require_proof(accountant)
    require_delta(delta)
    if size < 1 or size != int(size):
        raise ValueError(f"expected size to be a whole number above 0, got {size}; pass 1 or up")
    if size == 1:
        return accountant.epsilon(event, delta=delta, relation=relation)
    found = parts(event, relation)
    if all(_scales(part) for part, _ in found):
        scaled = _composed([(_scaled(part, size), count) for part, count in found])
        return accountant.epsilon(scaled, delta=delta, relation=relation)
    if isinstance(accountant, Pld) and _mixes(found, relation):
        mixed = _composed([(_mixed(part, size), count) for part, count in found])
        # On the fine grid a mixture takes seconds; the coarse one over-states a little.
        return accountant.sketch().epsilon(mixed, delta=delta, relation=relation)
    return _converted(event, size, delta, relation, accountant.sketch())


def _scales(part: DpEvent) -> bool:
    return isinstance(part, GaussianDpEvent | LaplaceDpEvent | PureDpEvent | NoOpDpEvent)


def _scaled(part: DpEvent, size: int) -> DpEvent:
    if isinstance(part, PureDpEvent):
        return PureDpEvent(size * part.epsilon)
    if isinstance(part, NoOpDpEvent):
        return part
    return attr.evolve(part, noise_multiplier=part.noise_multiplier / size)


def _mixes(found: Parts, relation: Relation) -> bool:
    return relation is not Relation.REPLACE_ONE and all(
        _scales(part)
        or (isinstance(part, PoissonSampledDpEvent) and isinstance(part.event, GaussianDpEvent))
        for part, _ in found
    )


def _mixed(part: DpEvent, size: int) -> DpEvent:
    if not isinstance(part, PoissonSampledDpEvent):
        return _scaled(part, size)
    drawn = range(size + 1)
    chances = [float(p) for p in binom.pmf(list(drawn), size, part.sampling_probability)]
    chances[-1] += 1 - math.fsum(chances)
    return MixtureOfGaussiansDpEvent(
        part.event.noise_multiplier, tuple(float(n) for n in drawn), tuple(chances)
    )


def _composed(found: Parts) -> DpEvent:
    return ComposedDpEvent([SelfComposedDpEvent(part, count) for part, count in found])


def _converted(
    event: DpEvent, size: int, delta: float, relation: Relation, accountant: Accountant
) -> float:
    """Return k times the least ε of one record whose δ, so enlarged, is small enough."""
    cut = any(isinstance(p, TruncatedSubsampledGaussianDpEvent) for p, _ in parts(event, relation))
    if cut and relation is Relation.ADD_REMOVE:
        raise Refused(
            "expected a group under replace-one or zero-out for truncated Poisson sampling, got "
            "add-remove, where the number of records changes; use replace-one"
        )

    def enough(epsilon: float) -> bool:
        grown = (size - 1) * epsilon
        if grown > 500:
            return False
        enlarged = math.exp(grown) * -math.expm1(-size * epsilon) / -math.expm1(-epsilon)
        return accountant.delta(event, epsilon=epsilon, relation=relation) * enlarged <= delta

    one = accountant.epsilon(event, delta=delta, relation=relation)
    low, high = max(one, 1e-9), max(2 * one, 1e-6)
    while not enough(high):
        low, high = high, 1.5 * high
        if size * high > 500:
            raise Refused(
                f"expected noise that protects {size} records at once, got an epsilon above "
                f"{size * low:.0f}; use Poisson sampling with pld, or more noise"
            )
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return size * high
