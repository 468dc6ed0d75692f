"""What an algorithm is: what its steps may release, what they ask, and what they make of it.

`stage` says which records a step sees and what it may release of them, so that the event of a run
follows from it. `step` asks the batch and returns an estimate of the gradient, which is given to
the user's optimizer. An algorithm has what differs from DP-SGD; `AlgorithmParts` fills in the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from dp_accounting import ComposedDpEvent, DpEvent
from dp_accounting.dp_event import NoOpDpEvent
from torch import Tensor

from hushgrad.algorithms.output import Output, last
from hushgrad.clipping.rules import Adaptive, Clip
from hushgrad.events import repeated
from hushgrad.noise import Independent, Noise, NoiseKind
from hushgrad.rng import Rng
from hushgrad.run.permit import Allowance, StepMechanism, ZcdpLimit
from hushgrad.run.query import ClippedSum
from hushgrad.run.step import StepContext
from hushgrad.sampling import Sampling, Scheme
from hushgrad.sampling.draws import Positions
from hushgrad.types import Params, Refused, Relation

INDEPENDENT = Independent()
"""Fresh Gaussian noise at each step: what a plan has unless it says otherwise."""

State = dict[str, Any]
"""What an algorithm remembers from step to step; a checkpoint holds it, so it is released."""


@dataclass(frozen=True)
class Conditions:
    """What a plan says of its steps: sampling, number of records, relation, clipping, noise."""

    sampling: Sampling
    records: int
    relation: Relation
    clip: Clip | Adaptive
    noise: NoiseKind = INDEPENDENT


@dataclass(frozen=True)
class StepPlan:
    """What one step may release: `answers` to one kind of `query` on a batch of this sampling.

    `noise` is the noise multiplier of each answer relative to the plan's, by the plan's kind of
    noise unless the step has a `mechanism` of its own. `extra` is what it may release besides, paid
    for out of the algorithm's limit; without a limit there is none.
    """

    sampling: Sampling
    noise: float = 1.0
    answers: int = 1
    query: type = ClippedSum
    mechanism: StepMechanism | None = None
    extra: tuple[Allowance, ...] = ()

    def noise_at(self, noise_multiplier: float, kind: NoiseKind = INDEPENDENT) -> Noise:
        """The noise of one answer where the plan has this multiplier, and this kind of noise."""
        at = kind.at if self.mechanism is None else self.mechanism.at
        return at(noise_multiplier * self.noise)

    def event(self, noise_multiplier: float, kind: NoiseKind = INDEPENDENT) -> DpEvent:
        """All answers of the step, before the sampling."""
        each = self.noise_at(noise_multiplier, kind).event
        return each if self.answers == 1 else repeated(self.answers, each)

    def allowances(
        self, noise_multiplier: float, kind: NoiseKind = INDEPENDENT
    ) -> tuple[Allowance, ...]:
        """What a step of a plan with this multiplier may release."""
        noise = self.noise_at(noise_multiplier, kind)
        add = None if self.mechanism is None else self.mechanism.add
        return (Allowance(self.query, noise, self.answers, add), *self.extra)


@runtime_checkable
class Algorithm(Protocol):
    """What a run does with its batches: `step` at least, and what differs from DP-SGD.

    Contract: nothing of a record gets into the estimate or the state but by `context.release`. What
    an algorithm leaves out is as in DP-SGD; see `AlgorithmParts` for all that it may have. They
    depend on public numbers and on released values alone. `testing.check_algorithm` tries one.
    """

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        """The estimate of the gradient that the optimizer is given, and what to remember.

        A state with a true "over" ends the run.
        """


@dataclass(frozen=True)
class AlgorithmParts:
    """An algorithm with all its parts: its own, and those of DP-SGD for what it leaves out.

    `stage(step, conditions)` is what a step may release. `limit(noise_multiplier, conditions)` is
    what a whole run of an adaptive algorithm may spend, whose releases are chosen as it goes; None
    where each step's releases are fixed. `check(conditions)` refuses conditions. `update(params,
    optimizer)` moves the parameters by their `.grad`. `carries_metrics` says that each step
    releases one sum, beside which metrics can ride; `owns_penalty` that the algorithm itself reads
    the context's regulariser, whose gradient is otherwise added to its estimate; `one_bound` that
    all steps have the same bound on a record, as noise that is correlated over steps needs.
    """

    step: Callable[[StepContext, State], tuple[dict[str, Tensor], State]]
    stage: Callable[[int, Conditions], StepPlan]
    limit: Callable[[float, Conditions], ZcdpLimit | None]
    check: Callable[[Conditions], None]
    update: Callable[[Params, torch.optim.Optimizer], None]
    output: Output
    carries_metrics: bool
    owns_penalty: bool
    one_bound: bool

    @classmethod
    def of(cls, algorithm: Algorithm) -> AlgorithmParts:
        """The parts of an algorithm; DP-SGD's where it has none of its own."""
        own = {name: getattr(algorithm, name, default) for name, default in _USUAL.items()}
        return cls(step=algorithm.step, **own)

    def require(self, conditions: Conditions) -> None:
        """Refuse conditions that the algorithm, or its output rule, cannot take."""
        self.check(conditions)
        check_output(self.output, conditions)
        stage, noise = self.stage(0, conditions), conditions.noise
        adaptive = isinstance(conditions.clip, Adaptive)
        noise.check(
            conditions.sampling,
            relation=conditions.relation,
            adaptive=adaptive,
            releases=stage.answers,
        )
        if not self.is_independent(noise):
            self._check_correlated(stage, noise)

    @staticmethod
    def is_independent(noise: NoiseKind) -> bool:
        """Whether each release is accounted for by itself."""
        return isinstance(noise, Independent)

    def _check_correlated(self, stage: StepPlan, noise: NoiseKind) -> None:
        alike = self.stage is _USUAL["stage"] and self.limit is _USUAL["limit"] and self.one_bound
        if not alike or stage.query is not ClippedSum or self.output.direct:
            raise Refused(
                f"expected steps that are all alike with {noise.name} noise, and an output that "
                "does not read a single release, got others; use DP-SGD with the output last, "
                "average() or uniform(), or independent noise"
            )


_USUAL: dict[str, Any] = {
    "stage": lambda step, conditions: StepPlan(conditions.sampling),
    "limit": lambda noise_multiplier, conditions: None,
    "check": lambda conditions: None,
    "update": lambda params, optimizer: optimizer.step(),
    "output": last,
    "carries_metrics": True,
    "owns_penalty": False,
    "one_bound": True,
}
"""DP-SGD's parts: every step alike, nothing to refuse, the optimizer's step, the last iterate."""


class Schedule:
    """What each step of a run may release, and so the event of the run: composed by the library.

    An algorithm states no event. The event follows from what its steps are allowed to release, to
    which `StepContext.release` holds them.
    """

    def __init__(self, parts: AlgorithmParts, conditions: Conditions, steps: int) -> None:
        self._parts, self._conditions, self._steps = parts, conditions, steps
        self._kinds: list[StepPlan] = []
        alike = parts.stage is _USUAL["stage"]
        found = [self._kind(step) for step in range(1 if alike else steps)]
        self._which = np.asarray(found, dtype=np.int64)

    def _kind(self, step: int) -> int:
        """The place of a step's plan among those seen so far, of which there are few."""
        plan = self._parts.stage(step, self._conditions)
        if plan not in self._kinds:
            self._kinds.append(plan)
        return self._kinds.index(plan)

    def counts(self, steps: int) -> list[tuple[StepPlan, int]]:
        """Each plan of a step once, in the order of their first steps, with how often it comes."""
        if len(self._kinds) == 1:
            return [(self._kinds[0], steps)] if steps else []
        counts = np.bincount(self._which[:steps], minlength=len(self._kinds)).tolist()
        return [(plan, n) for plan, n in zip(self._kinds, counts, strict=True) if n]

    def event(self, noise_multiplier: float) -> DpEvent:
        """The whole run as one event, with the choice of its output."""
        return self.event_after(self._steps, noise_multiplier)

    def event_after(self, steps: int, noise_multiplier: float) -> DpEvent:
        """A run of so many steps as one event, with the choice of its output."""

        def rounds(count: int) -> DpEvent:
            return self._composed(count, noise_multiplier)

        return self._parts.output.event(rounds, steps)

    def _composed(self, steps: int, noise_multiplier: float) -> DpEvent:
        limit = self._parts.limit(noise_multiplier, self._conditions)
        if limit is not None:
            return limit.event if steps else NoOpDpEvent()
        return composed(self.counts(steps), noise_multiplier, self._conditions)


def composed(
    counts: Sequence[tuple[StepPlan, int]], noise_multiplier: float, conditions: Conditions
) -> DpEvent:
    """The event of steps that release what they may: each kind of step's, so often.

    A batch that gradients at two iterates are taken from is one batch, and its sum one event.
    """
    for stage, _ in counts:
        if stage.extra:
            raise Refused(
                "expected a limit with an algorithm that releases more than one kind of answer, "
                'got none; state it by a method "limit", as Agd does'
            )
    if len(counts) == 1:
        (stage, count), records = counts[0], conditions.records
        if not AlgorithmParts.is_independent(conditions.noise):
            return conditions.noise.run_event(
                noise_multiplier, sampling=stage.sampling, num_records=records, num_steps=count
            )
        event = stage.event(noise_multiplier, conditions.noise)
        return stage.sampling.run_event(event, num_records=records, num_steps=count)
    each = []
    for stage, count in counts:
        event = stage.event(noise_multiplier, conditions.noise)
        one = stage.sampling.amplify(event, num_records=conditions.records)
        each.append(repeated(count, one))
    return ComposedDpEvent(each) if each else NoOpDpEvent()


def count_stages(stages: Iterable[StepPlan]) -> list[tuple[StepPlan, int]]:
    """Each plan of a step once, in the order of their first steps, with how often it comes."""
    found: list[tuple[StepPlan, int]] = []
    for stage in stages:
        for k, (known, count) in enumerate(found):
            if known == stage:
                found[k] = (known, count + 1)
                break
        else:
            found.append((stage, 1))
    return found


def resized(conditions: Conditions, batch: int | None) -> Sampling:
    """Their sampling with batches of another expected size; None leaves it as it is."""
    sampling, records = conditions.sampling, conditions.records
    if batch is None or batch == sampling.expected_batch(records):
        return sampling
    if not 1 <= batch <= records:
        raise ValueError(
            f"expected a batch between 1 and {records} records, got {batch}; pass a smaller one"
        )
    return sampling.resized(batch, num_records=records)


def check_output(output: Output, conditions: Conditions) -> None:
    """Refuse conditions that the output rule's accounting does not cover."""
    if not output.exhaustive:
        return
    if not conditions.sampling.sees_all:
        raise Refused(
            f"expected full batches with the output {output}, whose choice would share the chance "
            f"of sampled ones, got {conditions.sampling.statement}; sample with FullBatch(), or "
            "use "
            "smallest(), which costs nothing"
        )
    if isinstance(conditions.clip, Adaptive):
        raise Refused(
            f"expected one clipping norm for all steps with the output {output}, got "
            f"{conditions.clip!r}; clip by a fixed rule"
        )


def require_full(conditions: Conditions, name: str) -> None:
    """Refuse sampled batches."""
    if not conditions.sampling.sees_all:
        raise Refused(
            f"expected full batches with {name}, got {conditions.sampling.statement}; pass "
            "sampling=FullBatch()"
        )


def refuse_direct(output: Output) -> None:
    """Refuse an output rule that reads one step's sum, where estimates hold several."""
    if output.direct:
        raise Refused(
            f"expected an output rule for recursive estimates, got {output}, which needs the mean "
            "of one step's sum; use last, average() or uniform()"
        )


@dataclass(frozen=True)
class Scheduled:
    """The batches of an algorithm whose steps do not all sample alike, drawn step by step."""

    stage: Callable[[int], StepPlan]
    plan: Scheme

    @property
    def relations(self) -> frozenset[Relation]:
        """Those of the plan's sampling."""
        return self.plan.relations

    def span(self, num_records: int, *, length: int) -> int:
        """As the plan's sampling has it."""
        return self.plan.span(num_records, length=length)

    def draw(self, num_records: int, *, step: int, rng: Rng) -> Positions:
        """The positions in the batch of one step."""
        sampling = self.stage(step).sampling
        assert isinstance(sampling, Scheme)
        return sampling.draw(num_records, step=step, rng=rng)
