"""What an algorithm is: what its steps may release, what they ask, and what they make of the
answers.

`stage` says which records a step sees and what it may release of them, so that the event of a run
follows from it. `step` asks the batch and returns an estimate of the gradient, which is passed to
the user's optimizer. An algorithm defines what differs from DP-SGD; `AlgorithmParts` adds the rest.
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
"""Fresh Gaussian noise at each step: the default of a plan."""

State = dict[str, Any]
"""What an algorithm keeps from step to step. A checkpoint contains it, so it must be released."""


@dataclass(frozen=True)
class Conditions:
    """What a plan says of its steps, as an algorithm is told.

    Args:
        sampling: which records each step sees.
        records: n, the public number of records.
        relation: what makes two data sets neighbours.
        clip: the clipping rule, fixed or adaptive.
        noise: the kind of noise.

    Example:
        >>> from hushgrad.run.plan import plan
        >>> p = plan(records=1000, batch=100, epochs=1, delta=1e-5, noise_multiplier=1.0)
        >>> p.conditions.sampling
        Poisson(rate=0.1)
    """

    sampling: Sampling
    records: int
    relation: Relation
    clip: Clip | Adaptive
    noise: NoiseKind = INDEPENDENT


@dataclass(frozen=True)
class StepPlan:
    """What one step may release: `answers` to one kind of `query`, on a batch of this sampling.

    Guarantees: a step that asks for more, or for something else, is refused, and the event of the
    run is composed from what its steps may release.

    Args:
        sampling: which records the step sees.
        noise: the noise multiplier of each answer, relative to the plan's.
        answers: how many releases the step may make.
        query: the class of the queries that it may ask.
        mechanism: how answers are made private, where it is not by the plan's kind of noise.
        extra: what the step may release besides, paid for out of the algorithm's limit. Without a
            limit there must be none.

    Example:
        >>> from hushgrad.sampling import Poisson
        >>> StepPlan(Poisson(0.01), noise=2.0).event(0.8)
        GaussianDpEvent(noise_multiplier=1.6)
    """

    sampling: Sampling
    noise: float = 1.0
    answers: int = 1
    query: type = ClippedSum
    mechanism: StepMechanism | None = None
    extra: tuple[Allowance, ...] = ()

    def noise_at(self, noise_multiplier: float, kind: NoiseKind = INDEPENDENT) -> Noise:
        """Return the noise of one answer, where the plan has this multiplier and this kind of
        noise.
        """
        at = kind.at if self.mechanism is None else self.mechanism.at
        return at(noise_multiplier * self.noise)

    def event(self, noise_multiplier: float, kind: NoiseKind = INDEPENDENT) -> DpEvent:
        """Return all answers of the step as one event, before amplification by sampling."""
        each = self.noise_at(noise_multiplier, kind).event
        return each if self.answers == 1 else repeated(self.answers, each)

    def allowances(
        self, noise_multiplier: float, kind: NoiseKind = INDEPENDENT
    ) -> tuple[Allowance, ...]:
        """Return what a step of a plan with this multiplier may release."""
        # The least noise: a release with more of it is accepted.
        noise = self.noise_at(noise_multiplier, kind)
        add = None if self.mechanism is None else self.mechanism.add
        return (Allowance(self.query, noise, self.answers, add), *self.extra)


@runtime_checkable
class Algorithm(Protocol):
    """What a run does with its batches: `step` at least, and whatever differs from DP-SGD.

    Contract: information about a record enters the estimate and the state only through
    `context.release`. All other parts depend on public numbers and on released values alone. What
    an algorithm does not define is as in DP-SGD; `AlgorithmParts` lists what it may define.
    `testing.check_algorithm` tests an algorithm of your own.

    Example:
        >>> from hushgrad.run.query import Summand
        >>> class Signs:
        ...     def step(self, context, state):
        ...         query = ClippedSum(lambda here: [Summand(here, context.clip)])
        ...         mean = context.mean(context.release(query))
        ...         return {name: x.sign() for name, x in mean.items()}, state
        >>> isinstance(Signs(), Algorithm)
        True
    """

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        """Return the estimate of the gradient for the optimizer, and the state of the next step.

        A state in which "over" is true ends the run.
        """


@dataclass(frozen=True)
class AlgorithmParts:
    """An algorithm with all its parts: its own, and those of DP-SGD where it has none.

    Args:
        step: asks the batch, and returns the estimate of the gradient and the next state.
        stage: maps a step and the conditions to what the step may release.
        limit: maps a noise multiplier and the conditions to what a whole run may spend, for an
            adaptive algorithm, whose releases are chosen as it goes; to None where each step's
            releases are fixed.
        check: refuses conditions.
        update: moves the parameters by their `.grad`, given the parameters and the optimizer.
        output: which iterate a run returns.
        carries_metrics: whether each step releases one sum, beside which metrics can be released.
        owns_penalty: whether the algorithm itself reads the context's regulariser, whose gradient
            is otherwise added to the estimate.
        one_bound: whether one record has the same bound at all steps, as correlated noise needs.

    Example:
        >>> from hushgrad.algorithms import Sgd
        >>> AlgorithmParts.of(Sgd()).carries_metrics
        True
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
        """Return the parts of an algorithm, those of DP-SGD where it has none of its own."""
        # By attribute, so that an algorithm needs no base class.
        own = {name: getattr(algorithm, name, default) for name, default in _USUAL.items()}
        return cls(step=algorithm.step, **own)

    def require(self, conditions: Conditions) -> None:
        """Refuse conditions that the algorithm, its output rule or the noise does not allow."""
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
        """Return whether each release is accounted for by itself."""
        return isinstance(noise, Independent)

    def _check_correlated(self, stage: StepPlan, noise: NoiseKind) -> None:
        # The event of a correlated run assumes one sum with one bound at each step.
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
    """What each of a run's `steps` steps may release, and the event of the run, composed by the
    library.

    An algorithm states no event. The event follows from what its steps are allowed to release, and
    `StepContext.release` enforces that.

    Example:
        >>> from hushgrad.run.plan import plan
        >>> p = plan(records=1000, batch=100, epochs=1, delta=1e-5, noise_multiplier=1.0)
        >>> p.schedule.counts(10) == [(p.stage(0), 10)]
        True
    """

    def __init__(self, parts: AlgorithmParts, conditions: Conditions, steps: int) -> None:
        self._parts, self._conditions, self._steps = parts, conditions, steps
        self._kinds: list[StepPlan] = []
        alike = parts.stage is _USUAL["stage"]  # then one step stands for all, however many
        found = [self._kind(step) for step in range(1 if alike else steps)]
        # A number for each step: a run may have millions of steps, and few distinct plans.
        self._which = np.asarray(found, dtype=np.int64)

    def _kind(self, step: int) -> int:
        """Return the index of a step's plan among those seen so far, of which there are few."""
        plan = self._parts.stage(step, self._conditions)
        if plan not in self._kinds:
            self._kinds.append(plan)
        return self._kinds.index(plan)

    def counts(self, steps: int) -> list[tuple[StepPlan, int]]:
        """Return each distinct plan of a step with its number of steps, in the order of first
        steps.
        """
        if len(self._kinds) == 1:
            return [(self._kinds[0], steps)] if steps else []
        # Order among steps does not matter: composition is symmetric.
        counts = np.bincount(self._which[:steps], minlength=len(self._kinds)).tolist()
        return [(plan, n) for plan, n in zip(self._kinds, counts, strict=True) if n]

    def event(self, noise_multiplier: float) -> DpEvent:
        """Return the whole run as one event, including the choice of its output."""
        return self.event_after(self._steps, noise_multiplier)

    def event_after(self, steps: int, noise_multiplier: float) -> DpEvent:
        """Return the first `steps` steps as one event, including the choice of its output."""

        def rounds(count: int) -> DpEvent:
            return self._composed(count, noise_multiplier)

        return self._parts.output.event(rounds, steps)

    def _composed(self, steps: int, noise_multiplier: float) -> DpEvent:
        # A limit is charged whole: when an adaptive run ends may depend on what it released.
        limit = self._parts.limit(noise_multiplier, self._conditions)
        if limit is not None:
            return limit.event if steps else NoOpDpEvent()
        return composed(self.counts(steps), noise_multiplier, self._conditions)


def composed(
    counts: Sequence[tuple[StepPlan, int]], noise_multiplier: float, conditions: Conditions
) -> DpEvent:
    """Return the event of steps that release all that they may, by the number of each kind.

    A batch at which gradients are taken at two iterates is one batch, and its sum one event.
    """
    for stage, _ in counts:
        if stage.extra:
            raise Refused(
                "expected a limit with an algorithm that releases more than one kind of answer, "
                'got none; state it by a method "limit", as Agd does'
            )
    # Steps that are all alike let a sampling amplify over a whole run.
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
    """Return each distinct plan of a step with its number of steps, in the order of first steps."""
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
    """Return their sampling with batches of another expected size; None leaves it unchanged."""
    sampling, records = conditions.sampling, conditions.records
    if batch is None or batch == sampling.expected_batch(records):
        return sampling
    if not 1 <= batch <= records:
        raise ValueError(
            f"expected a batch between 1 and {records} records, got {batch}; pass a smaller one"
        )
    # The scheme itself knows how a batch of another size is drawn.
    return sampling.resized(batch, num_records=records)


def check_output(output: Output, conditions: Conditions) -> None:
    """Refuse conditions that the output rule's accounting does not cover."""
    if not output.exhaustive:
        return
    if not conditions.sampling.sees_all:
        raise Refused(
            f"expected full batches with the output {output}, whose choice is not accounted for "
            f"with sampled ones, got {conditions.sampling.statement}; pass sampling=FullBatch(), "
            "or use smallest(), which costs nothing"
        )
    # Scores of steps with different bounds could not be compared with one noise.
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
    """Refuse an output rule that reads one step's sum, where estimates combine several."""
    if output.direct:
        raise Refused(
            f"expected an output rule that does not read a step's sum, got {output}, where "
            "estimates combine several releases; use last, average() or uniform()"
        )


@dataclass(frozen=True)
class Scheduled:
    """The batches of an algorithm whose steps do not all sample alike, drawn step by step."""

    stage: Callable[[int], StepPlan]
    plan: Scheme

    @property
    def relations(self) -> frozenset[Relation]:
        """The relations of the plan's sampling."""
        return self.plan.relations

    def span(self, num_records: int, *, length: int) -> int:
        """Return what the plan's sampling returns."""
        return self.plan.span(num_records, length=length)

    def draw(self, num_records: int, *, step: int, rng: Rng) -> Positions:
        """Return the positions in the batch of one step."""
        sampling = self.stage(step).sampling
        assert isinstance(sampling, Scheme)
        return sampling.draw(num_records, step=step, rng=rng)
