"""Privacy events that `dp_accounting` lacks, and functions that compose events.

A noise multiplier is noise ÷ the bound on one record, under every relation. Only `accounting`
translates it into what an accountant expects under a given relation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import attr
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.dp_event import NoOpDpEvent

from hushgrad.types import Refused

_MOST_STEPS = 10**12  # more than any run can take, and still an exact integer in a float64


@dataclass(frozen=True)
class Participation:
    """When a record can be in a batch: at steps g, g + `cycle`, …, each time with chance `rate`.

    The first step g is fixed for the whole run, for each record by itself and without looking at
    the data, and so is every draw. Noise that is correlated over steps is accounted for by it.
    """

    cycle: int
    rate: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PureDpEvent(DpEvent):  # type: ignore[misc]
    """A release that is ε-DP with δ = 0 under the run's relation, and about which no more is known.

    `dp_accounting` has an event for randomised response only, and not under add/remove.

    Args:
        epsilon: ε of the release.

    Example:
        >>> from hushgrad.accounting import RDP
        >>> round(RDP.epsilon(repeated(100, PureDpEvent(0.01)), delta=1e-5), 2)
        0.37
    """

    epsilon: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ApproximateDpEvent(DpEvent):  # type: ignore[misc]
    """A release that is (ε, δ)-DP under the run's relation, and about which no more is known.

    No accountant composes it. A budget that adds up ε and δ can charge it as it is.
    """

    epsilon: float
    delta: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ShuffledDpEvent(DpEvent):  # type: ignore[misc]
    """Shuffled epochs in batches of a fixed size, with `event` on every batch.

    A record is in one batch of each epoch, so an epoch costs one `event`; no amplification by
    shuffling is claimed. Removing a record changes all later batches, so accountants refuse this
    event under add/remove.

    Args:
        epochs: how many epochs begin.
        event: what happens on each batch.

    Example:
        >>> from hushgrad.accounting import PLD, gaussian
        >>> from hushgrad.types import Relation
        >>> run = ShuffledDpEvent(4, gaussian(2.0))
        >>> round(PLD.epsilon(run, delta=1e-5, relation=Relation.ZERO_OUT), 2)
        4.38
    """

    epochs: int
    event: DpEvent


def _as_tuple(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(values)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class MixedDpEvent(DpEvent):  # type: ignore[misc]
    """A mixture: exactly one of `events` happens, drawn at random; δ(ε) = Σ p_t δ_t(ε).

    It is valid only if

    - the probabilities are public, and the draw does not depend on the data;
    - only the drawn event happens, so that a run really *stops* at the drawn step;
    - nothing is published except which event was drawn and its output: no metric, checkpoint or
      log of a step that is not part of it.

    Otherwise all events that happened compose. The cost is fixed before the draw: drawing a cheap
    event refunds nothing.

    Args:
        events: the alternatives.
        probabilities: one for each event; they add up to 1.

    Raises:
        ValueError: if the numbers of both differ, or the probabilities do not add up to 1.

    Example:
        >>> from hushgrad.accounting import PLD, gaussian
        >>> run = MixedDpEvent((gaussian(4.0), gaussian(2.0)), (0.5, 0.5))
        >>> round(PLD.epsilon(run, delta=1e-5), 2)
        1.91
    """

    events: tuple[DpEvent, ...] = attr.ib(converter=_as_tuple)
    probabilities: tuple[float, ...] = attr.ib(converter=_as_tuple)

    def __attrs_post_init__(self) -> None:
        chances = self.probabilities
        if not chances or len(chances) != len(self.events):
            raise ValueError(
                f"expected one probability for each event, got {len(chances)} for "
                f"{len(self.events)}; pass as many of one as of the other"
            )
        if not (all(p >= 0 for p in chances) and abs(math.fsum(chances) - 1) <= 1e-12):
            raise ValueError(
                f"expected probabilities of 0 or more that add up to 1, got {chances}; divide "
                "each by their sum"
            )


def repeated(steps: int, event: DpEvent) -> DpEvent:
    """Return the event of `steps` steps (T) with `event` at each.

    Args:
        steps: T, from 0 to 10¹².
        event: what happens at each step.

    Raises:
        ValueError: if `steps` is not a whole number in this range.

    Example:
        >>> from hushgrad.accounting import PLD, gaussian
        >>> round(PLD.epsilon(repeated(4, gaussian(2.0)), delta=1e-5), 2)  # as one of σ = 1
        4.38
    """
    if not (0 <= steps <= _MOST_STEPS and steps == int(steps)):
        raise ValueError(
            f"expected a whole number of steps, 0 or more, got {steps}; pass a count of at most "
            f"{_MOST_STEPS:.0g}"
        )
    return SelfComposedDpEvent(event, steps) if steps else NoOpDpEvent()


def steps_of(epochs: float, *, records: int, batch: int) -> int:
    """Return the number of steps in `epochs` expected passes over the data, rounded up.

    >>> steps_of(40, records=60_000, batch=512)
    4688
    """
    if not (math.isfinite(epochs) and epochs > 0):
        raise ValueError(f"expected epochs above 0, got {epochs}; pass 1 for one pass")
    if epochs > _MOST_STEPS * batch / records:
        raise ValueError(
            f"expected at most {_MOST_STEPS:.0g} steps, got {epochs:g} epochs of "
            f"{records / batch:.6g} steps each; pass fewer epochs or a larger batch"
        )
    return math.ceil(epochs * records / batch - 1e-9)


def joint_multiplier(multipliers: Iterable[float]) -> float:
    """Return the multiplier of several Gaussian queries on one batch taken together, (Σ z⁻²)^(-½).

    Args:
        multipliers: each query's noise ÷ the bound on one record.

    Raises:
        ValueError: if there is none, or one is not positive and finite.

    Example:
        >>> round(joint_multiplier([2.0, 2.0]), 6)
        1.414214

    Reference: Dong, Roth and Su 2022, Gaussian Differential Privacy, Corollary 3.3.
    """
    found = list(multipliers)
    if not (found and all(math.isfinite(z) and z > 0 for z in found)):
        raise ValueError(
            f"expected noise multipliers above 0 and finite, at least one, got {found}; pass one "
            "for each query"
        )
    return math.sqrt(1 / math.fsum(1 / z**2 for z in found))


def on_one_batch(event: DpEvent) -> DpEvent:
    """Merge several Gaussian queries on the same batch into one Gaussian event.

    The queries share one random batch. Accounted one by one, each would be amplified by a
    sampling of its own, which claims too much privacy.

    Args:
        event: one event, or a composition of Gaussian events.

    Raises:
        Refused: for a composition with anything but Gaussian noise.

    Example:
        >>> from hushgrad.accounting import gaussian
        >>> round(on_one_batch(repeated(4, gaussian(2.0))).noise_multiplier, 6)
        1.0
    """
    parts = list(leaves(event))
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    if any(isinstance(part, NonPrivateDpEvent) for part, _ in parts):
        return NonPrivateDpEvent()
    if not all(isinstance(part, GaussianDpEvent) for part, _ in parts):
        kinds = ", ".join(sorted({type(part).__name__ for part, _ in parts}))
        raise Refused(
            f"expected Gaussian queries where several use one batch, got {kinds}; "
            "use Gaussian noise for each, or draw a batch for each"
        )
    shares = (part.noise_multiplier / math.sqrt(count) for part, count in parts)
    return GaussianDpEvent(joint_multiplier(shares))


def leaves(event: DpEvent, count: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """Yield the parts of a composition, each with the number of times that it happens."""
    match event:
        case SelfComposedDpEvent():
            yield from leaves(event.event, count * event.count)
        case ComposedDpEvent():
            for part in event.events:
                yield from leaves(part, count)
        case ShuffledDpEvent():
            yield ShuffledDpEvent(1, event.event), count * event.epochs
        case _:
            yield event, count


def count_leaves(event: DpEvent) -> list[tuple[DpEvent, int]]:
    """Return the leaves of `event` and how often each happens, with equal leaves merged."""
    counts: dict[str, int] = {}
    parts: dict[str, DpEvent] = {}
    for part, count in leaves(event):
        key = repr(part)  # an event that holds lists is not hashable
        parts[key] = part
        counts[key] = counts.get(key, 0) + count
    return [(parts[key], counts[key]) for key in parts]
