"""Default steps, batch and step size, computed from public numbers only, so nothing needs tuning.

Rows have norm at most 1, and an appended constant for the intercept. Let s be noise ÷ sensitivity
of one Gaussian release at (ε, δ), L the bound on a gradient and τ = steps × step size. For any
number of steps, a direction without curvature accumulates noise of standard deviation τ·s·L/n: more
steps need more noise each, but make smaller steps. So only τ has to be chosen, to balance

- the optimisation error, at most r²/(2τ) for a solution of norm r;
- the error due to noise, about (τ·s·L/n)²·κ/2 with κ a bound on the trace of a record's Hessian.

The sum is least at τ³ = r²n²/(2κ(sL)²). The step size is 1 ÷ the smoothness, which gives the number
of steps. The batch is the smallest at which sampling increases the noise by at most about a tenth.

Two constants were tuned, on public data only. r = 30 for logistic regression trades accuracy for
time: on simulated data it loses 0.3 % of accuracy to the best r on average, and r = 100 loses 0.1 %
in twice the steps (`python -m benchmarks.glm choose`). r and the intercept's constant were also
tested on a9a and digits at ε = 0.1 and 1, so the benchmark's accuracies on these two are not on
unseen data. The r of the other losses were estimated from the size of their scores, without tuning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hushgrad.accounting.closed_forms import gaussian_noise_multiplier
from hushgrad.sampling import FullBatch, Poisson, Scheme
from hushgrad.types import Relation

INTERCEPT = 0.3
"""The constant appended to a row of norm 1. It adds 4 % to a row's norm, and so to the noise."""

SMALL_NOISE = 2.0
"""The noise multiplier of a batch; below it, sampling costs more noise than it saves work."""

SMALLEST_BATCH, MOST_STEPS, FEWEST_STEPS = 64, 4000, 10
"""Limits that keep the time short and the accountants in their usual range."""

MOMENTUM = 0.9
"""The momentum of full-batch descent: it needs a tenth of the steps, at the same noise."""


@dataclass(frozen=True)
class Public:
    """The public numbers of a fit: n, the target (ε, δ), and the bounds of the loss.

    `slope` bounds |ℓ'|, or is the value to which it is clipped; `curvature` likewise bounds ℓ'';
    `reach` (r) is the expected norm of a solution.
    """

    records: int
    epsilon: float
    delta: float
    relation: Relation
    classes: int
    row_norm: float
    slope: float
    curvature: float
    reach: float

    @property
    def one_release(self) -> float:
        """s·L: the noise that one release of a sum would need."""
        multiplier = gaussian_noise_multiplier(self.epsilon, delta=self.delta)
        doubled = 2 if self.relation is Relation.REPLACE_ONE else 1
        return doubled * multiplier * self.slope * self.row_norm

    @property
    def trace(self) -> float:
        """κ: the trace of a record's Hessian.

        Softmax's Hessian has a trace below 1, however many classes there are.
        """
        return min(self.classes * self.curvature, max(1.0, self.curvature)) * self.row_norm**2

    @property
    def training_time(self) -> float:
        """τ: steps × step size."""
        noise = self.one_release / self.records
        return float((self.reach**2 / (2 * self.trace * noise**2)) ** (1 / 3))


@dataclass(frozen=True)
class DescentSettings:
    """Sampling, number of steps, step size and momentum of a descent."""

    sampling: Scheme
    steps: int
    rate: float
    momentum: float


def descent_settings(
    public: Public,
    *,
    full: bool,
    batch: int | None = None,
    steps: int | None = None,
    rate: float | None = None,
) -> DescentSettings:
    """Return the settings of a descent; arguments that are given are used as they are."""
    momentum = MOMENTUM if full else 0.0
    rate = rate or 1 / (public.curvature * public.row_norm**2)
    if steps is None:
        wanted = public.training_time * (1 - momentum) / rate
        steps = min(max(math.ceil(wanted), FEWEST_STEPS), MOST_STEPS)
    if full:
        return DescentSettings(FullBatch(), steps, rate, momentum)
    if batch is None:
        each = public.one_release / (public.slope * public.row_norm) * math.sqrt(steps)
        batch = max(math.ceil(public.records * SMALL_NOISE / each), SMALLEST_BATCH)
    return DescentSettings(Poisson(min(1.0, batch / public.records)), steps, rate, momentum)


def objective_strength(public: Public, *, noise: float, parameters: int) -> float:
    """Return Λ for objective perturbation, which balances Λr²/2 and σ²·parameters/(2Λ)."""
    return noise * math.sqrt(parameters) / public.reach


def output_strength(public: Public) -> float:
    """Return Λ for output perturbation: Λr²/2 + n·κ·(sL/Λ)²/2 is least at Λ³ = 2nκ(sL/r)²."""
    cost = 2 * public.records * public.trace * (public.one_release / public.reach) ** 2
    return float(cost ** (1 / 3))
