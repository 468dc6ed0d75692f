"""Output rules: which iterate a run returns, of all those that it went through.

With t the number of steps taken, θ_t is the iterate after them and θ_0 the initial one.
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
"""Maps a number of steps to their event."""

FARTHEST = 2.0**36
"""Scores are cut off at this multiple of what one record moves. Beyond it float64 cannot resolve
one record, and rounding would move a score by more. Only a public penalty can be that large."""

Kept = dict[str, Any]
"""What an output rule keeps from step to step."""


@dataclass(frozen=True)
class Output:
    """A rule that chooses which iterate a run returns; `last`, `average`, … make the usual ones.

    Args:
        name: how plans and reports name it.
        statement: the words by which a guarantee names it.
        event: maps the events of runs, by their number of steps, and the number of steps to the
            event of a whole run, including the choice.
        begin: returns what the rule keeps before the first step.
        length: maps what is kept and the planned steps to the number of steps to take.
        before: updates what is kept at an iterate where a gradient was estimated.
        after: updates what is kept at the iterate after a number of steps.
        result: returns the chosen iterate; None for the current parameters.
        choice: what a step may release besides its own sums, for the rule to choose by. `event`
            must account for it.
        silent: whether nothing else may be released: no metrics, no checkpoint, no folder.
        direct: whether the gradient must be the mean of the step's own sum.
        exhaustive: whether every step must see every record and clip by the same rule.

    Example:
        >>> average(skipped=10).statement
        'the mean of the iterates after step 10'
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


last = Output("last", "the last iterate")
"""Returns the last iterate."""


def average(skipped: int = 0) -> Output:
    """Return the mean of the iterates θ_1, …, θ_T, without the first `skipped`.

    Guarantees: it is computed from released iterates, and costs no privacy. It is taken in float64.

    Args:
        skipped: how many of the first iterates to leave out.

    Returns:
        The output rule, for `Sgd(output=...)`.

    Raises:
        ValueError: if `skipped` is negative; when the run starts, if no iterate is left.

    Example:
        >>> average()
        average(0)

    Reference: Polyak and Juditsky 1992, Acceleration of Stochastic Approximation by Averaging.
    """
    if skipped < 0:
        raise ValueError(f"expected skipped >= 0, got {skipped}; 0 leaves none out")

    def begin(steps: int, rng: Rng) -> Kept:
        if skipped >= steps:
            raise ValueError(
                f"expected some of {steps} iterates in the average, got all skipped; skip fewer"
            )
        return {"count": 0, "point": {}}

    def after(kept: Kept, params: Params, taken: int) -> Kept:
        if taken <= skipped:
            return kept
        count, mean = kept["count"] + 1, kept["point"]
        now = {name: p.detach().to(torch.float64, copy=True) for name, p in params.items()}
        # A running mean, so that no other iterate is kept.
        moved = {n: mean[n] + (x - mean[n]) / count if mean else x for n, x in now.items()}
        return {"count": count, "point": moved}

    since = f" after step {skipped}" if skipped else ""
    statement = f"the mean of the iterates{since}"
    return Output(f"average({skipped})", statement, begin=begin, after=after)


def uniform() -> Output:
    """Return one of the iterates θ_1, …, θ_T, each equally likely; the whole run is accounted for.

    Which one is drawn before the first step. θ_0, which the papers include, is left out, because no
    record has influenced it. A run that ends before the drawn step returns its last iterate.

    Returns:
        The output rule, for `Sgd(output=...)`.

    Example:
        >>> uniform().statement
        'an iterate drawn at random, all steps accounted for'
    """

    def after(kept: Kept, params: Params, taken: int) -> Kept:
        # Only the drawn iterate is copied: others are not needed.
        return kept | {"point": copy_values(params)} if taken == kept["drawn"] else kept

    return Output(
        "uniform",
        "an iterate drawn at random, all steps accounted for",
        # Drawn before the first step, so that no release can influence it.
        begin=lambda steps, rng: {"drawn": draw_stop(steps, rng), "point": {}},
        after=after,
    )


def stopped() -> Output:
    """Return the iterate at which the run stops, after a number of steps drawn from 1 to T.

    Guarantees: δ(ε) is the mean over the T runs that could happen, of which only one does. This
    holds only if nothing but the number and the last iterate is released: metrics, a folder and
    checkpoints are refused, and the model inside the loop is private.

    The number is drawn before the first step, and is public. A run that was created is spent, and
    its budget charged, whether it is carried out or not: drawing until a number suits would be
    another mechanism.

    Returns:
        The output rule, for `Sgd(output=...)`.

    Example:
        >>> stopped().silent
        True

    Reference: DP-SRM and RRPSGD return such an iterate; `MixedDpEvent` contains the argument.
    """
    return Output(
        "stopped",
        "the iterate where the run stopped, after a number of steps drawn at random: holds only if "
        "no other iterate, and nothing else of the run, is shown to anyone",
        event=uniformly_stopped,
        begin=lambda steps, rng: {"drawn": draw_stop(steps, rng)},
        length=lambda kept, steps: int(kept["drawn"]),
        silent=True,
    )


def smallest() -> Output:
    """Return the iterate θ_0, …, θ_(T−1) with the smallest released |ĝ|² − pσ², at no further cost.

    ĝ is the estimate of the gradient at the iterate, penalty included, p the number of its entries,
    and σ² the variance of the noise in each. The mean of |ĝ|² − pσ² is |∇|².

    Guarantees: the choice reads released values alone, and costs no privacy.

    Returns:
        The output rule, for `Sgd(output=...)`.

    Example:
        >>> smallest().direct
        True
    """

    def before(kept: Kept, context: StepContext) -> Kept:
        found = {name: p.grad for name, p in context.params.items() if p.grad is not None}
        # The mean of |ĝ|² is |∇|² plus the noise's total variance.
        deviation = context.noise.noise_multiplier * context.releases[0].l2 / context.divisor
        entries = sum(p.numel() for p in context.params.values())
        return _less(kept, norm(found) ** 2 - entries * deviation**2, context.params)

    return Output(
        "smallest",
        "the iterate with the smallest released gradient",
        begin=lambda steps, rng: {"score": math.inf, "point": {}},
        before=before,
        direct=True,
    )


def noisy_min(epsilon: float) -> Output:
    """Return the iterate with the smallest gradient, chosen at a cost of `epsilon` (ε').

    The choice is among θ_0, …, θ_(T−1). Laplace noise is added to the norm of each mean of clipped
    gradients, penalty included, and only the index of the least is released. A norm moves by at
    most Δ, the bound on one record over the public divisor (twice that if a record is replaced).

    Guarantees: with the noise of `choosing` the choice is ε'-DP, a pure step, whatever T is. The
    norms and the minimum so far are private, so there are no checkpoints.

    Args:
        epsilon: ε', what the choice costs besides the steps.

    Returns:
        The output rule, for `Sgd(output=...)`; it needs full batches.

    Raises:
        ValueError: if `epsilon` is too small or not finite.

    Example:
        >>> noisy_min(0.1).statement
        'the iterate with the smallest gradient, chosen by a noisy minimum for ε = 0.1'

    Reference: clipped DP-GD, Theorem 4.2, whose Lap(4L/n) is 1-DP and not ε-DP.
    """

    def before(kept: Kept, context: StepContext) -> Kept:
        # A private score: it is compared in memory, and only the winner is returned.
        score = context.release(MeanNorm(context))
        return _less(kept, float(score.values["norm"]), context.params)

    return Output(
        f"noisy_min({epsilon})",
        f"the iterate with the smallest gradient, chosen by a noisy minimum for ε = {epsilon:g}",
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
        """Return the norm, and how far one record moves it: the bound on the mean."""
        context, total = self.context, self.context.permit.last_sum
        assert total is not None, "the step asks for its own sum first"
        mean = {n: total.sum[n].double() / context.divisor for n in context.params}
        # A penalty reads no record, so it does not move the bound.
        mean |= {n: mean[n] + extra.double() for n, extra in context.penalty.items()}
        most = total.sensitivity(context.relation) / context.divisor
        size = next(iter(mean.values())).new_tensor([min(norm(mean), FARTHEST * most)])
        return Bounded({"norm": size}, most, most)

    def event(self, noise_multiplier: float) -> DpEvent:
        """A pure step, whatever the number of scores: only the index of the least is released."""
        return chosen(noise_multiplier)


def choosing(epsilon: float) -> Noise:
    """Return noise on scores that makes the index of the least of them ε-DP, however many there
    are.

    If a score moves by at most Δ, its `l1`, two scores move by 2Δ relative to each other, and on
    the grid of their release by one grid step g more. With a scale b of 2Δ/(ε − 2⁻¹⁴), of which g
    is at most 2⁻¹⁴, (2Δ + g)/b is at most ε.
    """
    share = 2.0**-GRID_BITS
    if not (math.isfinite(epsilon) and epsilon >= 4 * share):
        raise ValueError(
            f"expected epsilon > {4 * share:.2g} and finite for a choice, got {epsilon}; 0.1 is "
            "usual"
        )
    # Twice the bound: of two scores one may rise while the other falls.
    return laplace(2 / (epsilon - share))


def chosen(noise_multiplier: float) -> PureDpEvent:
    """Return what a choice by Laplace noise of this multiplier costs: the ε of `choosing`."""
    return PureDpEvent(2 / noise_multiplier + 2.0**-GRID_BITS)


def _less(kept: Kept, score: float, params: Params) -> Kept:
    return {"score": score, "point": copy_values(params)} if score < kept["score"] else kept


def draw_stop(steps: int, rng: Rng) -> int:
    """Return a number from 1 to `steps`, each equally likely up to 2⁻⁵²."""
    return 1 + int(rng.derive("output").uniforms(1)[0] * steps)
