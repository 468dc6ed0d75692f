"""DP-AGD: gradient descent that measures more finely once coarse gradients lead nowhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from dp_accounting import DpEvent
from torch import Tensor

from hushgrad.algorithms.algorithm import Conditions, State, StepPlan, refuse_direct, require_full
from hushgrad.algorithms.output import FARTHEST, Output, choosing, chosen, last
from hushgrad.batches.records import MULTIPLE, count, pad, padded_size
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.gradients import restored, unwrap_constants
from hushgrad.iterates import Values, copy_values, exchange_values, norm
from hushgrad.noise import Noise, gaussian, laplace
from hushgrad.run.permit import Allowance, ZcdpLimit
from hushgrad.run.query import BatchPass, ClippedSum, Part, Summand, answerable
from hushgrad.run.step import StepContext, gradient_of
from hushgrad.types import Bounded, Params, Refused, Relation, Released

_MULTIPLE = 4 * MULTIPLE  # the most that any model is padded to, so that a record keeps its bits
_EPSILON_OF_ROUNDING = 1e-9  # of ρ: so many splits fit, however they are rounded


@dataclass(frozen=True)
class Agd:
    """DP-AGD: a budget ρ of zero-concentrated DP, spent as the descent goes.

    A step releases the sum of clipped gradients at a cost of ρ_g, and chooses one of `choices`
    lengths for a step along it, 0 among them, by a noisy minimum of the objective (losses clamped
    to 0 up to `largest_loss`) at a cost of ρ_c. If 0 is chosen, the gradient is measured again for
    `gamma` ρ_g more, averaged with what is known, and the length chosen anew. Every ten steps the
    longest one becomes 1.1 times the longest that was taken. When the next cost does not fit into
    what is left, the run is over, so `steps` of the plan is a limit.

    ρ is that of one release of the plan's σ on all records, 1/(2σ²), or 4 times that where a record
    is replaced; a first step costs ρ/`splits`, one half for each of its two parts, as the original
    leaves open. Costs are chosen after seeing releases: the sum of ρ is a filter that allows it.
    A noisy minimum by the noise of `choosing` is ε-DP, and so ε²/2-zCDP. The event is ρ-zCDP,
    which the rdp and zcdp accountants cover. The optimizer is to be SGD at rate 1. A step that is
    released again without its key is charged all of ρ.

    Reference: Lee and Kifer 2018, Concentrated Differentially Private Gradient Descent with
    Adaptive per-Iteration Privacy Budget, Algorithm 2.
    """

    largest_loss: float
    longest_step: float = 2.0
    splits: int = 60
    choices: int = 20
    gamma: float = 0.1
    output: Output = last
    carries_metrics: ClassVar[bool] = False
    owns_penalty: ClassVar[bool] = True  # steps are chosen with it

    def __post_init__(self) -> None:
        for name in ("largest_loss", "longest_step", "gamma"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"expected {name} > 0 and finite, got {value}")
        if self.splits < 2 or self.choices < 2:  # of one split nothing would be left
            raise ValueError(
                f"expected splits >= 2 and choices >= 2, got {self.splits} and {self.choices}; 60 "
                "and 20 are usual"
            )

    def stage(self, step: int, conditions: Conditions) -> StepPlan:
        """Every step sees every record; how much noise its releases get is chosen as it goes."""
        objectives = Allowance(Objectives, laplace(1.0))
        return StepPlan(conditions.sampling, extra=(objectives,))

    def limit(self, noise_multiplier: float, conditions: Conditions) -> ZcdpLimit:
        """ρ of the run, however many steps it lasts for."""
        return ZcdpLimit(rho_of(noise_multiplier, conditions.relation), conditions.relation)

    def check(self, conditions: Conditions) -> None:
        """Refuse sampled batches, which zCDP does not gain from."""
        require_full(conditions, "DP-AGD")
        refuse_direct(self.output)

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        """Measure, choose, and measure again until a step is chosen or nothing is left."""
        share = _share(context, self.splits)
        if not state:
            state = {"gradient": share, "chosen": [], "longest": self.longest_step, "over": False}
        cost, known, penalty = state["gradient"], 0.0, context.regulariser
        choice = choosing(math.sqrt(2 * share))
        gradient = ClippedSum(lambda here: [Summand(here, context.clip)])
        decay = gradient_of(penalty, context.params) if penalty else {}
        total: dict[str, Tensor] = {}
        while True:
            measure = _noise_for(cost, context.relation)
            if not context.affords(measure.event, chosen(choice.noise_multiplier)):
                break
            fresh = context.release(gradient, noise=measure).values
            total = {n: _mean(total.get(n), known, fresh[n], cost) for n in context.params}
            known += cost
            mean = {n: x / context.divisor + decay.get(n, 0.0) for n, x in total.items()}
            size = norm(mean) or 1.0
            lengths = [state["longest"] * k / (self.choices - 1) for k in range(self.choices)]
            ends = [_moved(context.params, mean, length / size) for length in lengths]
            scores = context.release(Objectives(context, ends, self.largest_loss), noise=choice)
            length = lengths[_place_of_least(scores)]
            if length:
                moved = {n: x * (length / size) for n, x in mean.items()}
                return moved, self._later(state, known, length)
            cost = self.gamma * known
        still = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in context.params.items()}
        return still, state | {"gradient": known or cost, "over": True}

    def _later(self, state: State, known: float, length: float) -> State:
        taken = [*state["chosen"], length]
        longest = state["longest"]
        if len(taken) == _EVERY:
            taken, longest = [], _GROWTH * max(taken)
        return state | {"gradient": known, "chosen": taken, "longest": longest}


@answerable
@dataclass(frozen=True)
class Objectives:
    """The objective's sum over records at several ends of a step, of losses clamped from 0 up.

    One record moves each score by at most `largest_loss`, also where it is replaced. That is a
    bound on each, and not on all of them together: only the place of the least may be used.
    """

    context: StepContext
    ends: Sequence[Values]
    largest_loss: float
    of_each_record: ClassVar[bool] = False

    def bounded(self, work: BatchPass | None) -> Bounded:
        """A score for each end, penalty included."""
        assert work is not None, "objectives are sums over a batch"
        context, penalty = self.context, self.context.regulariser
        found = torch.zeros(len(self.ends), dtype=torch.float64)
        for k, end in enumerate(self.ends):
            # The same draws at every end, and no two records with the same.
            with torch.no_grad(), torch.random.fork_rng(), exchange_values(context.params, end):
                for part in work.parts():
                    found[k] += _losses(part).clamp(0, self.largest_loss).sum().cpu()
                if penalty is not None:
                    found[k] += context.divisor * float(penalty())
        farthest = FARTHEST * self.largest_loss
        scores = found.nan_to_num(nan=farthest).clamp(-farthest, farthest)
        most = self.largest_loss * (1 + SUM_SLACK)
        return Bounded({_SCORES: scores}, most, most)

    def event(self, noise_multiplier: float) -> DpEvent:
        """A pure step, whatever the number of ends."""
        return chosen(noise_multiplier)


_SCORES = "scores"
_EVERY, _GROWTH = 10, 1.1  # the original's τ and 1 + η


def _place_of_least(scores: Released) -> int:
    """The only thing that may be used of them."""
    return int(scores.values[_SCORES].argmin())


def rho_of(noise_multiplier: float, relation: Relation) -> float:
    """ρ of one Gaussian release of noise ÷ bound on one record, (Δ/σ)²/2; without noise ∞."""
    double = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    return (double / noise_multiplier) ** 2 / 2 if noise_multiplier > 0 else math.inf


def _share(context: StepContext, splits: int) -> float:
    """ρ of one half of a first step's releases."""
    limit = context.permit.limit
    assert limit is not None
    if limit.rho == math.inf:
        raise Refused("expected noise with DP-AGD, whose steps it pays for, got none; add noise")
    return limit.rho * (1 - _EPSILON_OF_ROUNDING) / (2 * splits)


def _noise_for(rho: float, relation: Relation) -> Noise:
    """Gaussian noise with which a release costs ρ."""
    double = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    return gaussian(double / math.sqrt(2 * rho))


def _mean(old: Tensor | None, known: float, new: Tensor, cost: float) -> Tensor:
    """Weights by ρ are weights by precision."""
    return new if old is None else (known * old + cost * new) / (known + cost)


def _moved(params: Params, mean: Values, rate: float) -> dict[str, Tensor]:
    return {n: x - rate * mean[n].to(x.device, x.dtype) for n, x in copy_values(params).items()}


def _losses(part: Part) -> Tensor:
    """Each record's loss at the present point; a loss that is no number counts as the largest."""
    size = count(part.batch)
    if size == 0:
        return torch.zeros(0, dtype=torch.float64)
    batch, _ = unwrap_constants(part.batch)
    whole = pad(batch, size, padded_size(size, _MULTIPLE))
    with restored({}, part.objective.modules):
        return part.objective.loss(whole)[:size].double().nan_to_num(nan=math.inf)
