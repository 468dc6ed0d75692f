"""What an algorithm is: what its steps may release, what they ask, and what they make of the
answers.

`stage` says which records a step sees and what it may release of them, so that the event of a run
follows from it. `step` asks the batch and returns an estimate of the gradient, which is passed to
the user's optimizer. An algorithm defines what differs from DP-SGD; `AlgorithmParts` adds the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from dp_accounting import DpEvent
from torch import Tensor

from hushgrad.algorithms.output import Output, last
from hushgrad.clipping.rules import Adaptive, Clip
from hushgrad.events import repeated
from hushgrad.noise import Independent, Noise, NoiseKind
from hushgrad.run.permit import Allowance, StepMechanism, ZcdpLimit
from hushgrad.run.query import ClippedSum
from hushgrad.run.step import StepContext
from hushgrad.sampling import Sampling
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
        repeats: (first, length) if from step `first` on the plans of steps repeat every `length`
            steps, as SpiderBoost's do; None if each step is to be asked for.

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
    repeats: tuple[int, int] | None

    @classmethod
    def of(cls, algorithm: Algorithm) -> AlgorithmParts:
        """Return the parts of an algorithm, those of DP-SGD where it has none of its own."""
        # By attribute, so that an algorithm needs no base class.
        own = {name: getattr(algorithm, name, default) for name, default in _USUAL.items()}
        if own["stage"] is _USUAL["stage"]:
            own["repeats"] = (0, 1)
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
    "repeats": None,
}
"""DP-SGD's parts: every step alike, nothing to refuse, the optimizer's step, the last iterate."""


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
