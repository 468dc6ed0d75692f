"""A plan: everything that a run's guarantee depends on, fixed and public before it starts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dp_accounting import ComposedDpEvent, DpEvent

from hushgrad.accounting import PLD, Accountant, Target, least_noise
from hushgrad.accounting.accountants import require_delta
from hushgrad.accounting.calibration import require_proof
from hushgrad.algorithms import Algorithm, Conditions, Sgd, StepPlan
from hushgrad.algorithms.algorithm import INDEPENDENT, AlgorithmParts
from hushgrad.algorithms.schedule import Schedule, count_stages
from hushgrad.clipping.groups import Grouping, whole
from hushgrad.clipping.rules import Adaptive, Clip, automatic
from hushgrad.events import repeated, steps_of
from hushgrad.noise import Noise, NoiseBuffer, NoiseKind
from hushgrad.run.metrics import Metrics
from hushgrad.run.permit import Permit
from hushgrad.sampling import Poisson, Sampling, require_relation
from hushgrad.types import Batch, Refused, Relation


@dataclass(frozen=True)
class Plan:
    """A run of `steps` steps on `records` records, and the ε that they cost at `delta`.

    Everything in a plan is public, including the number of records. `plan` makes one from the
    numbers that people usually have; call this class where all of its arguments are known.

    Guarantees: what the plan accounts for is what its steps may release. `permit` states it for
    each step, and a release that it does not allow is refused.

    Args:
        records: n, the public number of records.
        sampling: which records each step sees, such as `sampling.Poisson(0.01)`.
        steps: T, the number of steps.
        noise_multiplier: σ, noise ÷ the bound on one record, its metrics included.
        delta: δ of the guarantee.
        relation: what makes two data sets neighbours.
        clip: the clipping rule, fixed or adaptive.
        groups: the parameters that are clipped together.
        accountant: what computes ε.
        metrics: numbers of each record that are released along with its gradient.
        algorithm: what each step asks of its batch, and what it makes of the answer.
        noise: the kind of noise.

    Raises:
        ValueError: if an argument is out of range.
        Refused: if the parts do not fit together, such as metrics with an algorithm that carries
            none.

    Example:
        >>> p = Plan(60_000, Poisson(0.01), steps=100, noise_multiplier=1.0, delta=1e-5)
        >>> p.divisor
        600.0
        >>> round(p.epsilon, 2)
        0.72
    """

    records: int
    sampling: Sampling
    steps: int
    noise_multiplier: float
    delta: float
    relation: Relation = Relation.ADD_REMOVE
    clip: Clip | Adaptive = field(default_factory=automatic)
    groups: Grouping = whole
    accountant: Accountant = PLD
    metrics: Metrics | None = None
    algorithm: Algorithm = field(default_factory=Sgd)
    noise: NoiseKind = INDEPENDENT

    def __post_init__(self) -> None:
        # `plan` checks this before it searches for the noise, but a Plan can be made directly.
        require_relation(self.sampling, self.relation)
        require_delta(self.delta)
        require_proof(self.accountant)
        if self.records < 1 or self.steps < 1:
            raise ValueError(
                f"expected records >= 1 and steps >= 1, got {self.records} and {self.steps}; pass "
                "the public number of records, and how many batches to train on"
            )
        if not isinstance(self.clip, Clip | Adaptive):
            raise ValueError(
                f"expected a clipping rule, got {self.clip!r}; pass one such as hg.automatic() or "
                "hg.abadi(1.0)"
            )
        # The share of clipped records must be released, and metrics are how it is.
        if isinstance(self.clip, Adaptive) and self.metrics is None:
            raise ValueError(
                "expected metrics with adaptive clipping, which follows the share of clipped "
                "records, got none; pass metrics=Metrics()"
            )
        if self.parts.output.silent and self.metrics is not None:
            raise Refused(
                f"expected no metrics with the output {self.parts.output}, which allows "
                "nothing else to leave, got some; leave them out, or choose another output"
            )
        if self.metrics is not None and not self.parts.carries_metrics:
            raise Refused(
                f"expected no metrics with {self.algorithm!r}, which does not release one sum for "
                "each step, got some; leave them out"
            )
        self.parts.require(self.conditions)

    @property
    def conditions(self) -> Conditions:
        """What the algorithm is told about the plan."""
        return Conditions(self.sampling, self.records, self.relation, self.clip, self.noise)

    @cached_property
    def parts(self) -> AlgorithmParts:
        """The algorithm with all of its parts, DP-SGD's where it has none of its own."""
        return AlgorithmParts.of(self.algorithm)

    @cached_property
    def schedule(self) -> Schedule:
        """What each step may release."""
        return Schedule(self.parts, self.conditions, self.steps)

    def stage(self, step: int) -> StepPlan:
        """The batch of one step, what it may release, and how much noise each release gets."""
        return self.schedule.stage(step)

    @property
    def stages(self) -> list[tuple[StepPlan, int]]:
        """Each distinct plan of a step, with the number of steps that have it."""
        return self.schedule.counts(self.steps)

    def noise_at(self, step: int) -> Noise:
        """The noise of one release at one step."""
        return self.stage(step).noise_at(self.noise_multiplier, self.noise)

    def permit(
        self,
        step: int,
        batch: Batch,
        *,
        spent: float = 0.0,
        past: Sequence[bytes] = (),
        buffer: NoiseBuffer | None = None,
    ) -> Permit:
        """What one step may release of the batch that was drawn for it.

        Args:
            step: the number of the step, from 0.
            batch: the batch that was drawn.
            spent: what an adaptive algorithm has spent of its limit so far.
            past: the tags of earlier releases, on which correlated noise depends.
            buffer: the noise of earlier releases, kept so that it need not be drawn again.
        """
        # An output rule that chooses by a release pays for it in its event.
        choice, stage = self.parts.output.choice, self.stage(step)
        limit = self.parts.limit(self.noise_multiplier, self.conditions)
        # With a limit the algorithm chooses multiples of noise 1, and pays for each.
        sigma = self.noise_multiplier if limit is None else 1 / stage.noise
        allowances = stage.allowances(sigma, self.noise)
        return Permit(
            step,
            allowances if choice is None else (*allowances, choice),
            batch,
            limit,
            spent,
            past,
            buffer,
        )

    def divisor_at(self, step: int) -> float:
        """The public number that a step's sum is divided by: the expected size of its batch."""
        return self.stage(step).sampling.expected_batch(self.records)

    @cached_property
    def largest_batch(self) -> float:
        """The largest expected size of a step's batch."""
        return max(stage.sampling.expected_batch(self.records) for stage, _ in self.stages)

    @property
    def divisor(self) -> float:
        """The divisor of an ordinary step."""
        return self.sampling.expected_batch(self.records)

    def event(self, steps: int) -> DpEvent:
        """The first `steps` steps of the run as one event."""
        return self.schedule.event_after(steps, self.noise_multiplier)

    @cached_property
    def epsilon(self) -> float:
        """What the whole run costs."""
        return self.epsilon_after(self.steps)

    def epsilon_after(self, steps: int) -> float:
        """What a run of `steps` steps would have cost, had it been planned so."""
        return self.spent(self.event(steps))

    def spent(self, event: DpEvent) -> float:
        """What an event costs at the plan's δ, by its accountant and under its relation."""
        if self.noise_multiplier == 0:  # accountants need not handle an event without noise
            return math.inf
        return self.accountant.epsilon(event, delta=self.delta, relation=self.relation)

    def released_again(self, steps: Iterable[int], *, times: int) -> DpEvent:
        """These steps as one event, where each of their batches was released `times` times.

        Releases of one batch share its sampling: together they are one release with noise σ/√times.
        Each such step of an algorithm with a limit is charged all of the limit.
        """
        again, limit = list(steps), self.parts.limit(self.noise_multiplier, self.conditions)
        if limit is not None:
            return repeated(len(again) * times, limit.event)
        if self.correlated:  # noise depends on all past steps: from here on it is another run
            return self.noise.run_event(
                self.noise_multiplier,
                sampling=self.sampling,
                num_records=self.records,
                num_steps=self.steps,
                runs=times,
            )
        each = []
        for stage, count in count_stages(self.stage(step) for step in again):
            # k Gaussian releases of one batch cost as much as one with noise σ/√k. Nothing of the
            # kind holds for other mechanisms, whose releases are composed.
            if stage.mechanism is None:
                event = stage.event(self.noise_multiplier / math.sqrt(times))
            else:
                event = repeated(times, stage.event(self.noise_multiplier))
            once = stage.sampling.amplify(event, num_records=self.records)
            each.append(repeated(count, once))
        return each[0] if len(each) == 1 else ComposedDpEvent(each)

    @property
    def correlated(self) -> bool:
        """Whether a step's noise depends on earlier steps, so that only a whole run has a cost."""
        return not AlgorithmParts.is_independent(self.noise)

    def settled_event(self, steps: int) -> DpEvent | None:
        """What a run that ends after `steps` steps is charged; None if it drew no batch.

        Where noise is correlated, the whole run is charged, however few steps were taken.
        """
        if not steps:
            return None
        return self.event(self.steps if self.correlated else steps)

    def terms(self) -> dict[str, Any]:
        """Everything that the guarantee depends on, in words and numbers that JSON can hold."""
        return {
            "records": self.records,
            "sampling": self.sampling.statement,
            "expected_batch": self.divisor,
            "steps": self.steps,
            "noise_multiplier": self.noise_multiplier,
            "delta": self.delta,
            "relation": self.relation.value,
            "clip": repr(self.clip),
            # A grouping may be a function, whose repr contains an address.
            "groups": getattr(self.groups, "__name__", repr(self.groups)),
            "accountant": self.accountant.name,
            "metrics": None if self.metrics is None else self.metrics.terms(),
            "algorithm": repr(self.algorithm),
            "noise": repr(self.noise),
        }

    def describe(self) -> dict[str, Any]:
        """The terms, and the ε that follows from them."""
        return self.terms() | {"epsilon": self.epsilon}


def plan(
    *,
    records: int,
    batch: int,
    epochs: float,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    sampling: Sampling | None = None,
    relation: Relation = Relation.ADD_REMOVE,
    clip: Clip | Adaptive | None = None,
    groups: Grouping = whole,
    accountant: Accountant = PLD,
    metrics: Metrics | None = None,
    algorithm: Algorithm | None = None,
    noise: NoiseKind = INDEPENDENT,
) -> Plan:
    """Plan a private run of `epochs` passes over the data, at a given ε or a given noise.

    Guarantees: the plan costs at most `epsilon` at `delta`. The number of steps and the noise are
    rounded up.

    Args:
        records: n, the public number of records.
        batch: the expected number of records in a batch. With a `sampling` of your own it only says
            how many steps an epoch has.
        epochs: how often the run passes over the data; it takes epochs · records / batch steps.
        delta: δ, which should be well below 1 / records; a warning says where it is not.
        epsilon: ε of the whole run, for which the least noise is chosen. Pass this or
            `noise_multiplier`.
        noise_multiplier: σ, noise ÷ the bound on one record, from which ε follows.
        sampling: which records each step sees; Poisson sampling at rate batch / records by default.
        relation: what makes two data sets neighbours: add/remove one record, or replace one.
        clip: the clipping rule; `automatic()` by default, which has no threshold to tune. Adaptive
            clipping adds the metrics that it follows.
        groups: the parameters that are clipped together: `whole`, or `per_layer`.
        accountant: what computes ε; the PLD accountant by default, which is the tightest.
        metrics: numbers of each record, such as its loss, released along with its gradient.
        algorithm: DP-SGD by default, or another of `hushgrad.algorithms`.
        noise: the kind of noise: `noise.Independent(gaussian)` by default, which is drawn afresh at
            each step, or `noise.correlated(...)`, which takes back part of the noise of earlier
            steps and needs `sampling.CyclicPoisson` or `sampling.FullBatch`.

    Returns:
        The plan. `plan.epsilon` is what it costs, and `train` carries it out.

    Raises:
        ValueError: if an argument is out of range, or not exactly one of `epsilon` and
            `noise_multiplier` is given.
        Refused: if the sampling, the relation, the algorithm and the noise do not fit together.

    Example:
        >>> p = plan(records=60_000, batch=512, epochs=1, delta=1e-5, noise_multiplier=1.0)
        >>> p.steps, round(p.epsilon, 2)
        (118, 0.64)

    Reference: Abadi et al. 2016, Deep Learning with Differential Privacy; Koskela et al. 2020,
    Computing Tight Differential Privacy Guarantees Using FFT, for the PLD accountant.
    """
    if not 1 <= batch <= records:
        raise ValueError(
            f"expected 1 <= batch <= records, got batch {batch} of {records} records; pass a "
            "smaller batch"
        )
    if (epsilon is None) == (noise_multiplier is None):
        given = "neither" if epsilon is None else "both"
        raise ValueError(f"expected either epsilon or noise_multiplier, got {given}; give one")
    if 1 <= delta * records < records:
        warnings.warn(
            f"expected delta below 1 / records = {1 / records:.2g}, got {delta:g}, by which "
            "publishing a record chosen at random would pass; use a smaller delta",
            stacklevel=2,
        )
    # From here on only public numbers are used, so the plan itself tells nothing of a record.
    steps = steps_of(epochs, records=records, batch=batch)
    # Poisson sampling draws each record by itself, which every accountant covers.
    drawn = Poisson(batch / records) if sampling is None else sampling
    rule = automatic() if clip is None else clip
    chosen = Sgd() if algorithm is None else algorithm
    require_relation(drawn, relation)
    # Correlated noise chooses its bands for this sampling and number of steps.
    kind = noise.fitted(drawn, num_steps=steps)
    conditions = Conditions(drawn, records, relation, rule, kind)
    parts = AlgorithmParts.of(chosen)
    parts.require(conditions)
    if noise_multiplier is None:
        assert epsilon is not None
        noise_multiplier, _ = least_noise(
            Schedule(parts, conditions, steps).event,
            Target(epsilon, delta, relation, accountant),
        )
    return Plan(
        records=records,
        sampling=drawn,
        steps=steps,
        noise_multiplier=noise_multiplier,
        delta=delta,
        relation=relation,
        clip=rule,
        groups=groups,
        accountant=accountant,
        metrics=Metrics() if metrics is None and isinstance(clip, Adaptive) else metrics,
        algorithm=chosen,
        noise=kind,
    )
