"""Find the one number of a run that is missing: noise, steps, batch or ε.

Noise is mostly found by `aiming`, in a few steps. Where that fails, and for whole numbers, a search
marches from a safe value until ε is over the target, closes in on a quick accountant, and confirms
with the one that was asked for. What is returned has been confirmed, so it errs on the private side
whatever the search did.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from dp_accounting import DpEvent

from hushgrad.accounting.accountants import PLD, Accountant, require_delta
from hushgrad.accounting.aiming import CostOf, NoiseSearch, aim_noise
from hushgrad.accounting.training import Training
from hushgrad.types import Refused, Relation

_CLOSE = 1e-4  # a search ends when ε is this near to its aim, relative to it
_NEAR = 7.5e-4  # and what it found is taken when the real ε is this near to the target
_START_NOISE, _MOST_NOISE, _LEAST_NOISE = 2.0**10, 2.0**40, 2.0**-6
_MOST_STEPS = 2**30
_ROUNDS = 3


@dataclass(frozen=True)
class Target:
    """The guarantee that is asked for. An accountant that only approximates is refused."""

    epsilon: float
    delta: float
    relation: Relation = Relation.ADD_REMOVE
    accountant: Accountant = PLD

    def __post_init__(self) -> None:
        require_proof(self.accountant)
        require_delta(self.delta)
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ValueError(
                f"expected epsilon > 0 and finite, got {self.epsilon}; 1 to 8 is usual"
            )

    def spent(self, event: DpEvent) -> float:
        """Return the ε of `event` by the accountant of this target."""
        return self.accountant.epsilon(event, delta=self.delta, relation=self.relation)


@dataclass(frozen=True)
class Calibrated:
    """A run and what it guarantees, with everything that the two numbers depend on."""

    training: Training
    epsilon: float
    delta: float
    relation: Relation
    accountant: str


def calibrate(
    training: Training,
    *,
    delta: float,
    epsilon: float | None = None,
    relation: Relation = Relation.ADD_REMOVE,
    accountant: Accountant = PLD,
) -> Calibrated:
    """Find what is missing: exactly one of ε and the run's noise, steps and batch.

    Guarantees: the ε of the result, by this accountant, is at most the one asked for, and within
    0.1 % of it unless whole steps or records leave a larger gap.

    >>> run = Training(records=50_000, batch=1000, noise_multiplier=None, steps=5000)
    >>> found = calibrate(run, epsilon=3.21, delta=1e-5)
    >>> found.epsilon <= 3.21, f"{found.training.noise_multiplier:.2f}"
    (True, '2.00')
    """
    require_proof(accountant)
    missing = training.missing + ([] if epsilon is not None else ["epsilon"])
    if len(missing) != 1:
        raise ValueError(
            f"expected one of epsilon, batch, noise_multiplier and steps to be None, got "
            f"{', '.join(missing) or 'none'}; leave out the one to be found"
        )
    if epsilon is None:
        spent = accountant.epsilon(training.event, delta=delta, relation=relation)
        return Calibrated(training, spent, delta, relation, accountant.name)
    found, spent = _complete(training, missing[0], Target(epsilon, delta, relation, accountant))
    return Calibrated(found, spent, delta, relation, accountant.name)


def _complete(training: Training, name: str, target: Target) -> tuple[Training, float]:
    if name == "noise_multiplier":
        noise, spent = least_noise(lambda z: replace(training, noise_multiplier=z).event, target)
        return replace(training, noise_multiplier=noise), spent
    if name == "steps":
        steps, spent = most(lambda n: replace(training, steps=n).event, target, limit=_MOST_STEPS)
        return replace(training, steps=steps), spent
    limit = training.records
    batch, spent = most(lambda n: replace(training, batch=n).event, target, limit=limit)
    return replace(training, batch=batch), spent


def least_noise(event_of: Callable[[float], DpEvent], target: Target) -> tuple[float, float]:
    """Return the least noise multiplier that meets the target, to 0.1 %, and the ε it costs.

    `event_of` may be any event that gets more private with the multiplier.
    """

    def search(spend: CostOf, epsilon: float, start: float | None) -> float:
        safe = start or _START_NOISE
        while spend(safe) > epsilon:
            safe *= 16
            if safe > _MOST_NOISE:
                raise Refused(
                    f"expected a target that some noise meets, got epsilon {target.epsilon} at "
                    f"delta {target.delta}; ask for a larger epsilon or take fewer steps"
                )
        stride = 0.98 if start else 0.25
        return _frontier(spend, epsilon, safe=safe, stride=stride, limit=_LEAST_NOISE)

    near = target.epsilon * (1 - _NEAR)
    asked = NoiseSearch(
        event_of, target.accountant, target.delta, target.relation, near, target.epsilon
    )
    return aim_noise(asked) or _search_confirmed(event_of, target, search)


def most(event_of: Callable[[int], DpEvent], target: Target, *, limit: int) -> tuple[int, float]:
    """Return the largest number up to `limit` that meets the target, or 0.1 % less, and its ε.

    `event_of` may be any event that gets less private with the number: steps, a batch's size.
    """

    def search(spend: CostOf, epsilon: float, start: float | None) -> float:
        safe = start if start and spend(start) <= epsilon else 1.0
        if spend(safe) > epsilon:
            raise Refused(
                f"expected a target that one step or record meets, got epsilon {target.epsilon} "
                f"at delta {target.delta}; ask for a larger epsilon or add noise"
            )
        stride = 1.02 if safe > 1 else 4.0
        return _frontier(spend, epsilon, safe=safe, stride=stride, limit=limit)

    number, spent = _search_confirmed(lambda number: event_of(int(number)), target, search)
    return int(number), spent


def _search_confirmed(
    event_of: Callable[[float], DpEvent],
    target: Target,
    search: Callable[[CostOf, float, float | None], float],
) -> tuple[float, float]:
    """Search with quicker accountants, aiming again until the one asked for confirms."""
    exact, *quicker = _levels(event_of, target)
    value, aim = None, target.epsilon
    for spend in reversed(quicker):
        try:
            value = search(spend, aim, value)
        except Refused:  # too coarse to meet the target at all; the next one is finer
            continue
    best, seen = None, set[float]()
    while value is not None and value not in seen and len(seen) < _ROUNDS:
        seen.add(value)
        spent = exact(value)
        if spent <= target.epsilon:
            best = value
            if spent >= target.epsilon * (1 - _NEAR):
                return value, spent
        aim *= target.epsilon / max(spent, target.epsilon / 2) * (1 - _CLOSE)
        value = search(quicker[0], aim, value)
    best = search(exact, target.epsilon, best)
    return best, exact(best)


def _levels(event_of: Callable[[float], DpEvent], target: Target) -> list[CostOf]:
    """What a value costs: by the accountant asked for, by its sketch, and by that one's."""
    accountants = [target.accountant]
    while accountants[-1].sketch() != accountants[-1] and len(accountants) < 3:
        accountants.append(accountants[-1].sketch())

    def spend_by(accountant: Accountant) -> CostOf:
        asked = replace(target, accountant=accountant)
        return functools.cache(lambda value: asked.spent(event_of(value)))

    return [spend_by(accountant) for accountant in accountants]


def _frontier(spend: CostOf, epsilon: float, *, safe: float, stride: float, limit: float) -> float:
    """Return the last value on the way from `safe` to `limit` that spends at most `epsilon`.

    A limit above `safe` means whole numbers.
    """
    whole = stride > 1
    inner, outer = safe, safe
    while spend(outer) <= epsilon:
        inner = outer
        if inner == limit:
            return inner
        outer = min(math.ceil(inner * stride), limit) if whole else max(inner * stride, limit)
        stride = min(stride**2, 4.0) if whole else max(stride**2, 0.25)
    low, high, held = spend(inner), spend(outer), 0
    while spend(inner) < epsilon * (1 - _CLOSE) and abs(math.log(outer / inner)) > 1e-7:
        if whole and outer - inner <= 1:
            break
        value = _between(inner, outer, low, high, epsilon)
        if whole:
            value = min(max(math.floor(value), inner + 1), outer - 1)
        if spend(value) <= epsilon:
            inner, low = value, spend(value)
            held = max(held, 0) + 1
            high = _soften(high, epsilon) if held > 1 else high
        else:
            outer, high = value, spend(value)
            held = min(held, 0) - 1
            low = _soften(low, epsilon) if held < -1 else low
    return inner


def _between(inner: float, outer: float, low: float, high: float, epsilon: float) -> float:
    """Interpolate log ε in the logarithm of the value, aiming a little below the target."""
    floor = 1e-3 * epsilon
    below, above = math.log(max(low, floor)), math.log(min(high, 1e3 * epsilon))
    aim = math.log(epsilon) - _CLOSE / 2
    share = min(max((aim - below) / (above - below), 1e-3), 1 - 1e-3)
    return float(inner * (outer / inner) ** share)


def _soften(spent: float, epsilon: float) -> float:
    """Halve the distance to the target of an end that stays, so that the other one moves on."""
    return math.sqrt(max(spent, 1e-3 * epsilon) * epsilon)


def require_proof(accountant: Accountant) -> None:
    """Raise for an accountant whose figures are no upper bounds."""
    if not accountant.proves:
        raise Refused(
            f"expected an accountant that proves its figures, got {accountant.name}, which is an "
            "approximation and may under-state epsilon; use pld or rdp"
        )
