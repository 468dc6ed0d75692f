"""The events that accounting is asked about most often, each made in one call."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from dp_accounting import DpEvent, GaussianDpEvent
from dp_accounting.dp_event import NoOpDpEvent

from hushgrad.events import MixedDpEvent, count_leaves
from hushgrad.sampling import Poisson
from hushgrad.types import Refused


def gaussian(noise_multiplier: float) -> DpEvent:
    """Gaussian noise on a sum over all records, σ = noise ÷ the bound on one record."""
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise ValueError(
            f"expected noise_multiplier > 0 and finite, got {noise_multiplier}; "
            "it is noise divided by the clipping norm"
        )
    return GaussianDpEvent(noise_multiplier)


def poisson(rate: float, event: DpEvent) -> DpEvent:
    """`event` on a Poisson batch at this rate (q), whatever the number of records."""
    return Poisson(rate).amplify(event, num_records=1)


def uniformly_stopped(
    rounds: Callable[[int], DpEvent], steps: int, *, levels: int = 64
) -> MixedDpEvent:
    """A run that is stopped after a number of rounds drawn uniformly from 1 up to `steps` (T).

    `rounds(t)` is the event of its first t rounds. More than `levels` numbers are rounded up to
    that many, which over-states a little. Accounting for the expected number of rounds would
    under-state: δ grows faster than t.

    Guarantees: those of `MixedDpEvent`, under its conditions. The draw is public, the run takes no
    round after it, and nothing leaves but the number drawn and what is released at that round.

    >>> from hushgrad.events import repeated
    >>> run = uniformly_stopped(lambda t: repeated(t, gaussian(8.0)), 100)
    >>> [event.count for event in run.events][:3], len(run.events)
    ([2, 4, 5], 64)
    """
    if steps != int(steps) or steps < 1 or levels < 1:
        raise ValueError(
            f"expected steps and levels of 1 or more, got {steps} and {levels}; pass whole numbers"
        )
    count = min(levels, steps)
    ends = [-(-steps * (k + 1) // count) for k in range(count)]
    events = tuple(rounds(end) for end in ends)
    for shorter, longer in pairwise(events):
        _require_prefix(shorter, longer)
    chances = tuple((end - start) / steps for start, end in pairwise([0, *ends]))
    return MixedDpEvent(events, chances)


def _require_prefix(shorter: DpEvent, longer: DpEvent) -> None:
    """Rounding up needs that a run of more rounds holds one of fewer."""
    have = {repr(part): count for part, count in count_leaves(longer)}
    needed = ((p, count) for p, count in count_leaves(shorter) if not isinstance(p, NoOpDpEvent))
    if any(have.get(repr(part), 0) < count for part, count in needed):
        raise Refused(
            "expected rounds(t) to hold every event of rounds(t - 1), got one that leaves some "
            "out; return the events of the first t rounds"
        )
