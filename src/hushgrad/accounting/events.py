"""Constructors for the most common events."""

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
    """Return the event of Gaussian noise on a sum over all records.

    Args:
        noise_multiplier: σ, the noise's standard deviation ÷ the bound on one record.

    Raises:
        ValueError: if σ is not positive and finite.

    Example:
        >>> from hushgrad.accounting import PLD
        >>> f"{PLD.epsilon(gaussian(1.0), delta=1e-5):.2f}"
        '4.38'
    """
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise ValueError(
            f"expected noise_multiplier > 0 and finite, got {noise_multiplier}; "
            "it is noise divided by the clipping norm"
        )
    return GaussianDpEvent(noise_multiplier)


def poisson(rate: float, event: DpEvent) -> DpEvent:
    """Return the event of running `event` on a Poisson-sampled batch.

    Args:
        rate: q, the probability with which each record is drawn.
        event: what happens on the batch.

    Raises:
        ValueError: if q is not between 2⁻³² and 1.

    Example:
        >>> from hushgrad.accounting import PLD
        >>> f"{PLD.epsilon(poisson(0.01, gaussian(1.0)), delta=1e-5):.2f}"
        '0.20'
    """
    return Poisson(rate).amplify(event, num_records=1)


def uniformly_stopped(
    rounds: Callable[[int], DpEvent], steps: int, *, levels: int = 64
) -> MixedDpEvent:
    """Return the event of a run that stops after a random number of rounds, uniform on 1 to T.

    Guarantees: those of `MixedDpEvent`, under its conditions: the draw is public, the run takes no
    round after it, and nothing is published except the number drawn and that round's output.
    Accounting for the expected number of rounds instead would under-state ε, because δ grows
    faster than the number of rounds.

    Args:
        rounds: maps t to the event of the first t rounds.
        steps: T.
        levels: how many different numbers of rounds to distinguish; others are rounded up, which
            over-states ε slightly.

    Raises:
        ValueError: if `steps` or `levels` is not a whole number of 1 or more.
        Refused: if `rounds(t)` does not contain `rounds(t - 1)`.

    Example:
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
    """Require that a longer run contains the shorter one, without which rounding up is unsound."""
    have = {repr(part): count for part, count in count_leaves(longer)}
    needed = ((p, count) for p, count in count_leaves(shorter) if not isinstance(p, NoOpDpEvent))
    if any(have.get(repr(part), 0) < count for part, count in needed):
        raise Refused(
            "expected rounds(t) to hold every event of rounds(t - 1), got one that leaves some "
            "out; return the events of the first t rounds"
        )
