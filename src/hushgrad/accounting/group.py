"""Privacy of several records at once: a group of k, or a user who has at most k."""

from __future__ import annotations

import math

import attr
import numpy as np
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
    TruncatedSubsampledGaussianDpEvent,
)
from scipy.stats import binom

from hushgrad.accounting.accountants import PLD, Accountant, Pld, require_delta
from hushgrad.accounting.backend import kinds, parts
from hushgrad.accounting.calibration import require_proof
from hushgrad.events import MixedDpEvent, PureDpEvent
from hushgrad.types import Refused, Relation

_MOST_NUMBERS = 48  # of records drawn from a group that are told apart
_RARE = 1e-15  # the chance of more or fewer than those, which are rounded up much further
_LARGEST = 10**6
"""The largest group: beyond, next to nothing protects it, or its cost takes minutes to find."""


def group_epsilon(
    event: DpEvent,
    *,
    size: int,
    delta: float,
    relation: Relation = Relation.ADD_REMOVE,
    accountant: Accountant = PLD,
) -> float:
    """Return ε for `size` records (k) at once, or for a user who has at most that many.

    Under add/remove the whole group is added or the whole group is removed, and under zero-out
    the whole group is blanked: a guarantee for a user who takes part or does not. Adding some
    records while removing others is another relation, which the mixture below does not cover.

    Noise on whole batches is accounted for at k times the sensitivity. Poisson sampling by PLD
    counts how many of the k are drawn, a mixture of Gaussians at 0 up to k times the bound.
    Anything else goes through (ε, δ) → (kε, δ(e^kε − 1)/(e^ε − 1)), which is far from tight.

    Reference: Ganesh 2024, Tight Group-Level DP Guarantees for DP-SGD; Vadhan 2017, Lemma 2.2.
    """
    require_proof(accountant)
    require_delta(delta)
    if not 1 <= size <= _LARGEST or size != int(size):
        raise ValueError(
            f"expected size to be a whole number from 1 to {_LARGEST:g}, got {size}; pass how many "
            "records one user has at most"
        )
    if size == 1:
        return accountant.epsilon(event, delta=delta, relation=relation)
    scaled = _grouped(event, size, relation, drawn=False)
    if scaled is not None:
        return accountant.epsilon(scaled, delta=delta, relation=relation)
    counted = _grouped(event, size, relation, drawn=isinstance(accountant, Pld))
    if counted is not None:
        # On the fine grid a mixture takes seconds; the coarse one over-states a little.
        return accountant.sketch().epsilon(counted, delta=delta, relation=relation)
    return _converted(event, size, delta, relation, accountant.sketch())


def _grouped(event: DpEvent, size: int, relation: Relation, *, drawn: bool) -> DpEvent | None:
    """The event as the whole group sees it, or None where a part has no such form.

    `drawn` allows Poisson sampling, as a mixture over how many of the group are drawn.
    """
    found = []
    for part, count in parts(event, relation):
        one = _of_group(part, size, relation, drawn=drawn)
        if one is None:
            return None
        found.append(SelfComposedDpEvent(one, count))
    return ComposedDpEvent(found)


def _of_group(part: DpEvent, size: int, relation: Relation, *, drawn: bool) -> DpEvent | None:
    match part:
        case MixedDpEvent():
            each = tuple(_grouped(inner, size, relation, drawn=drawn) for inner in part.events)
            return None if None in each else MixedDpEvent(each, part.probabilities)
        case PureDpEvent():
            return PureDpEvent(size * part.epsilon)
        case GaussianDpEvent() | LaplaceDpEvent():
            return attr.evolve(part, noise_multiplier=part.noise_multiplier / size)
        case PoissonSampledDpEvent(event=GaussianDpEvent(noise_multiplier=z)):
            if drawn and relation is not Relation.REPLACE_ONE:
                return _counted(z, size, part.sampling_probability)
    return None


def _counted(noise_multiplier: float, size: int, rate: float) -> DpEvent:
    """A sum that moves by as many bounds as there are records of the group in the batch.

    Of large groups some numbers are rounded up, which over-states: a mixture that moves further,
    with the same probabilities, is less private (Choquette-Choo et al. 2023, Lemma 4.4).
    """
    lengths = _numbers(size, rate)
    # P(N <= n) loses its digits near 1, and P(N > n) does far below: each is used where it is small
    below, above = binom.cdf(lengths, size, rate), binom.sf(lengths, size, rate)
    rising, falling = np.diff(below, prepend=0.0), -np.diff(above, prepend=1.0)
    chances = [float(p) for p in np.maximum(np.where(below < 0.5, rising, falling), 0.0)]
    # They must add up to 1. What is missing goes where it costs most; what is too much comes from
    # the largest of them, as the last may be smaller than the rounding.
    over = math.fsum(chances) - 1
    chances[-1] -= min(over, 0.0)
    chances[chances.index(max(chances))] -= max(over, 0.0)
    return MixtureOfGaussiansDpEvent(
        noise_multiplier, tuple(float(n) for n in lengths), tuple(chances)
    )


def _numbers(size: int, rate: float) -> list[int]:
    """The numbers of records drawn that are told apart: all of them, or the likely ones' steps."""
    if size <= _MOST_NUMBERS:
        return list(range(size + 1))
    first, last = (int(binom.isf(p, size, rate)) for p in (1 - _RARE, _RARE))
    found = {round(first + (last - first) * k / _MOST_NUMBERS) for k in range(_MOST_NUMBERS + 1)}
    while last < size:
        last = min(2 * last + 1, size)
        found.add(last)
    return sorted(found)


def _converted(
    event: DpEvent, size: int, delta: float, relation: Relation, accountant: Accountant
) -> float:
    """Return k times the least ε of one record whose δ, so enlarged, is small enough."""
    cut = any(isinstance(p, TruncatedSubsampledGaussianDpEvent) for p in kinds(event, relation))
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
    if one == math.inf:
        return one
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
