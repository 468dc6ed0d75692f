"""Recursive estimates of the gradient, from gradients of one batch at two iterates.

The new estimate starts from the released one, and only what a batch says about the change since the
previous iterate gets noise. A batch that is used at both iterates is one batch: its sum is released
once, and is one event. Privacy costs do not add up in the recursion, which uses released values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hushgrad.algorithms.algorithm import Conditions, State, StepPlan, refuse_direct, resized
from hushgrad.algorithms.output import Output, last
from hushgrad.clipping.rules import Clip, abadi
from hushgrad.gradients import Gradients, difference
from hushgrad.iterates import Values, copy_values, distance, norm
from hushgrad.run.query import ClippedSum, Summand
from hushgrad.run.step import StepContext
from hushgrad.types import Params

_SMALLEST_STEP = 2.0**-60  # a clipping norm is above 0, also where two iterates are equal


@dataclass(frozen=True)
class PerDistance:
    """Clip a difference of gradients at `smoothness` (L) times the distance of its two iterates.

    Guarantees: the iterates are released, so the bound is public. It is never more than twice that
    of the plan's rule. If every record's gradient is L-Lipschitz, nothing is clipped; if not, the
    bound holds all the same.

    Args:
        smoothness: L, the Lipschitz constant of a record's gradient.

    Raises:
        ValueError: if `smoothness` is not positive and finite.

    Example:
        >>> PerDistance(2.0).at(0.5, most=10.0)
        abadi(clip_norm=1.0)

    Reference: Arora et al. 2022, Private SpiderBoost, whose noise is scaled by this distance.
    """

    smoothness: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.smoothness) and self.smoothness > 0):
            raise ValueError(f"expected smoothness > 0 and finite, got {self.smoothness}; pass L")

    def at(self, apart: float, *, most: float) -> Clip:
        """Return the rule for two iterates at this distance, with a bound of at most `most`."""
        # At most twice the plan's bound, as of a difference of two clipped gradients.
        return abadi(min(max(self.smoothness * apart, _SMALLEST_STEP), most))


@dataclass(frozen=True)
class Srm:
    """DP-SRM: stochastic recursive momentum.

        v_t = (1 − γ) v_(t−1) + (1/b) Σ [γ clip(∇f(θ_t)) + (1 − γ) clip'(∇f(θ_t) − ∇f(θ_(t−1)))]

    with noise on the sum. v_0 is the noisy mean of clipped gradients of a batch of `first_batch`
    (b0). The optimizer is given v_t. clip is the plan's rule, with bound C1, and clip' is
    `difference_clip`, with bound C2.

    Guarantees: one record moves a sum by at most γC1 + (1 − γ)C2, or by the bound of
    `combined_clip`, and twice that where a record is replaced. Events: one of the first batch, and
    one for each of the T − 1 steps after it.

    Args:
        gamma: γ, the weight of the fresh gradient; 1 is DP-SGD.
        difference_clip: clip', a rule or `PerDistance`; None with `combined_clip`.
        combined_clip: clips the two parts as one vector instead.
        first_batch: b0, the expected size of the first batch; that of the others by default.
        first_noise: the first batch's noise multiplier relative to the others', b0/b in the paper.
        step_norm: shortens v_t, penalty included, to this norm. With SGD at rate 1/(2 n0 L) and a
            step_norm of 2ζ the step is min(ζ/(n0 L |v|), 1/(2 n0 L))·v, as in the paper.
        output: which iterate the run returns.

    Raises:
        ValueError: if a number is out of range, or not exactly one of the two rules is given.

    Example:
        >>> srm = Srm(0.1, abadi(0.1), first_batch=400)
        >>> srm.gamma, srm.difference_clip
        (0.1, abadi(clip_norm=0.1))

    Reference: Wang et al., DP-SRM, Algorithm 1 and section 5; Cutkosky and Orabona 2019, STORM,
    is its limit without noise and clipping.
    """

    gamma: float = 0.01
    difference_clip: Clip | PerDistance | None = field(default_factory=lambda: abadi(0.01))
    combined_clip: Clip | None = None
    first_batch: int | None = None
    first_noise: float = 1.0
    step_norm: float | None = None
    output: Output = last
    one_bound: ClassVar[bool] = False
    repeats: ClassVar[tuple[int, int]] = (1, 1)

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ValueError(f"expected 0 < gamma <= 1, got {self.gamma}; 1 is DP-SGD")
        if (self.difference_clip is None) == (self.combined_clip is None):
            raise ValueError(
                "expected either difference_clip or combined_clip, got "
                f"{'neither' if self.combined_clip is None else 'both'}; with combined_clip pass "
                "difference_clip=None"
            )
        for name in ("first_noise", "step_norm"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"expected {name} > 0 and finite, got {value}; leave it out")

    def stage(self, step: int, conditions: Conditions) -> StepPlan:
        """The first batch may be larger than the others."""
        if step:
            return StepPlan(conditions.sampling)
        # A larger first batch pays off, since all later estimates start from it.
        return StepPlan(resized(conditions, self.first_batch), self.first_noise)

    def check(self, conditions: Conditions) -> None:
        """Refuse a first batch that cannot be drawn, and what the output rule does not cover."""
        resized(conditions, self.first_batch)
        refuse_direct(self.output)

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        """Return the recursion's next estimate; the state is that estimate and its iterate."""
        here = copy_values(context.params)
        if not state:
            first = ClippedSum(lambda here: [Summand(here, context.clip)])
            estimate = context.mean(context.release(first))
        else:
            fresh = context.mean(context.release(self._query(context, state["point"])))
            old = state["estimate"]
            # In float64, since errors add up through the recursion.
            estimate = {n: (1 - self.gamma) * old[n].double() + x for n, x in fresh.items()}
        return copied(estimate), {"estimate": estimate, "point": here}

    def update(self, params: Params, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step, on an estimate shortened to `step_norm`."""
        if self.step_norm is not None:
            shorten(params, self.step_norm)
        optimizer.step()

    def _query(self, context: StepContext, before: Values) -> ClippedSum:
        gamma, combined = self.gamma, self.combined_clip
        if combined is not None:
            # One vector for each record: linear in factors, so nothing is written out.
            def as_one(new: Gradients, old: Gradients) -> list[Summand]:
                both = gamma * new + (1 - gamma) * difference(new, old)
                return [Summand(both, combined, losses=new.losses)]

            return ClippedSum(as_one, iterates=(before,))
        assert self.difference_clip is not None
        clip = difference_rule(self.difference_clip, context, before)

        def by_two_rules(new: Gradients, old: Gradients) -> list[Summand]:
            return [
                Summand(new, context.clip, gamma),
                Summand(difference(new, old), clip, 1 - gamma),
            ]

        return ClippedSum(by_two_rules, iterates=(before,))


def storm(gamma: float, *, first_batch: int | None = None, output: Output = last) -> Srm:
    """Return STORM, for runs that are not private: no noise, and clipping that has no effect.

    Guarantees: none. Plan it with `noise_multiplier=0` and `clip=unclipped()`.

    Args:
        gamma: the weight of the fresh gradient.
        first_batch: the expected size of the first batch; that of the others by default.
        output: which iterate the run returns.

    Returns:
        The algorithm, for `plan(algorithm=...)`.

    Example:
        >>> storm(0.1).difference_clip.bound(1) == unclipped().bound(1)
        True

    Reference: Cutkosky and Orabona 2019, Momentum-Based Variance Reduction in Non-Convex SGD; its
    adaptive rates are left to the optimizer's schedule.
    """
    return Srm(gamma, unclipped(), first_batch=first_batch, output=output)


def unclipped() -> Clip:
    """Return Abadi's rule at a norm that no gradient reaches, for runs that are not private.

    Returns:
        The clipping rule.

    Example:
        >>> unclipped().bound(1) == 2.0**60
        True
    """
    return abadi(2.0**60)


@dataclass(frozen=True)
class SpiderBoost:
    """Private SpiderBoost: a large batch every `period` steps, and differences in between.

        v_t = noisy mean of clip(∇f(θ_t)) over a batch of `anchor_batch`, if period divides t
        v_t = v_(t−1) + noisy mean of clip'(∇f(θ_t) − ∇f(θ_(t−1))), otherwise

    clip is the plan's rule, clip' is `difference_clip`.

    Guarantees: one record moves a sum by at most the bound of the step's rule, and twice that where
    a record is replaced. Events: ⌈T/period⌉ with the anchors' sampling, the others with the plan's.

    Args:
        period: how often there is an anchor.
        difference_clip: clip', a rule or `PerDistance(L)`, as in the original.
        anchor_batch: the expected size of an anchor's batch; every record by default.
        anchor_noise: the anchors' noise multiplier relative to the plan's. The original states
            rates for the two noises without constants, so 1 is only a choice.
        step_norm: shortens v_t, penalty included, to this norm.
        output: which iterate the run returns.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> SpiderBoost(10, PerDistance(1.0), anchor_batch=1000).period
        10

    Reference: Arora et al. 2022, Faster Rates of Convergence to Stationary Points in Differentially
    Private Optimization, Algorithm 1.
    """

    period: int
    difference_clip: Clip | PerDistance
    anchor_batch: int | None = None
    anchor_noise: float = 1.0
    step_norm: float | None = None
    output: Output = last
    one_bound: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"expected period >= 1, got {self.period}; 1 has anchors alone")
        for name in ("anchor_noise", "step_norm"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"expected {name} > 0 and finite, got {value}; leave it out")

    @property
    def repeats(self) -> tuple[int, int]:
        """The anchors come back every `period` steps."""
        return 0, self.period

    def stage(self, step: int, conditions: Conditions) -> StepPlan:
        """Anchors have their own batch."""
        if step % self.period:
            return StepPlan(conditions.sampling)
        return StepPlan(
            resized(conditions, self.anchor_batch or conditions.records), self.anchor_noise
        )

    def check(self, conditions: Conditions) -> None:
        """Refuse anchors that cannot be drawn, and what the output rule does not cover."""
        resized(conditions, self.anchor_batch or conditions.records)
        refuse_direct(self.output)

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        """Return the anchor's estimate, or the recursion from it."""
        here = copy_values(context.params)
        # The first step has nothing to recur from.
        if context.step % self.period == 0 or not state:
            anchor = ClippedSum(lambda here: [Summand(here, context.clip)])
            estimate = context.mean(context.release(anchor))
        else:
            clip = difference_rule(self.difference_clip, context, state["point"])

            def change(new: Gradients, old: Gradients) -> list[Summand]:
                return [Summand(difference(new, old), clip, losses=new.losses)]

            query = ClippedSum(change, iterates=(state["point"],))
            fresh, old = context.mean(context.release(query)), state["estimate"]
            estimate = {name: old[name].double() + x for name, x in fresh.items()}
        return copied(estimate), {"estimate": estimate, "point": here}

    def update(self, params: Params, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step, on an estimate shortened to `step_norm`."""
        if self.step_norm is not None:
            shorten(params, self.step_norm)
        optimizer.step()


def difference_rule(rule: Clip | PerDistance, context: StepContext, before: Values) -> Clip:
    """Return the rule for differences between the current iterate and the one before."""
    if isinstance(rule, Clip):
        return rule
    groups = len(context.batch_pass.partition.names)
    return rule.at(
        distance(copy_values(context.params), before), most=2 * context.clip.bound(groups)
    )


def copied(estimate: Values) -> dict[str, Tensor]:
    """Return a copy of the estimate for the optimizer, which may write to it."""
    return {name: x.clone() for name, x in estimate.items()}


def shorten(params: Params, longest: float) -> None:
    """Scale the parameters' gradients so that their norm is at most `longest`."""
    found = {name: p.grad for name, p in params.items() if p.grad is not None}
    size = norm(found)
    if size > longest:
        for gradient in found.values():
            gradient.mul_(longest / size)
