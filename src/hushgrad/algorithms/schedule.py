"""A run's schedule: what each step may release, and the event that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent
from dp_accounting.dp_event import NoOpDpEvent

from hushgrad.algorithms.algorithm import AlgorithmParts, Conditions, StepPlan
from hushgrad.events import repeated
from hushgrad.rng import Rng
from hushgrad.sampling import Scheme
from hushgrad.sampling.draws import Positions
from hushgrad.types import Refused, Relation


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
        self._first, self._length = parts.repeats or (steps, 1)
        self._kinds: list[StepPlan] = []
        # An index for each step until they repeat: a run may have millions, and few distinct plans.
        asked = range(steps if parts.repeats is None else self._first + self._length)
        self._which = np.asarray([self._kind(step) for step in asked], dtype=np.int64)

    def _kind(self, step: int) -> int:
        """Return the index of a step's plan among those seen so far, of which there are few."""
        plan = self._parts.stage(step, self._conditions)
        if plan not in self._kinds:
            self._kinds.append(plan)
        return self._kinds.index(plan)

    def stage(self, step: int) -> StepPlan:
        """Return what one step may release: the plan that the run is charged for.

        The algorithm is not asked again, so that it cannot answer otherwise than it did before.
        """
        if step >= self._first:
            step = self._first + (step - self._first) % self._length
        return self._kinds[int(self._which[step])]

    def counts(self, steps: int) -> list[tuple[StepPlan, int]]:
        """Return each distinct plan of a step with its number of steps, in the order of first
        steps.
        """
        if len(self._kinds) == 1:
            return [(self._kinds[0], steps)] if steps else []
        many = len(self._kinds)
        # Order among steps does not matter: composition is symmetric.
        counts = np.bincount(self._which[: min(steps, self._first)], minlength=many)
        turns, rest = divmod(max(steps - self._first, 0), self._length)
        cycle = self._which[self._first :]
        counts += turns * np.bincount(cycle, minlength=many)
        counts += np.bincount(cycle[:rest], minlength=many)
        return [(p, n) for p, n in zip(self._kinds, counts.tolist(), strict=True) if n]

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
