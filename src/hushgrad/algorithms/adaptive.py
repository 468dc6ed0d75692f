"""DP-AGD: gradient descent that measures more finely once coarse gradients lead nowhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from dp_accounting import DpEvent, NonPrivateDpEvent
from dp_accounting.dp_event import NoOpDpEvent, ZCDpEvent
from torch import Tensor

from hushgrad.algorithms.algorithm import (
    Conditions,
    State,
    StepPlan,
    check_output,
    refuse_direct,
    require_full,
)
from hushgrad.algorithms.output import FARTHEST, Output, choosing, last
from hushgrad.batches.records import MULTIPLE, count, pad, padded_size
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.gradients.constants import unwrap_constants
from hushgrad.gradients.guards import restored
from hushgrad.iterates import Values, copy_values, exchange_values, norm
from hushgrad.noise import gaussian, release
from hushgrad.run.step import Part, StepContext, Summand, gradient_of
from hushgrad.types import Bounded, Params, Refused, Relation

_MULTIPLE = 4 * MULTIPLE  # the most that any model is padded to, so that a record keeps its bits
_EPSILON_OF_ROUNDING = 1e-9  # of ρ: what is left is never more than there is


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

    def __post_init__(self) -> None:
        for name in ("largest_loss", "longest_step", "gamma"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"expected {name} > 0 and finite, got {value}")
        if self.splits < 2 or self.choices < 2:  # one split would be a hair above the budget
            raise ValueError(
                f"expected splits >= 2 and choices >= 2, got {self.splits} and {self.choices}; 60 "
                "and 20 are usual"
            )

    def stage(self, step: int, conditions: Conditions) -> StepPlan:
        """Every step sees every record."""
        return StepPlan(conditions.sampling)

    def event(self, noise_multiplier: float, *, steps: int, conditions: Conditions) -> DpEvent:
        """The whole budget, however many steps it lasts for."""
        if noise_multiplier == 0:
            return NonPrivateDpEvent()
        return ZCDpEvent(budget(noise_multiplier, conditions.relation)) if steps else NoOpDpEvent()

    def check(self, conditions: Conditions) -> None:
        """Refuse sampled batches, which zCDP does not gain from."""
        require_full(conditions, "DP-AGD")
        refuse_direct(self.output)
        check_output(self.output, conditions)

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        """Measure, choose, and measure again until a step is chosen or nothing is left."""
        rho = budget(context.noise.noise_multiplier, context.relation)
        if not state:
            share = rho / (2 * self.splits)
            state = {"left": rho * (1 - _EPSILON_OF_ROUNDING), "gradient": share, "chosen": []}
            state |= {"longest": self.longest_step, "over": False}
        choice = rho / (2 * self.splits)
        left, cost, known = state["left"], state["gradient"], 0.0
        penalty, context.regulariser = context.regulariser, None  # steps are chosen with it
        total: dict[str, Tensor] = {}
        still = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in context.params.items()}
        if left < cost + choice:
            return still, state | {"over": True}
        bounded = context.work.sum(lambda part: [Summand(part.here, context.clip)])
        decay = gradient_of(penalty, context.params) if penalty else {}
        while left >= cost + choice:
            left -= cost + choice
            fresh = _measured(bounded, cost, context)
            total = {n: _mean(total.get(n), known, x, cost) for n, x in fresh.items()}
            known += cost
            mean = {n: x / context.divisor + decay.get(n, 0.0) for n, x in total.items()}
            size = norm(mean) or 1.0
            lengths = [state["longest"] * k / (self.choices - 1) for k in range(self.choices)]
            ends = [_moved(context.params, mean, length / size) for length in lengths]
            scores = self._objectives(context, ends, penalty)
            length = lengths[self._least(scores, choice, context)]
            if length:
                moved = {n: x * (length / size) for n, x in mean.items()}
                return moved, self._later(state, left, known, length)
            cost = self.gamma * known
        return still, state | {"left": left, "gradient": known, "over": True}

    def update(self, params: Params, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step; at rate 1 the one that was chosen."""
        optimizer.step()

    def _later(self, state: State, left: float, known: float, length: float) -> State:
        chosen = [*state["chosen"], length]
        longest = state["longest"]
        if len(chosen) == _EVERY:
            chosen, longest = [], _GROWTH * max(chosen)
        later = {"left": left, "gradient": known, "chosen": chosen, "longest": longest}
        return state | later

    def _objectives(
        self, context: StepContext, ends: Sequence[Values], penalty: Callable[[], Tensor] | None
    ) -> Tensor:
        """The objective's sum over records at each end, of clamped losses; private."""
        found = torch.zeros(len(ends), dtype=torch.float64)
        for k, end in enumerate(ends):
            # The same draws at every end, and no two records with the same.
            with torch.no_grad(), torch.random.fork_rng(), exchange_values(context.params, end):
                for part in context.work.parts():
                    found[k] += _losses(part).clamp(0, self.largest_loss).sum().cpu()
                if penalty is not None:
                    found[k] += context.divisor * float(penalty())
        farthest = FARTHEST * self.largest_loss
        return found.nan_to_num(nan=farthest).clamp(-farthest, farthest)

    def _least(self, scores: Tensor, rho: float, context: StepContext) -> int:
        # Each score moves by at most `most`, also where a record is replaced: not a bound on all.
        most = self.largest_loss * (1 + SUM_SLACK)
        noised = release(
            Bounded({"scores": scores}, most, most),
            choosing(math.sqrt(2 * rho)),
            rng=context.rng.derive("choice", len(context.releases)),
            step=context.step,
        )
        context.releases.append(noised)  # so that another choice is not taken for a replay
        return int(noised.values["scores"].argmin())


_EVERY, _GROWTH = 10, 1.1  # the original's τ and 1 + η


def budget(noise_multiplier: float, relation: Relation) -> float:
    """ρ of one Gaussian release of noise ÷ bound on one record: (Δ/σ)²/2."""
    if noise_multiplier <= 0:
        raise Refused("expected noise with DP-AGD, whose steps it pays for, got none; add noise")
    double = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    return (double / noise_multiplier) ** 2 / 2


def _measured(bounded: Bounded, rho: float, context: StepContext) -> dict[str, Tensor]:
    """Release the sum at a cost of ρ; each time with noise of its own."""
    double = bounded.sensitivity(context.relation) / bounded.l2
    noise = gaussian(double / math.sqrt(2 * rho))
    rng = context.rng.derive("measured", len(context.releases))
    context.releases.append(release(bounded, noise, rng=rng, step=context.step))
    return context.releases[-1].values


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
    with restored({}, part.modules):
        return part.loss(whole)[:size].double().nan_to_num(nan=math.inf)
