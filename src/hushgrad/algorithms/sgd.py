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
    """DP-SGD: the mean of clipped gradients, by any clipping rule and any torch optimizer.

    With `FullBatch()` it is DP-GD. `project` moves the parameters back into a set after each step,
    which reads released values alone. One record's bound in the sum is that of the clipping rule;
    each step is one event.
    """

    output: Output = last
    project: Callable[[Params], None] | None = None

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        """The noisy mean of the clipped gradients; nothing to remember."""
        gradient = ClippedSum(lambda here: [Summand(here, context.clip)])
        return context.mean(context.release(gradient)), state

    def update(self, params: Params, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step, and the projection."""
        optimizer.step()
        if self.project is not None:
            self.project(params)


def rrpsgd() -> Sgd:
    """RRPSGD: DP-SGD that stops after a number of rounds drawn at random.

    δ(ε) is the mean over the numbers that could be drawn, under the conditions of `stopped`; the
    expected number of rounds would under-state it. The original takes one record at a time, up to
    n² rounds and rounds weighted by their rates; here batches are the plan's, and rounds are as
    likely as each other, which is its rule for a constant rate.

    Reference: Zhang et al. 2017, Efficient Private ERM for Smooth Objectives, Algorithm 2.
    """
    return Sgd(output=stopped())
