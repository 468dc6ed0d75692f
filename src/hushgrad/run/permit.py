"""What a step may release: stated by its plan, and compared before any noise is added.

The comparison is with the noise that is really applied, never with a number that somebody states.
It catches mistakes, such as half of the noise or a second release. It does not catch malice: code
that copies a private tensor elsewhere has released it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
)
from dp_accounting.dp_event import ZCDpEvent

from hushgrad.batches.records import count
from hushgrad.events import PureDpEvent, leaves
from hushgrad.noise import Noise, NoiseBuffer
from hushgrad.rng import Rng
from hushgrad.run.query import Query, is_answerable
from hushgrad.types import Batch, Bounded, Refused, Relation, Released


@runtime_checkable
class AddNoise(Protocol):
    """Makes a release of a sum, with noise that follows from the key, the step and the sum."""

    def __call__(self, bounded: Bounded, noise: Noise, *, rng: Rng, step: int) -> Released: ...


@dataclass(frozen=True)
class StepMechanism:
    """How a step's answers are made private, where it is not by the plan's kind of noise.

    Args:
        at: maps a noise multiplier to the noise.
        add: makes the release, where that is not done by adding the noise.
    """

    at: Callable[[float], Noise]
    add: AddNoise | None = None


@dataclass(frozen=True)
class Allowance:
    """A number of answers to one kind of query, each with at least this much noise.

    A query that each record answers by itself may be asked in any number of micro-batches:
    `answers` is then the number of answers of each record.

    Args:
        query: the class of the queries.
        noise: the least noise of each answer.
        answers: how many answers.
        add: makes the release, where that is not done by adding the noise.

    Example:
        >>> from hushgrad.noise import gaussian
        >>> from hushgrad.run.query import ClippedSum
        >>> Allowance(ClippedSum, gaussian(1.0)).answers
        1
    """

    query: type
    noise: Noise
    answers: int = 1
    add: AddNoise | None = None


@dataclass(frozen=True)
class ZcdpLimit:
    """What an adaptive algorithm may spend in a whole run, as zero-concentrated DP (ρ).

    Guarantees: releases whose costs add up to at most ρ are ρ-zCDP together, also where each cost
    is chosen after seeing earlier releases. This is the filter that lets an algorithm decide as it
    goes.

    Args:
        rho: ρ of the whole run.
        relation: what makes two data sets neighbours.

    Example:
        >>> limit = ZcdpLimit(0.5, Relation.ADD_REMOVE)
        >>> limit.cost(GaussianDpEvent(2.0)), limit.cost(PureDpEvent(0.5))
        (0.125, 0.125)

    Reference: Whitehouse et al. 2023, Fully-Adaptive Composition in Differential Privacy.
    """

    rho: float
    relation: Relation

    @property
    def event(self) -> DpEvent:
        """The whole limit as one event, which the run is charged."""
        return ZCDpEvent(self.rho) if self.rho < math.inf else NonPrivateDpEvent()

    def cost(self, event: DpEvent) -> float:
        """Return ρ of a release: (Δ/σ)²/2 for Gaussian noise, ε²/2 for a pure step.

        Raises:
            Refused: if the event is of another kind.
        """
        # Replacing a record removes one and adds another: twice the distance.
        replaced = 2.0 if self.relation is Relation.REPLACE_ONE else 1.0
        total = []
        for part, times in leaves(event):
            match part:
                case GaussianDpEvent():
                    total.append(times * (replaced / part.noise_multiplier) ** 2 / 2)
                case PureDpEvent():
                    total.append(times * part.epsilon**2 / 2)
                case _:
                    raise Refused(
                        "expected Gaussian noise or a pure step where costs are added up, got "
                        f"{type(part).__name__}; release with gaussian noise"
                    )
        return math.fsum(total)


@dataclass
class Permit:
    """What one step may still release, and what it has released.

    Guarantees: a release that passes `require` is on the drawn batch, is allowed by the plan, and
    has at least the noise that the plan accounts for.

    Args:
        step: the number of the step, from 0.
        allowances: what the step may release.
        batch: the batch that was drawn for it.
        limit: what every release is paid out of, if the algorithm chooses its releases as it goes.
        spent: what the run has spent of the limit so far.
        past: the tags of earlier releases, on which correlated noise depends.
        buffer: the noise of earlier releases, kept so that it need not be drawn again.
        releases: what the step has released so far.

    Example:
        >>> from hushgrad.run.plan import plan
        >>> p = plan(records=1000, batch=100, epochs=1, delta=1e-5, noise_multiplier=1.0)
        >>> p.permit(0, batch=()).allowances[0].noise
        gaussian(1.0)
    """

    step: int
    allowances: tuple[Allowance, ...]
    batch: Batch | None = None
    limit: ZcdpLimit | None = None
    spent: float = 0.0
    past: Sequence[bytes] = ()
    buffer: NoiseBuffer | None = None
    releases: list[Released] = field(default_factory=list)
    _answered: dict[type, int] = field(default_factory=dict)
    _last: tuple[Query, Bounded] | None = None

    @property
    def digest(self) -> bytes:
        """Tells a replay of the step's releases from other releases."""
        each = [released.digest for released in self.releases]
        return each[0] if len(each) == 1 else hashlib.blake2b(b"".join(each)).digest()[:16]

    def affords(self, *events: DpEvent) -> bool:
        """Return whether releases that cost this much together still fit into the limit."""
        if self.limit is None:
            raise Refused(
                "expected an algorithm with a limit, whose releases are chosen as it goes, got "
                "one without; state it by the algorithm's method `limit`"
            )
        return self.spent + self.limit.cost(ComposedDpEvent(list(events))) <= self.limit.rho

    def allowance(self, query: object) -> Allowance:
        """Return what the plan allows for such a query.

        Raises:
            Refused: if it allows none.
        """
        if not is_answerable(query):
            raise Refused(
                f"expected a query such as ClippedSum, which computes its own bound, got "
                f"{type(query).__name__}; ask for a sum by its terms, not for a finished sum"
            )
        for allowance in self.allowances:
            if allowance.query is type(query):
                return allowance
        foreseen = ", ".join(a.query.__name__ for a in self.allowances) or "no release"
        raise Refused(
            f"expected {foreseen} at step {self.step}, as the plan accounts for it, got "
            f"{type(query).__name__}; state it in the algorithm's `stage`"
        )

    def sum_of(self, query: Query) -> Bounded | None:
        """Return the sum if this query was the last one asked, so that it need not be computed
        again.
        """
        # By identity: a query that is equal could be asked of other private state.
        return self._last[1] if self._last is not None and self._last[0] is query else None

    @property
    def last_sum(self) -> Bounded | None:
        """The last sum without its noise. Private: it must not leave the process."""
        return None if self._last is None else self._last[1]

    def require(
        self, query: Query, bounded: Bounded, noise: Noise, allowed: Allowance, batch: Batch | None
    ) -> None:
        """Refuse a release that the plan does not allow, before its noise is added."""
        # By identity: equal values could be another batch's.
        if batch is not self.batch:
            raise Refused(
                "expected a query to the batch that was drawn for the step, got another batch; "
                "ask context.release, which holds the drawn one"
            )
        _require_noise(noise, allowed, bounded, multiples=self.limit is not None)
        if self.limit is not None:
            return self._pay(query, noise)
        # Each row of reports is one record's answer.
        rows = len(next(iter(bounded.sum.values()))) if query.of_each_record else 1
        most = allowed.answers * (count(batch) if query.of_each_record else 1)
        answered = self._answered.get(type(query), 0) + rows
        if answered > most:
            each = " of each record" if query.of_each_record else ""
            raise Refused(
                f"expected at most {allowed.answers} release{'s' * (allowed.answers > 1)}{each} at "
                f"step {self.step}, as the plan accounts for, got another; ask for both as terms "
                "of one query, or state the number in the algorithm's `stage`"
            )
        self._answered[type(query)] = answered
        return None

    def _pay(self, query: Query, noise: Noise) -> None:
        assert self.limit is not None
        # The query's event, not the noise's: a noisy minimum costs less than its scores would.
        cost = self.limit.cost(query.event(noise.noise_multiplier))
        if self.spent + cost > self.limit.rho:
            raise Refused(
                f"expected a release of at most ρ = {self.limit.rho - self.spent:.4g}, which is "
                f"what the limit has left, got one of {cost:.4g}; ask context.affords first, and "
                "end the run if it returns False"
            )
        self.spent += cost

    def note(self, query: Query, bounded: Bounded, released: Released) -> None:
        """Record a release."""
        self._last = (query, bounded)
        self.releases.append(released)

    def require_release(self) -> None:
        """Refuse a step that made its estimate without a release."""
        if not self.releases:
            raise Refused(
                "expected an estimate made from context.release, got a step without a release; "
                'return what it released, or a state with "over" to end the run'
            )


def _require_noise(noise: Noise, allowed: Allowance, bounded: Bounded, *, multiples: bool) -> None:
    """Refuse noise of another kind, or less of it than the plan accounts for."""
    kind = allowed.noise
    if noise.name != kind.name or noise.pair is not kind.pair:
        raise Refused(
            f"expected {kind.name} noise, as the plan accounts for, got {noise.name}; leave the "
            "noise to the plan"
        )
    # With a limit the algorithm chooses a multiple of noise 1, and pays for what it chooses.
    times = noise.noise_multiplier if multiples else 1.0
    # A kind of noise is accounted for by its event, which must not state more than its scale.
    least, scale = times * max(kind.scale(bounded), _stated(kind, bounded)), noise.scale(bounded)
    if not scale >= least:  # nan is not
        raise Refused(
            f"expected noise of at least {least:.6g}, which the plan accounts for, got "
            f"{scale:.6g}; leave the noise to the plan"
        )


def _stated(noise: Noise, bounded: Bounded) -> float:
    """Return the scale that the event of a kind of noise stands for."""
    match noise.event:
        case GaussianDpEvent():
            return float(noise.event.noise_multiplier) * bounded.l2
        case LaplaceDpEvent() if bounded.l1 is not None:
            return float(noise.event.noise_multiplier) * bounded.l1
        case _:  # one of the library's own, whose cost the kind's run_event states
            return 0.0
