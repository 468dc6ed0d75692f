"""Calibration: finds the one number of a run that is missing: noise, steps, batch or ε.

`aiming` usually finds the noise in a few evaluations. If it fails, and for whole numbers, a search
brackets the target from a safe value, narrows the bracket with fast accountants, and confirms the
result with the accountant that was asked for. Every returned value has been confirmed, so an error
of the search costs utility, never privacy.
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

_CLOSE = 1e-4  # a search ends when ε is this close to its aim, relative to it
_NEAR = 7.5e-4  # a result is accepted when the confirmed ε is this close below the target
_START_NOISE, _MOST_NOISE, _LEAST_NOISE = 2.0**10, 2.0**40, 2.0**-6
_MOST_STEPS = 2**30
_ROUNDS = 3


@dataclass(frozen=True)
class Target:
    """The guarantee that calibration must meet.

    Args:
        epsilon: ε.
        delta: δ.
        relation: what makes two data sets neighbours.
        accountant: which accountant must confirm it.

    Raises:
        Refused: for an accountant that only approximates, such as GDP.
        ValueError: if ε or δ is out of range.

    Example:
        >>> from hushgrad.accounting import gaussian
        >>> f"{Target(3.0, 1e-5).spent(gaussian(2.0)):.2f}"
        '1.99'
    """

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
    """The result of `calibrate`: a run, its (ε, δ), and everything that these depend on.

    Args:
        training: the run, with no number missing.
        epsilon: the confirmed ε.
        delta: δ.
        relation: what makes two data sets neighbours.
        accountant: the name of the accountant.

    Example:
        >>> run = Training(records=1000, batch=10, noise_multiplier=2.0, steps=100)
        >>> found = calibrate(run, delta=1e-5)
        >>> found.accountant, f"{found.epsilon:.3f}"
        ('pld', '0.190')
    """

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
    """Find the number that is missing: exactly one of ε and the run's noise, steps and batch.

    Guarantees: the ε of the result, by this accountant, is at most the one asked for, and within
    0.1 % of it unless whole steps or records leave a larger gap.

    Args:
        training: the run; what is to be found is None.
        delta: δ.
        epsilon: ε, or None to find it.
        relation: what makes two data sets neighbours.
        accountant: which accountant must confirm the result.

    Raises:
        ValueError: unless exactly one number is missing.
        Refused: if no value meets the target, or the accountant does not cover the run.

    Example:
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
            f"{', '.join(missing) or 'none'}; leave out only the one to be found"
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
    """Return the smallest noise multiplier that meets the target, within 0.1 %, and its ε.

    Args:
        event_of: maps a noise multiplier to an event; more noise must mean less ε.
        target: the guarantee to meet.

    Raises:
        Refused: if no noise meets the target.

    Example:
        >>> from hushgrad.accounting import gaussian
        >>> noise, epsilon = least_noise(gaussian, Target(1.0, 1e-5))
        >>> f"{noise:.2f}", epsilon <= 1.0
        ('3.73', True)
    """

    def search(spend: CostOf, epsilon: float, start: float | None) -> float:
        safe = start or _START_NOISE
        while spend(safe) > epsilon:
            safe *= 16
            if safe > _MOST_NOISE:
                raise Refused(
                    f"expected a target that enough noise meets, got epsilon {target.epsilon} at "
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
    """Return the largest whole number that meets the target, or 0.1 % less, and its ε.

    Args:
        event_of: maps a number (of steps, of records in a batch) to an event; a larger number must
            mean a larger ε.
        target: the guarantee to meet.
        limit: the largest number to consider.

    Raises:
        Refused: if not even 1 meets the target.

    Example:
        >>> from hushgrad.accounting import gaussian, repeated
        >>> steps, epsilon = most(
        ...     lambda n: repeated(n, gaussian(20.0)), Target(1, 1e-5), limit=1000
        ... )
        >>> steps, epsilon <= 1
        (28, True)
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
    """Search with faster accountants, correcting the aim until the exact one confirms."""
    exact, *quicker = _levels(event_of, target)
    value, aim = None, target.epsilon
    for spend in reversed(quicker):
        try:
            value = search(spend, aim, value)
        except Refused:  # a coarse grid may not meet the target at all; the next one is finer
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
    """Return the functions from value to ε: by the exact accountant, its sketch, that one's."""
    accountants = [target.accountant]
    while accountants[-1].sketch() != accountants[-1] and len(accountants) < 3:
        accountants.append(accountants[-1].sketch())

    def spend_by(accountant: Accountant) -> CostOf:
        asked = replace(target, accountant=accountant)
        return functools.cache(lambda value: asked.spent(event_of(value)))

    return [spend_by(accountant) for accountant in accountants]


def _frontier(spend: CostOf, epsilon: float, *, safe: float, stride: float, limit: float) -> float:
    """Return the last value between `safe` and `limit` whose ε is at most `epsilon`.

    With a limit above `safe` it searches whole numbers.
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
    """Move an end that stays in place halfway to the target (as in the Illinois method)."""
    return math.sqrt(max(spent, 1e-3 * epsilon) * epsilon)


def require_proof(accountant: Accountant) -> None:
    """Raise `Refused` for an accountant whose figures are not proven upper bounds."""
    if not accountant.proves:
        raise Refused(
            f"expected an accountant that proves its figures, got {accountant.name}, an "
            "approximation that may under-state epsilon; use pld or rdp"
        )
