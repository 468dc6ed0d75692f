"""Estimates how far privacy losses spread, and from that the step of PLD's grid.

These estimates affect only speed and memory. A grid that is too coarse over-states ε, so no proof
depends on them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent, TruncatedSubsampledGaussianDpEvent
from scipy.special import logsumexp

from hushgrad.accounting.backend import parts
from hushgrad.events import MixedDpEvent
from hushgrad.types import Relation

_MOST_POINTS = 1e6  # of the composed losses; beyond, the grid is made coarser
_MOST_OF_ONE = 4e5  # of one step's losses, each of which takes the package microseconds
_MOST_CELLS = 4e6  # of one step's losses × components, of which the package makes a whole matrix
_MOST_ROUNDED = 1e7  # steps × one step's deviation, on a grid that is coarser than the deviation
_FINE = 1e-4  # the step of a grid that may have all of these points
_MOST_TO_REFINE = 1e5  # of one step's losses, where a finer grid than asked for would help
_MANY = 1000  # steps, whose roundings add up
_TAIL = 40.0  # -log of the mass that the package cuts off each end, about
_ORDERS = np.concatenate((np.arange(-20, 0), np.arange(1, 21)))  # at which the package bounds it
_DEVIATE = np.linspace(-10, 10, 201)
_LOG_WEIGHT = -(_DEVIATE**2) / 2 - logsumexp(-(_DEVIATE**2) / 2)


@dataclass(frozen=True)
class _Mixture:
    """Sums that move by one of `lengths` (in units of the noise) with these probabilities.

    `mirrored` compares them with sums that move the other way, as replacing a record does.
    """

    lengths: tuple[float, ...]
    chances: tuple[float, ...]
    mirrored: bool


@dataclass(frozen=True)
class _Spread:
    """Points that a grid of step 1 would have for one step, and for all of them composed.

    The package makes a matrix with a row for each point of one step and a column for each of the
    mixture's components, whose number `cells` is. A grid whose step is above `fine` adds much to
    the variance of many small losses.
    """

    one: float
    composed: float
    cells: float
    fine: float = math.inf

    def interval(self, interval: float) -> float:
        share = min(max(_FINE / interval, 0.1), 1.0)  # a coarse grid has fewer points
        least = (
            self.one / _MOST_OF_ONE,
            self.composed / _MOST_POINTS,
            self.cells / _MOST_CELLS,
        )
        asked = min(interval, max(self.fine, self.one / _MOST_TO_REFINE))
        return max(asked, *(each / share for each in least))


def interval_for(event: DpEvent, relation: Relation, interval: float) -> float:
    """Return the grid's step: `interval`, or more if the losses spread too far for it."""
    return _spread(event, relation).interval(interval)


def about_mu(event: DpEvent, relation: Relation) -> float | None:
    """Return about µ of the Gaussian mechanism that resembles `event`; None if unknown.

    It uses the central limit theorem and may under-state, so it is only good for a first guess.
    """
    found = [(_chi_squared(part, relation), count) for part, count in parts(event, relation)]
    if not found or not all(each for each, _ in found):
        return None
    return math.sqrt(math.fsum(each * count for each, count in found))


def _chi_squared(part: DpEvent, relation: Relation) -> float:
    """About µ² of one step; 0 where unknown."""
    double = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    match part:
        case GaussianDpEvent(noise_multiplier=z):
            return float((double / z) ** 2)
        case PoissonSampledDpEvent(
            sampling_probability=q, event=GaussianDpEvent(noise_multiplier=z)
        ):
            # χ² of the mixture against the noise alone, or against the mirrored mixture. The
            # clamp at 50 keeps the exponential finite for very little noise.
            inverse = min(z**-2, 50.0)
            moved = math.expm1(inverse)
            found = 4 * math.sinh(inverse) if double == 2 else moved
            return float(min((double / z) ** 2, q**2 * found))
        case TruncatedSubsampledGaussianDpEvent():
            one = (4 / part.noise_multiplier) ** 2
            return float(min(one, part.sampling_probability**2 * math.expm1(min(one, 50.0))))
    return 0.0


def _spread(event: DpEvent, relation: Relation) -> _Spread:
    """Return the spread of a composition, whose parts are composed one after the other."""
    found = [_spread_of(part, count, relation) for part, count in parts(event, relation)]
    return _Spread(
        max((each.one for each in found), default=0.0),
        math.fsum(each.composed for each in found),
        max((each.cells for each in found), default=0.0),
        min((each.fine for each in found), default=math.inf),
    )


def _spread_of(part: DpEvent, count: int, relation: Relation) -> _Spread:
    if isinstance(part, MixedDpEvent):
        drawn = [_spread(each, relation) for each in part.events]
        return _Spread(
            max(each.one for each in drawn),
            count * max(each.composed for each in drawn),
            max(each.cells for each in drawn),
            min(each.fine for each in drawn),
        )
    squared = _chi_squared(part, relation)
    whole = _reach(count * squared)
    if isinstance(part, GaussianDpEvent):
        return _Spread(0.0, whole, 0.0)
    fine = math.sqrt(squared) / 4 if squared and count > _MANY else math.inf
    if isinstance(part, TruncatedSubsampledGaussianDpEvent):
        one = _reach((4 / part.noise_multiplier) ** 2)
        return _Spread(one, one + whole, 2 * one, fine)
    mixture = _mixture(part, relation)
    if mixture is None:
        return _Spread(0.0, 0.0, 0.0)
    found, deviation = _composed(mixture, count), math.sqrt(squared)
    coarse = found.composed / _MOST_POINTS > deviation / 2
    if coarse and count * deviation > _MOST_ROUNDED:
        # Rounding to a coarser grid makes the losses spread further, which needs a coarser grid.
        return replace(found, composed=math.inf)
    return replace(found, fine=fine)


def _reach(mu_squared: float) -> float:
    return mu_squared / 2 + 10 * math.sqrt(mu_squared)


def _mixture(part: DpEvent, relation: Relation) -> _Mixture | None:
    match part:
        case PoissonSampledDpEvent(
            sampling_probability=q, event=GaussianDpEvent(noise_multiplier=z)
        ) if q > 0:
            return _Mixture((0.0, 1 / z), (1 - q, q), relation is Relation.REPLACE_ONE)
        case MixtureOfGaussiansDpEvent(z, lengths, chances):
            drawn = [(n / z, p) for n, p in zip(lengths, chances, strict=True) if p > 0]
            moved, found = zip(*drawn, strict=True)
            return _Mixture(tuple(moved), tuple(found), False)
    return None


def _composed(mixture: _Mixture, count: int) -> _Spread:
    """The range of one step's losses, and where the package will cut their composition."""
    one, logs = _moments(mixture)
    cells = one * len(mixture.lengths)
    if one == 0 or count == 1:
        return _Spread(one, one, cells)
    width = 0.0
    for each in logs:
        bounds = (count * each + _TAIL) * one / _ORDERS
        bounds = np.where(np.isfinite(bounds), bounds, np.inf * _ORDERS)
        up, down = bounds[_ORDERS > 0].min(), bounds[_ORDERS < 0].max()
        width = max(width, min(up - down, count * one))
    return _Spread(one, max(one, width), cells)


@functools.lru_cache(maxsize=256)
def _moments(mixture: _Mixture) -> tuple[float, list[np.ndarray]]:
    """The range of the losses, and log E e^(λL) at the package's orders λ, in either direction."""
    lengths = np.array(mixture.lengths)
    log_chances = np.log(np.array(mixture.chances))
    moved = (lengths[:, None] + _DEVIATE).ravel()
    log_moved = (log_chances[:, None] + _LOG_WEIGHT).ravel()
    directions = [(_loss(mixture, moved), log_moved)]
    if not mixture.mirrored:  # else both directions are alike
        directions.append((-_loss(mixture, _DEVIATE), _LOG_WEIGHT))
    both = np.concatenate([directions[0][0], _loss(mixture, _DEVIATE)])
    one = float(both.max() - both.min())
    orders = _ORDERS / (one or 1.0)
    return one, [
        np.array([logsumexp(order * losses + log_weights) for order in orders])
        for losses, log_weights in directions
    ]


def _loss(mixture: _Mixture, at: np.ndarray) -> np.ndarray:
    """The logarithm of how much likelier the moved sums make each place."""
    lengths, log_chances = np.array(mixture.lengths), np.log(np.array(mixture.chances))
    offsets = log_chances - lengths**2 / 2
    moved = logsumexp(at[:, None] * lengths + offsets, axis=1)
    rest = logsumexp(-at[:, None] * lengths + offsets, axis=1) if mixture.mirrored else 0.0
    return np.asarray(moved - rest)
