"""Kinds of noise, which a plan holds, and the noise of one release, which a kind makes.

A *kind* has no size yet: `Independent(gaussian)`, `Independent(laplace)` or `correlated(...)`. It
answers

- `memory(step)`: how many past releases the noise of a step depends on, 0 if it is independent;
- `at(noise_multiplier)`: the noise of one release, a `Noise`, which `release` adds;
- `run_event(...)`: a whole run whose steps are all alike, as an event for an accountant;
- `check(...)`: refuses what the event does not cover;
- `fitted(...)`: the same kind with everything chosen that was left to the library.

`gaussian(0.8)` and `laplace(0.8)` are the noise of one release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import dp_accounting
from dp_accounting import DpEvent

from hushgrad.events import Participation, on_one_batch, repeated
from hushgrad.noise.standard import Pair, laplace_pair, normal_pair
from hushgrad.noise.strategy import Strategy
from hushgrad.types import Bounded, Refused, Relation

_MOST_NOISE = 1e30  # times a clipping norm, it must be a float32


@runtime_checkable
class Sampled(Protocol):
    """What noise needs to know of a sampling scheme; `hushgrad.sampling.Sampling` has it all."""

    @property
    def statement(self) -> str:
        """The words by which a guarantee names the sampling."""

    @property
    def participation(self) -> Participation | None:
        """When a record can be in a batch, if each is drawn by itself."""

    def run_event(self, event: DpEvent, *, num_records: int, num_steps: int) -> DpEvent:
        """The event of so many steps, each running `event` on its batch."""


@dataclass(frozen=True)
class Noise:
    """The noise of one release.

    `scale` is its size for a given bound on one record, `pair` makes two of its standard values
    from two random words, and `event` is what adding it to such a sum is to an accountant. With a
    `strategy` the standard values of past steps are mixed in, and a release has no event of its
    own: `event` is that of no privacy, and the kind's `run_event` accounts for the run.
    """

    name: str
    noise_multiplier: float
    event: DpEvent
    scale: Callable[[Bounded], float]
    pair: Pair
    strategy: Strategy | None = None

    def __repr__(self) -> str:
        return f"{self.name}({self.noise_multiplier})"

    def memory(self, step: int) -> int:
        """How many releases before this step's its noise depends on."""
        return 0 if self.strategy is None else self.strategy.memory(step)


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


@runtime_checkable
class NoiseKind(Protocol):
    """A kind of noise, as a plan holds it."""

    @property
    def name(self) -> str:
        """What reports call it."""

    def memory(self, step: int) -> int:
        """How many releases before this step's its noise depends on."""

    def at(self, noise_multiplier: float) -> Noise:
        """The noise of one release."""

    def fitted(self, sampling: Sampled, *, num_steps: int) -> NoiseKind:
        """The same kind with everything chosen that was left open."""

    def run_event(
        self,
        noise_multiplier: float,
        *,
        sampling: Sampled,
        num_records: int,
        num_steps: int,
        runs: int = 1,
    ) -> DpEvent:
        """A whole run of steps that are all alike, as an event for an accountant.

        Args:
            noise_multiplier: σ, noise ÷ the bound on one record.
            sampling: the scheme that draws the batches.
            num_records: the public number of records.
            num_steps: the number of steps (T).
            runs: how many runs on the *same* batches are accounted for together, as after a
                replay whose sums differed.
        """

    def check(
        self, sampling: Sampled, *, relation: Relation, adaptive: bool = False, releases: int = 1
    ) -> None:
        """Refuse what the event of a run would not cover.

        Args:
            sampling: the scheme that draws the batches.
            relation: what makes two data sets neighbours.
            adaptive: whether the clipping norm changes from step to step.
            releases: how many sums are released at a step.
        """


@dataclass(frozen=True)
class Independent:
    """Fresh noise at each step, by `gaussian` or `laplace`: the default of a plan.

    >>> Independent().at(0.8)
    gaussian(0.8)
    """

    make: Callable[[float], Noise] = gaussian

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.make.__name__

    def __repr__(self) -> str:
        return f"Independent({self.name})"

    def memory(self, step: int) -> int:
        """No release depends on another."""
        return 0

    def at(self, noise_multiplier: float) -> Noise:
        """The noise of one release."""
        return self.make(noise_multiplier)

    def fitted(self, sampling: Sampled, *, num_steps: int) -> Independent:
        """Itself: nothing is left open."""
        return self

    def run_event(
        self,
        noise_multiplier: float,
        *,
        sampling: Sampled,
        num_records: int,
        num_steps: int,
        runs: int = 1,
    ) -> DpEvent:
        """The sampling's event of so many steps, each with this noise on its batch."""
        event = on_one_batch(repeated(runs, self.at(noise_multiplier).event))
        return sampling.run_event(event, num_records=num_records, num_steps=num_steps)

    def check(
        self, sampling: Sampled, *, relation: Relation, adaptive: bool = False, releases: int = 1
    ) -> None:
        """Nothing: each release is accounted for by itself."""
