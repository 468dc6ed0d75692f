"""Stochastic gradient descent, and gradient descent as its full-batch case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hushgrad.algorithms.algorithm import State
from hushgrad.algorithms.output import Output, last, stopped
from hushgrad.run.query import ClippedSum, Summand
from hushgrad.run.step import StepContext
from hushgrad.types import Params


@dataclass(frozen=True)
class Sgd:
    """DP-SGD: the noisy mean of clipped gradients, by any clipping rule and any torch optimizer.

    With `FullBatch()` it is DP-GD.

    Guarantees: one record moves a step's sum by at most the clipping rule's bound. Each step is one
    release.

    Args:
        output: which iterate the run returns.
        project: moves the parameters into a set after each step, such as `Ball(1.0)`. It reads
            released values alone, and costs nothing.

    Example:
        >>> from hushgrad import plan
        >>> from hushgrad.algorithms import Ball, average
        >>> dp_sgd = Sgd(output=average(), project=Ball(10.0))
        >>> p = plan(
        ...     records=1000,
        ...     batch=100,
        ...     epochs=1,
        ...     delta=1e-5,
        ...     noise_multiplier=1.0,
        ...     algorithm=dp_sgd,
        ... )
        >>> p.steps
        10

    Reference: Abadi et al. 2016, Deep Learning with Differential Privacy, Algorithm 1.
    """

    output: Output = last
    project: Callable[[Params], None] | None = None

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        """Return the noisy mean of the clipped gradients; there is no state."""
        gradient = ClippedSum(lambda here: [Summand(here, context.clip)])
        return context.mean(context.release(gradient)), state

    def update(self, params: Params, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step, then project."""
        optimizer.step()
        # After the step: the next gradient is taken inside the set.
        if self.project is not None:
            self.project(params)


def rrpsgd() -> Sgd:
    """Return RRPSGD: DP-SGD that stops after a random number of steps.

    Guarantees: δ(ε) is the mean over the numbers that could be drawn, under the conditions of
    `stopped`; accounting for the expected number would understate it.

    The original takes one record at a time, up to n² steps, and weights them by their rates. Here
    batches are the plan's, and all numbers are equally likely, which is its rule for a constant
    rate.

    Returns:
        The algorithm, for `plan(algorithm=...)`.

    Example:
        >>> rrpsgd().output
        stopped

    Reference: Zhang et al. 2017, Efficient Private ERM for Smooth Objectives, Algorithm 2.
    """
    return Sgd(output=stopped())
