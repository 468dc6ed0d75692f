"""Output rules: which iterate a run returns, of all those that it went through.

With t the number of steps taken, θ_t is the point after them and θ_0 the first one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from dp_accounting import ComposedDpEvent, DpEvent
from torch import Tensor

from hushgrad.accounting import PureDpEvent, uniformly_stopped
from hushgrad.iterates import copy_values, norm
from hushgrad.noise import Noise, laplace
from hushgrad.noise.releasing import GRID_BITS
from hushgrad.rng import Rng
from hushgrad.run.permit import Allowance
from hushgrad.run.query import BatchPass, answerable
from hushgrad.run.step import StepContext
from hushgrad.types import Bounded, Params

Rounds = Callable[[int], DpEvent]
"""A number of steps, to the event of so many."""

FARTHEST = 2.0**36
"""Scores are cut at so many times what one record moves: beyond, float64 would lose the record, and
rounding would move a score by more. Only a penalty, which is public, can carry them there."""

Kept = dict[str, Any]
"""What an output rule keeps from step to step."""


@dataclass(frozen=True)
class Output:
    """A rule that chooses the iterate which a run returns.

    `event` is that of a whole run, the choice included, from the event of so many steps. `begin`
    is what the rule knows before the first step, `length` how many of the steps are taken, `before`
    notes a point at which a gradient was estimated, `after` the point after so many steps, and
    `result` is the point that is given out, or None for the one where the parameters are.

    `choice` is what a step may release besides its own sums, for the rule to choose by; `event`
    pays for it. `silent` says that nothing else may leave: no metrics, no checkpoint, no folder.
    `direct` says that the gradient must be the mean of the step's own sum, `exhaustive` that every
    step must see every record and clip by the same rule.
    """

    name: str
    statement: str
    event: Callable[[Rounds, int], DpEvent] = lambda rounds, steps: rounds(steps)
    begin: Callable[[int, Rng], Kept] = lambda steps, rng: {}
    length: Callable[[Kept, int], int] = lambda kept, steps: steps
    before: Callable[[Kept, StepContext], Kept] = lambda kept, context: kept
    after: Callable[[Kept, Params, int], Kept] = lambda kept, params, taken: kept
    result: Callable[[Kept], Mapping[str, Tensor] | None] = lambda kept: kept.get("point") or None
    choice: Allowance | None = None
    silent: bool = False
    direct: bool = False
    exhaustive: bool = False

    def __repr__(self) -> str:
        return self.name


last = Output("last", "the last point")
"""The last point."""


def average(skipped: int = 0) -> Output:
    """The mean of the points θ_1, …, θ_T, of which the first `skipped` are left out.

    It is made of released points, and costs nothing. It is taken in float64.
    """
    if skipped < 0:
        raise ValueError(f"expected skipped >= 0, got {skipped}; 0 leaves none out")

    def begin(steps: int, rng: Rng) -> Kept:
        if skipped >= steps:
            raise ValueError(
                f"expected some of {steps} points in the average, got all skipped; skip fewer"
            )
        return {"count": 0, "point": {}}

    def after(kept: Kept, params: Params, taken: int) -> Kept:
        if taken <= skipped:
            return kept
        count, mean = kept["count"] + 1, kept["point"]
        now = {name: p.detach().to(torch.float64, copy=True) for name, p in params.items()}
        moved = {n: mean[n] + (x - mean[n]) / count if mean else x for n, x in now.items()}
        return {"count": count, "point": moved}

    since = f" after step {skipped}" if skipped else ""
    return Output(f"average({skipped})", f"the mean of the points{since}", begin=begin, after=after)


def uniform() -> Output:
    """One of the points θ_1, …, θ_T, each as likely; the whole run is accounted for.

    Which one is drawn before the first step. θ_0, among which the papers draw too, is left out: no
    record has touched it. A run that ends before its draw returns its last iterate.
    """

    def after(kept: Kept, params: Params, taken: int) -> Kept:
        return kept | {"point": copy_values(params)} if taken == kept["drawn"] else kept

    return Output(
        "uniform",
        "a point drawn at random, all steps accounted for",
        begin=lambda steps, rng: {"drawn": draw_stop(steps, rng), "point": {}},
        after=after,
    )


def stopped() -> Output:
    """The point at which the run stops, after a number of steps drawn from 1 up to T.

    The number is drawn before the first step and is public. So a run that was made is spent, and
    its budget charged, whether it goes on or not: drawing until a number suits would be another
    mechanism. As only one of the T runs happens,
    δ(ε) is the mean of theirs. That holds only while nothing but the number and the last point
    leaves: metrics, a folder and checkpoints are refused, and the model in the loop is private.

    Reference: DP-SRM and RRPSGD return such an iterate; `MixedDpEvent` has the argument.
    """
    return Output(
        "stopped",
        "the point where the run stopped, after a number of steps drawn at random: holds only if "
        "no other point, and nothing else of the run, is shown to anyone",
        event=uniformly_stopped,
        begin=lambda steps, rng: {"drawn": draw_stop(steps, rng)},
        length=lambda kept, steps: int(kept["drawn"]),
        silent=True,
    )


def smallest() -> Output:
    """The point θ_0, …, θ_(T−1) with the smallest released |ĝ|² − pσ²: a choice that is free.

    ĝ is the estimate of the gradient there, penalty included, p the number of its entries and σ²
    the variance of the noise in each: the mean of what is compared is that of |∇|².
    """

    def before(kept: Kept, context: StepContext) -> Kept:
        found = {name: p.grad for name, p in context.params.items() if p.grad is not None}
        deviation = context.noise.noise_multiplier * context.releases[0].l2 / context.divisor
        entries = sum(p.numel() for p in context.params.values())
        return _less(kept, norm(found) ** 2 - entries * deviation**2, context.params)

    return Output(
        "smallest",
        "the point with the smallest released gradient",
        begin=lambda steps, rng: {"score": math.inf, "point": {}},
        before=before,
        direct=True,
    )


def noisy_min(epsilon: float) -> Output:
    """The point θ_0, …, θ_(T−1) with the smallest gradient, chosen for `epsilon` more (ε').

    To the norm of each mean of clipped gradients, penalty included, Laplace noise is added, and
    only the place of the least is released. A norm moves by at most Δ, the bound on one record
    over the public divisor (twice that if a record is replaced), so the noise of `choosing` makes
    the choice ε'-DP: a pure step, whatever T is. The norms and the minimum so far are private, so
    there are no checkpoints.

    Reference: clipped DP-GD, Theorem 4.2, whose Lap(4L/n) is 1-DP and not ε-DP.
    """

    def before(kept: Kept, context: StepContext) -> Kept:
        score = context.release(MeanNorm(context))
        return _less(kept, float(score.values["norm"]), context.params)

    return Output(
        f"noisy_min({epsilon})",
        f"the point with the smallest gradient, chosen by a noisy minimum for ε = {epsilon:g}",
        event=lambda rounds, steps: ComposedDpEvent([rounds(steps), PureDpEvent(epsilon)]),
        begin=lambda steps, rng: {"score": math.inf, "point": {}},
        before=before,
        choice=Allowance(MeanNorm, choosing(epsilon)),
        silent=True,
        direct=True,
        exhaustive=True,
    )


@answerable
@dataclass(frozen=True)
class MeanNorm:
    """The norm of the mean of the step's own sum, penalty included: a score to choose by."""

    context: StepContext
    of_each_record: ClassVar[bool] = False

    def bounded(self, work: BatchPass | None) -> Bounded:
        """The norm, and how far one record moves it: the bound on the mean."""
        context, total = self.context, self.context.permit.last_sum
        assert total is not None, "the step asks for its own sum first"
        mean = {n: total.sum[n].double() / context.divisor for n in context.params}
        mean |= {n: mean[n] + extra.double() for n, extra in context.penalty.items()}
        most = total.sensitivity(context.relation) / context.divisor
        size = next(iter(mean.values())).new_tensor([min(norm(mean), FARTHEST * most)])
        return Bounded({"norm": size}, most, most)

    def event(self, noise_multiplier: float) -> DpEvent:
        """A pure step, whatever the number of scores: only the place of the least is shown."""
        return chosen(noise_multiplier)


def choosing(epsilon: float) -> Noise:
    """Noise on scores that makes the place of the least of them ε-DP, however many there are.

    Where a score moves by at most Δ, its `l1`, two of them come 2Δ closer, and on the grid of their
    release one step g more. With a scale b of 2Δ/(ε − 2⁻¹⁴), of which g is 2⁻¹⁴ at most,
    (2Δ + g)/b is at most ε.
    """
    share = 2.0**-GRID_BITS
    if not (math.isfinite(epsilon) and epsilon >= 4 * share):
        raise ValueError(
            f"expected epsilon > {4 * share:.2g} and finite for a choice, got {epsilon}; 0.1 is "
            "usual"
        )
    return laplace(2 / (epsilon - share))


def chosen(noise_multiplier: float) -> PureDpEvent:
    """What a choice by Laplace noise of this multiplier costs: ε of `choosing`."""
    return PureDpEvent(2 / noise_multiplier + 2.0**-GRID_BITS)


def _less(kept: Kept, score: float, params: Params) -> Kept:
    return {"score": score, "point": copy_values(params)} if score < kept["score"] else kept


def draw_stop(steps: int, rng: Rng) -> int:
    """A number from 1 up to `steps`, each as likely up to 2⁻⁵²."""
    return 1 + int(rng.derive("output").uniforms(1)[0] * steps)
