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
    """The noise of one release; `gaussian` and `laplace` make it.

    Args:
        name: how reports name it.
        noise_multiplier: the noise ÷ the bound on one record.
        event: what adding it to a sum is to an accountant.
        scale: maps a bounded sum to the size of the noise.
        pair: makes two standard values from two random words.
        strategy: the matrix by which the standard values of past steps are mixed in. A release then
            has no event of its own: `event` is that of no privacy, and the kind's `run_event`
                accounts
            for the run.

    Example:
        >>> noise = gaussian(0.8)
        >>> noise.scale(Bounded({}, l2=2.0))
        1.6
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
    """Return Gaussian noise of standard deviation σ times the sum's `l2`.

    Guarantees: a release is a Gaussian mechanism with noise multiplier σ, under every relation.
    With σ = 0 nothing is private, and the event says so.

    Args:
        noise_multiplier: σ, noise ÷ the bound on one record.

    Raises:
        ValueError: if σ is negative, NaN or too large for float32.

    Example:
        >>> gaussian(0.8).event
        GaussianDpEvent(noise_multiplier=0.8)

    Reference: Dwork and Roth 2014, The Algorithmic Foundations of Differential Privacy, appendix A.
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
    """Return Laplace noise of scale b = multiplier × the sum's `l1`.

    Guarantees: a release is a Laplace mechanism. A sum that states no `l1` is refused when it is
    released: scaled by a Euclidean bound, the noise would not make it private.

    Args:
        noise_multiplier: b ÷ the bound on one record in the l1 norm.

    Raises:
        ValueError: if it is not positive, or too large for float32.

    Example:
        >>> laplace(2.0).scale(Bounded({}, l2=1.0, l1=3.0))
        6.0

    Reference: Dwork et al. 2006, Calibrating Noise to Sensitivity in Private Data Analysis.
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
    """A kind of noise, as a plan holds it.

    Contract: `run_event` covers every run that `check` allows, whose releases have the noise of
    `at`.

    Example:
        >>> isinstance(Independent(laplace), NoiseKind)
        True
    """

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

    Args:
        make: maps a noise multiplier to the noise of one release.

    Example:
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
