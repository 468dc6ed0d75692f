"""What a run does, as events: those that `dp_accounting` lacks, and how events are put together.

A noise multiplier is noise ÷ the bound on one record, whatever the relation. What an accountant has
to be told under a relation is decided in `accounting`, and nowhere else.
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

_MOST_STEPS = 10**12  # of a run: more than can be taken, and few enough to be counted exactly


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
    """A step that is ε-DP with δ = 0 under the run's own relation, and of which no more is known.

    `dp_accounting` knows randomised response only, and not under add/remove.
    """

    epsilon: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ApproximateDpEvent(DpEvent):  # type: ignore[misc]
    """A release that is (ε, δ)-DP under the run's own relation, and of which no more is known.

    No accountant composes it: it is charged as it is, by a budget that adds up ε and δ.
    """

    epsilon: float
    delta: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ShuffledDpEvent(DpEvent):  # type: ignore[misc]
    """Shuffled passes over the data in batches of a fixed size, `event` on every batch.

    A record is in one batch of a pass, so each pass costs one `event` and the shuffling is given
    no credit. Removing a record cuts the batches anew, so add/remove is never accounted for.
    """

    epochs: int
    event: DpEvent


def _kept(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(values)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class MixedDpEvent(DpEvent):  # type: ignore[misc]
    """Exactly one of `events`, drawn with these probabilities: δ(ε) = Σ p_t δ_t(ε).

    It holds only if the probabilities are public and the draw does not depend on the data; only
    the drawn event happens, so that a run is *stopped* where it was drawn to be; and nothing
    leaves but which one was drawn and what it gave out: no metric, checkpoint or log of a step
    that it does not hold. Otherwise every event that happened counts, and all of them compose.
    Its cost is fixed before the draw: what was drawn gives nothing back.
    """

    events: tuple[DpEvent, ...] = attr.ib(converter=_kept)
    probabilities: tuple[float, ...] = attr.ib(converter=_kept)

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
    """`event` at each of `steps` steps (T)."""
    if not (0 <= steps <= _MOST_STEPS and steps == int(steps)):
        raise ValueError(
            f"expected a whole number of steps, 0 or more, got {steps}; pass a count of at most "
            f"{_MOST_STEPS:.0g}"
        )
    return SelfComposedDpEvent(event, steps) if steps else NoOpDpEvent()


def steps_of(epochs: float, *, records: int, batch: int) -> int:
    """The steps that so many expected passes over the data take, rounded up.

    >>> steps_of(40, records=60_000, batch=512)
    4688
    """
    if not (math.isfinite(epochs) and epochs > 0):
        raise ValueError(f"expected epochs above 0, got {epochs}; pass 1 for one pass")
    if epochs > _MOST_STEPS * batch / records:
        raise ValueError(
            f"expected epochs of at most {_MOST_STEPS:.0g} steps together, got {epochs:g} of "
            f"{records / batch:.6g} steps each; pass fewer epochs or a larger batch"
        )
    return math.ceil(epochs * records / batch - 1e-9)


def joint_multiplier(multipliers: Iterable[float]) -> float:
    """The multiplier of several Gaussian queries on one batch taken together, (Σ z⁻²)^(-½).

    >>> round(joint_multiplier([2.0, 2.0]), 6)
    1.414214
    """
    found = list(multipliers)
    if not (found and all(math.isfinite(z) and z > 0 for z in found)):
        raise ValueError(
            f"expected one noise multiplier or more, each above 0 and finite, got {found}; pass "
            "each query's own"
        )
    return math.sqrt(1 / math.fsum(1 / z**2 for z in found))


def on_one_batch(event: DpEvent) -> DpEvent:
    """`event` as one: several Gaussian queries on the same batch are one Gaussian event.

    They share the batch, so each by itself would be credited with a sampling of its own.
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
    """The parts of a composition, each with the number of times that it happens."""
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


def merged(event: DpEvent) -> list[tuple[DpEvent, int]]:
    """The leaves of `event`, equal ones counted together."""
    counts: dict[str, int] = {}
    parts: dict[str, DpEvent] = {}
    for part, count in leaves(event):
        key = repr(part)  # an event may hold lists, and then it has no hash
        parts[key] = part
        counts[key] = counts.get(key, 0) + count
    return [(parts[key], counts[key]) for key in parts]
