"""The kinds of noise: their scale, their standard values and their event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import dp_accounting
from dp_accounting import DpEvent

from hushgrad.noise.standard import Pair, laplace_pair, normal_pair
from hushgrad.types import Bounded, Refused

_MOST_NOISE = 1e30  # times a clipping norm, it must be a float32


@dataclass(frozen=True)
class Noise:
    """A kind of noise.

    `scale` is its size for a given bound on one record, `pair` makes two of its standard values
    from two random words, and `event` is what adding it to such a sum is to an accountant.
    """

    name: str
    noise_multiplier: float
    event: DpEvent
    scale: Callable[[Bounded], float]
    pair: Pair

    def __repr__(self) -> str:
        return f"{self.name}({self.noise_multiplier})"


def gaussian(noise_multiplier: float) -> Noise:
    """Gaussian noise of standard deviation σ times the sum's `l2`.

    σ is noise ÷ the bound on one record, under every relation. With σ = 0 nothing is private, and
    the event says so.
    """
    _require_multiplier(noise_multiplier)
    event = (
        dp_accounting.GaussianDpEvent(noise_multiplier)
        if noise_multiplier
        else dp_accounting.NonPrivateDpEvent()
    )
    return Noise(
        "gaussian",
        noise_multiplier,
        event,
        lambda bounded: noise_multiplier * bounded.l2,
        normal_pair,
    )


def laplace(noise_multiplier: float) -> Noise:
    """Laplace noise of scale b = multiplier × the sum's `l1`; refused where no `l1` is stated.

    Scaled by a Euclidean bound it would not be private.
    """
    _require_multiplier(noise_multiplier)
    if noise_multiplier == 0:
        raise ValueError("expected a Laplace multiplier above 0, got 0; use gaussian(0.0)")

    def scale(bounded: Bounded) -> float:
        if bounded.l1 is None:
            raise Refused(
                "Laplace noise needs a bound on the sum of absolute values, and this sum states a "
                "Euclidean one only; use gaussian, or clip in the l1 norm and state l1"
            )
        return noise_multiplier * bounded.l1

    event = dp_accounting.LaplaceDpEvent(noise_multiplier)
    return Noise("laplace", noise_multiplier, event, scale, laplace_pair)


def _require_multiplier(value: float) -> None:
    if not 0 <= value <= _MOST_NOISE:
        raise ValueError(
            f"expected a noise multiplier >= 0 and at most {_MOST_NOISE:g}, got {value}; 0.5 to 10 "
            "is usual"
        )
