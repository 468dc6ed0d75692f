"""What a step may release: stated by its plan beforehand, and compared before any noise is added.

The comparison is with the noise that is really applied, never with a number that somebody states.
It catches mistakes, such as half of the noise that was forgotten or a second release. It does not
catch malice: code that copies a private tensor aside has released it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, NonPrivateDpEvent
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
    """How a step's answers are made private: its noise at a multiplier.

    `add` makes the release where that is not done by adding the noise.
    """

    at: Callable[[float], Noise]
    add: AddNoise | None = None


@dataclass(frozen=True)
class Allowance:
    """So many answers to one kind of query, each with at least this much noise.

    A query that each record answers for itself may be asked in any number of micro-batches, and of
    each record once for each answer that is allowed.
    """

    query: type
    noise: Noise
    answers: int = 1
    add: AddNoise | None = None


@dataclass(frozen=True)
class ZcdpLimit:
    """What an adaptive algorithm may spend in a whole run, as zero-concentrated DP (ρ).

    Costs that are chosen after seeing earlier releases may be added up, as long as the sum stays
    below ρ: this is the filter that allows an algorithm to decide as it goes.

    Reference: Whitehouse et al. 2023, Fully-Adaptive Composition in Differential Privacy.

    >>> limit = ZcdpLimit(0.5, Relation.ADD_REMOVE)
    >>> limit.cost(GaussianDpEvent(2.0)), limit.cost(PureDpEvent(0.5))
    (0.125, 0.125)
    """

    rho: float
    relation: Relation

    @property
    def event(self) -> DpEvent:
        """All of it, as the run is charged."""
        return ZCDpEvent(self.rho) if self.rho < math.inf else NonPrivateDpEvent()

    def cost(self, event: DpEvent) -> float:
        """ρ of a release: (Δ/σ)²/2 of Gaussian noise, ε²/2 of a pure step."""
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

    `batch` is the one that was drawn for it. With a `limit` every release is paid for out of it,
    and `spent` is what the run has spent so far. `past` has the tags of the releases before this
    step, and `buffer` their noise, where this step's noise depends on them.
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
        """What tells a replay of the step's releases from others."""
        each = [released.digest for released in self.releases]
        return each[0] if len(each) == 1 else hashlib.blake2b(b"".join(each)).digest()[:16]

    def affords(self, *events: DpEvent) -> bool:
        """Whether releases that cost this much together still fit into the limit."""
        if self.limit is None:
            raise Refused(
                "expected an algorithm with a limit, whose releases are chosen as it goes, got "
                "one without; state it by the algorithm's method `limit`"
            )
        return self.spent + self.limit.cost(ComposedDpEvent(list(events))) <= self.limit.rho

    def allowance(self, query: object) -> Allowance:
        """What the plan foresees for such a query; raises `Refused` where it foresees none."""
        if not is_answerable(query):
            raise Refused(
                f"expected a query such as ClippedSum, which works out its own bound, got "
                f"{type(query).__name__}; ask for a sum by its terms, and not for one that was "
                "made elsewhere"
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
        """The sum that the same query has had just before, so that it need not be taken again."""
        return self._last[1] if self._last is not None and self._last[0] is query else None

    @property
    def last_sum(self) -> Bounded | None:
        """The last sum without its noise. Private: it must not leave the process."""
        return None if self._last is None else self._last[1]

    def require(
        self, query: Query, bounded: Bounded, noise: Noise, allowed: Allowance, batch: Batch | None
    ) -> None:
        """Refuse a release that the plan does not foresee, before its noise is added."""
        if batch is not self.batch:
            raise Refused(
                "expected a query to the batch that was drawn for the step, got another batch; "
                "ask context.release, which holds the drawn one"
            )
        _require_noise(noise, allowed, bounded, multiples=self.limit is not None)
        if self.limit is not None:
            return self._pay(query, noise)
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
        cost = self.limit.cost(query.event(noise.noise_multiplier))
        if self.spent + cost > self.limit.rho:
            raise Refused(
                f"expected a release of at most ρ = {self.limit.rho - self.spent:.4g}, which is "
                f"what the limit has left, got one of {cost:.4g}; ask context.affords first, and "
                "end the run where it says no"
            )
        self.spent += cost

    def note(self, query: Query, bounded: Bounded, released: Released) -> None:
        """Keep what was released."""
        self._last = (query, bounded)
        self.releases.append(released)

    def require_release(self) -> None:
        """Refuse a step whose estimate was made without a release."""
        if not self.releases:
            raise Refused(
                "expected the step's estimate from a release, got none by context.release; return "
                'what it has released, or a state with "over" to end the run'
            )


def _require_noise(noise: Noise, allowed: Allowance, bounded: Bounded, *, multiples: bool) -> None:
    """Refuse noise of another kind, or less of it than the plan accounts for."""
    kind = allowed.noise
    if noise.name != kind.name or noise.pair is not kind.pair:
        raise Refused(
            f"expected {kind.name} noise, as the plan accounts for, got {noise.name}; leave the "
            "noise to the plan"
        )
    # With a limit the algorithm chooses a multiple of noise 1, and pays for what it says.
    times = noise.noise_multiplier if multiples else 1.0
    least, scale = times * kind.scale(bounded), noise.scale(bounded)
    if not scale >= least:  # nan is not
        raise Refused(
            f"expected noise of at least {least:.6g}, which the plan accounts for, got "
            f"{scale:.6g}; leave the noise to the plan"
        )
