"""What a run does, as `dp_accounting` events in one convention.

A noise multiplier is noise ÷ the bound on one record, whatever the relation. What each accountant
has to be told under a relation is decided in `accountants`, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import attr
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent

from hushgrad.types import Refused


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PureDpEvent(DpEvent):  # type: ignore[misc]
    """A step that is ε-DP with δ = 0 under the run's own relation, and of which no more is known.

    `dp_accounting` knows randomised response only, and not under add/remove.
    """

    epsilon: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ShuffledDpEvent(DpEvent):  # type: ignore[misc]
    """Shuffled passes over the data in batches of a fixed size, `event` on every batch.

    A record is in one batch of a pass, so each pass costs one `event` and the shuffling is given
    no credit. Removing a record cuts the batches anew, so add/remove is never accounted for.
    """

    epochs: int
    event: DpEvent


def gaussian(noise_multiplier: float) -> DpEvent:
    """Gaussian noise on a sum over all records, σ = noise ÷ the bound on one record."""
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise ValueError(
            f"expected noise_multiplier > 0 and finite, got {noise_multiplier}; "
            "it is noise divided by the clipping norm"
        )
    return GaussianDpEvent(noise_multiplier)


def poisson(rate: float, event: DpEvent) -> DpEvent:
    """`event` on a batch into which each record is drawn by itself with probability `rate` (q)."""
    _require_rate(rate)
    inner = on_one_batch(event)
    return inner if rate == 1 else PoissonSampledDpEvent(rate, inner)


def truncated_poisson(rate: float, event: DpEvent, *, max_batch: int, records: int) -> DpEvent:
    """As `poisson`, with larger batches cut to `max_batch` of their records at random.

    `records` is the public size of the data set. Only Gaussian noise is covered.
    """
    _require_rate(rate)
    _require_batch(max_batch, records)
    inner = on_one_batch(event)
    if isinstance(inner, NonPrivateDpEvent):
        return inner
    if not isinstance(inner, GaussianDpEvent):
        raise Refused(
            f"expected Gaussian noise on a truncated Poisson batch, got {type(inner).__name__}; "
            "use Gaussian noise, or plain Poisson sampling"
        )
    return TruncatedSubsampledGaussianDpEvent(records, rate, max_batch, inner.noise_multiplier)


def without_replacement(batch: int, event: DpEvent, *, records: int) -> DpEvent:
    """`event` on a batch of exactly `batch` of the `records`, each such set equally likely."""
    _require_batch(batch, records)
    return SampledWithoutReplacementDpEvent(records, batch, on_one_batch(event))


def shuffled(epochs: int, event: DpEvent) -> DpEvent:
    """`event` on every batch of `epochs` shuffled passes: one `event` a pass, unamplified."""
    _require_count(epochs, "epochs")
    return ShuffledDpEvent(epochs, on_one_batch(event))


def repeated(steps: int, event: DpEvent) -> DpEvent:
    """`event` at each of `steps` steps (T)."""
    _require_count(steps, "steps")
    return SelfComposedDpEvent(event, steps)


def joint_multiplier(multipliers: Iterable[float]) -> float:
    """The multiplier of several Gaussian queries on one batch taken together, (Σ z⁻²)^(-½).

    >>> round(joint_multiplier([2.0, 2.0]), 6)
    1.414214
    """
    found = [gaussian(z).noise_multiplier for z in multipliers]
    if not found:
        raise ValueError("expected one noise multiplier or more, got none; pass each query's own")
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
    weight = math.fsum(count / part.noise_multiplier**2 for part, count in parts)
    return GaussianDpEvent(math.sqrt(1 / weight))


def leaves(event: DpEvent, count: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """The parts of a composition, each with the number of times that it happens."""
    if isinstance(event, SelfComposedDpEvent):
        yield from leaves(event.event, count * event.count)
    elif isinstance(event, ComposedDpEvent):
        for part in event.events:
            yield from leaves(part, count)
    else:
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


def _require_rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise ValueError(f"expected 0 < rate <= 1, got {rate}; pass batch / records")


def _require_batch(batch: int, records: int) -> None:
    if not 1 <= batch <= records:
        raise ValueError(
            f"expected 1 <= batch <= records, got batch {batch} of {records} records; "
            "pass a smaller batch"
        )


def _require_count(count: int, name: str) -> None:
    if count != int(count) or count < 1:
        raise ValueError(f"expected {name} to be a whole number above 0, got {count}; pass 1 or up")
