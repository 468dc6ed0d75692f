"""Group privacy: guarantees for k records at once, or for a user who has at most k records."""

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

_MOST_NUMBERS = 48  # how many numbers of drawn group members a mixture distinguishes
_RARE = 1e-15  # numbers that are rarer than this are rounded up coarsely
_LARGEST = 10**6
"""The largest group; a larger one is hardly protected, or its ε takes minutes to find."""


def group_epsilon(
    event: DpEvent,
    *,
    size: int,
    delta: float,
    relation: Relation = Relation.ADD_REMOVE,
    accountant: Accountant = PLD,
) -> float:
    """Return ε for a group of `size` records (k), or for a user who has at most k records.

    Guarantees: under add/remove the whole group is added or removed, and under zero-out the whole
    group is blanked: the guarantee for a user who takes part or does not. Adding some records
    while removing others is another relation, which this does not cover.

    Noise on full batches is accounted for at k times the sensitivity. Poisson sampling with PLD is
    a mixture of Gaussians over the number of group members that are drawn. Everything else uses
    (ε, δ) → (kε, δ(e^kε − 1)/(e^ε − 1)), which is far from tight.

    Args:
        event: the event of the run.
        size: k, at most a million.
        delta: δ for the group.
        relation: what makes two data sets neighbours, for a whole group.
        accountant: the accountant to use.

    Raises:
        ValueError: if k or δ is out of range.
        Refused: if the noise does not protect such a group.

    Example:
        >>> from hushgrad.accounting import gaussian
        >>> f"{group_epsilon(gaussian(4.0), size=4, delta=1e-5):.2f}"  # as one record at σ = 1
        '4.38'

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
        # A mixture takes seconds on the fine grid; the coarse grid over-states ε slightly.
        return accountant.sketch().epsilon(counted, delta=delta, relation=relation)
    return _converted(event, size, delta, relation, accountant.sketch())


def _grouped(event: DpEvent, size: int, relation: Relation, *, drawn: bool) -> DpEvent | None:
    """Return the event for the whole group, or None if a part has no such form.

    `drawn` allows Poisson sampling, as a mixture over the number of drawn group members.
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
    """Return the mixture of Gaussians whose shift is the number of drawn group members.

    For large groups some numbers are rounded up, which over-states ε: a mixture with larger shifts
    and the same probabilities is less private (Choquette-Choo et al. 2023, Lemma 4.4).
    """
    lengths = _numbers(size, rate)
    # P(N <= n) loses digits near 1, P(N > n) for small n: each is used where it is small.
    below, above = binom.cdf(lengths, size, rate), binom.sf(lengths, size, rate)
    rising, falling = np.diff(below, prepend=0.0), -np.diff(above, prepend=1.0)
    chances = [float(p) for p in np.maximum(np.where(below < 0.5, rising, falling), 0.0)]
    # They must add up to 1. A deficit goes to the largest shift, which costs most; an excess comes
    # off the largest probability, because others may be smaller than the excess.
    over = math.fsum(chances) - 1
    chances[-1] -= min(over, 0.0)
    chances[chances.index(max(chances))] -= max(over, 0.0)
    return MixtureOfGaussiansDpEvent(
        noise_multiplier, tuple(float(n) for n in lengths), tuple(chances)
    )


def _numbers(size: int, rate: float) -> list[int]:
    """Return the numbers of drawn members to distinguish: all, or a grid over the likely ones."""
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
    """Return k times the least ε of one record whose δ, converted to the group, is small enough."""
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
                f"expected enough noise to protect {size} records at once, got an epsilon above "
                f"{size * low:.0f}; use Poisson sampling with the pld accountant, or more noise"
            )
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return size * high
