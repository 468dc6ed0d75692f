"""What an algorithm is: a schedule, a query, an update and an output rule, as one value.

The schedule says which records a step sees and with how much noise, so that the event of a run
follows from it. The query says what is summed for a record. The update is left to the user's
optimizer, which is given the estimate of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from dp_accounting import ComposedDpEvent, DpEvent
from torch import Tensor

from hushgrad.algorithms.output import Output
from hushgrad.clipping.rules import Adaptive, Clip
from hushgrad.events import repeated
from hushgrad.noise import gaussian
from hushgrad.rng import Rng
from hushgrad.run.step import StepContext
from hushgrad.sampling import Sampling, Scheme
from hushgrad.sampling.draws import Positions
from hushgrad.types import Params, Refused, Relation

State = dict[str, Any]
"""What an algorithm remembers from step to step; a checkpoint holds it, so it is released."""


@dataclass(frozen=True)
class Conditions:
    """What a plan says of its steps: sampling, public number of records, relation, clipping."""

    sampling: Sampling
    records: int
    relation: Relation
    clip: Clip | Adaptive


@dataclass(frozen=True)
class StepPlan:
    """The batch of one step, and its noise multiplier relative to the plan's."""

    sampling: Sampling
    noise: float = 1.0


@runtime_checkable
class Algorithm(Protocol):
    """What a run does with its batches.

    Contract: `step` releases what `event` accounts for, and nothing else of a record gets into
    the estimate or the state. `stage` and `event` depend on public numbers alone.
    """

    @property
    def output(self) -> Output:
        """The rule by which the model at the end is chosen among the iterates."""

    @property
    def carries_metrics(self) -> bool:
        """True if each step releases one sum, beside which metrics can ride."""

    def stage(self, step: int, conditions: Conditions) -> StepPlan:
        """The batch and the noise of one step."""

    def event(self, noise_multiplier: float, *, steps: int, conditions: Conditions) -> DpEvent:
        """The first steps of a run, as one event; the output's choice is not in it."""

    def check(self, conditions: Conditions) -> None:
        """Refuse conditions that the algorithm, or its output rule, cannot take."""

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        """The estimate of the gradient that the optimizer is given, and what to remember.

        A state with a true "over" ends the run.
        """

    def update(self, params: Params, optimizer: torch.optim.Optimizer) -> None:
        """Move the parameters by their `.grad`."""


def composed(
    stages: Iterable[tuple[StepPlan, int]], noise_multiplier: float, conditions: Conditions
) -> DpEvent:
    """The event of steps that release one sum each, with Gaussian noise: each stage's, so often.

    A batch that gradients at two points are taken from is one batch, and its sum one event.
    """
    counts = [(stage, count) for stage, count in stages if count]

    def event(stage: StepPlan) -> DpEvent:
        return gaussian(noise_multiplier * stage.noise).event

    if len(counts) == 1:
        (stage, count), records = counts[0], conditions.records
        return stage.sampling.run_event(event(stage), num_records=records, num_steps=count)
    each = [
        repeated(count, stage.sampling.amplify(event(stage), num_records=conditions.records))
        for stage, count in counts
    ]
    return ComposedDpEvent(each) if each else repeated(0, gaussian(noise_multiplier).event)


def count_stages(stages: Iterable[StepPlan]) -> list[tuple[StepPlan, int]]:
    """Each stage once, in the order of their first steps, with how often it comes."""
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
