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

_MULTIPLE = 4 * MULTIPLE  # the most that any model is padded to, so that losses are bit-identical
_EPSILON_OF_ROUNDING = 1e-9  # of ρ: all splits fit, however they are rounded


@dataclass(frozen=True)
class Agd:
    """DP-AGD: gradient descent that spends a budget ρ of zero-concentrated DP as it goes.

    A step releases the sum of clipped gradients at a cost of ρ_g, and chooses one of `choices` step
    lengths, including 0, by a noisy minimum of the objective, at a cost of ρ_c. If 0 is chosen, the
    gradient is measured again for `gamma` · ρ_g more, averaged with the earlier measurements, and
    the length is chosen again. Every ten steps the longest length becomes 1.1 times the longest
    that was chosen. The run ends when the next cost does not fit into the rest of ρ, so `steps` of
    the plan is an upper limit.

    Guarantees: the run is ρ-zCDP, with the ρ of one release of the plan's σ on all records,
    1/(2σ²), or 4 times that where a record is replaced. Costs are chosen after seeing releases; the
    limit on their sum is a filter that allows it. A noisy minimum by the noise of `choosing` is
    ε-DP, and so ε²/2-zCDP.

    Use the rdp or zcdp accountant, full batches, and SGD at rate 1. A step that is released again
    without its key is charged all of ρ.

    Args:
        largest_loss: losses are clamped from 0 to this number.
        longest_step: the longest step length at first.
        splits: a first step costs ρ/splits, half for each of its two parts; the original leaves
            this number open.
        choices: how many step lengths there are.
        gamma: the cost of measuring again, relative to what is spent on the gradient.
        output: which iterate the run returns.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> from hushgrad import plan
        >>> from hushgrad.accounting import RDP
        >>> from hushgrad.sampling import FullBatch
        >>> p = plan(
        ...     records=100,
        ...     batch=100,
        ...     epochs=20,
        ...     delta=1e-3,
        ...     noise_multiplier=1.0,
        ...     sampling=FullBatch(),
        ...     accountant=RDP,
        ...     algorithm=Agd(largest_loss=5.0),
        ... )
        >>> p.algorithm.limit(p.noise_multiplier, p.conditions).rho
        0.5

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
    repeats: ClassVar[tuple[int, int]] = (0, 1)
    owns_penalty: ClassVar[bool] = True  # steps are chosen with it

    def __post_init__(self) -> None:
        for name in ("largest_loss", "longest_step", "gamma"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"expected {name} > 0 and finite, got {value}")
        # One choice would be the length 0 alone, and of one split nothing would be left.
        if self.splits < 2 or self.choices < 2:
            raise ValueError(
                f"expected splits >= 2 and choices >= 2, got {self.splits} and {self.choices}; 60 "
                "and 20 are usual"
            )

    def stage(self, step: int, conditions: Conditions) -> StepPlan:
        """Every step sees every record; the noise of its releases is chosen as it goes."""
        # Noise 1: the algorithm chooses a multiple of it and pays for that.
        return StepPlan(conditions.sampling, extra=(_CHOICE,))

    def limit(self, noise_multiplier: float, conditions: Conditions) -> ZcdpLimit:
        """Return ρ of the run, however many steps it takes."""
        return ZcdpLimit(rho_of(noise_multiplier, conditions.relation), conditions.relation)

    def check(self, conditions: Conditions) -> None:
        """Refuse sampled batches, which zCDP does not benefit from."""
        require_full(conditions, "DP-AGD")
        refuse_direct(self.output)

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        """Measure and choose, and measure again until a step is chosen or the limit is spent."""
        share = _share(context, self.splits)
        if not state:
            state = {"gradient": share, "chosen": [], "longest": self.longest_step, "over": False}
        cost, known, penalty = state["gradient"], 0.0, context.regulariser
        # A pure ε-DP choice costs ε²/2 of ρ.
        choice = choosing(math.sqrt(2 * share))
        gradient = ClippedSum(lambda here: [Summand(here, context.clip)])
        decay = gradient_of(penalty, context.params) if penalty else {}
        total: dict[str, Tensor] = {}
        while True:
            measure = _noise_for(cost, context.relation)
            # Both parts are asked for at once: a gradient without a choice would be wasted.
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
            # Length 0 was best: the gradient is too noisy, so measure more finely.
            cost = self.gamma * known
        # The limit is spent: the iterate stays where it is.
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
    """The objective's sums over records at several ends of a step, with losses clamped from 0 up.

    Guarantees: one record moves each score by at most `largest_loss`, also where it is replaced.
    This bounds each score, not all of them together: only the index of the least may be used.
    """

    context: StepContext
    ends: Sequence[Values]
    largest_loss: float
    of_each_record: ClassVar[bool] = False

    def bounded(self, work: BatchPass | None) -> Bounded:
        """Return a score for each end, penalty included."""
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
        # A penalty can be huge or NaN at a far end of a step.
        farthest = FARTHEST * self.largest_loss
        scores = found.nan_to_num(nan=farthest).clamp(-farthest, farthest)
        most = self.largest_loss * (1 + SUM_SLACK)
        return Bounded({_SCORES: scores}, most, most)

    def event(self, noise_multiplier: float) -> DpEvent:
        """A pure step, whatever the number of ends."""
        return chosen(noise_multiplier)


_SCORES = "scores"
_CHOICE = Allowance(Objectives, laplace(1.0))  # of a length for the step
_EVERY, _GROWTH = 10, 1.1  # the original's τ and 1 + η


def _place_of_least(scores: Released) -> int:
    """Return the index of the least score, the only thing that may be used of them."""
    return int(scores.values[_SCORES].argmin())


def rho_of(noise_multiplier: float, relation: Relation) -> float:
    """Return ρ of one Gaussian release, (Δ/σ)²/2; infinite without noise."""
    double = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    return (double / noise_multiplier) ** 2 / 2 if noise_multiplier > 0 else math.inf


def _share(context: StepContext, splits: int) -> float:
    """Return ρ of one half of a first step's releases."""
    limit = context.permit.limit
    assert limit is not None
    if limit.rho == math.inf:
        raise Refused("expected noise with DP-AGD, whose steps it pays for, got none; add noise")
    return limit.rho * (1 - _EPSILON_OF_ROUNDING) / (2 * splits)


def _noise_for(rho: float, relation: Relation) -> Noise:
    """Return Gaussian noise with which a release costs ρ."""
    double = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    return gaussian(double / math.sqrt(2 * rho))


def _mean(old: Tensor | None, known: float, new: Tensor, cost: float) -> Tensor:
    """Return the mean of two measurements; weights by ρ are weights by precision."""
    # ρ is proportional to the precision 1/σ² of a measurement.
    return new if old is None else (known * old + cost * new) / (known + cost)


def _moved(params: Params, mean: Values, rate: float) -> dict[str, Tensor]:
    return {n: x - rate * mean[n].to(x.device, x.dtype) for n, x in copy_values(params).items()}


def _losses(part: Part) -> Tensor:
    """Return each record's loss at the current iterate; NaN counts as infinite."""
    size = count(part.batch)
    if size == 0:
        return torch.zeros(0, dtype=torch.float64)
    batch, _ = unwrap_constants(part.batch)
    # Padded as in training, so that a record's loss does not depend on the batch's size.
    whole = pad(batch, size, padded_size(size, _MULTIPLE))
    with restored({}, part.objective.modules):
        return part.objective.loss(whole)[:size].double().nan_to_num(nan=math.inf)
