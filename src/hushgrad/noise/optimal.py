"""The bands of the least error: a small search over the coefficients of a Toeplitz matrix.

The error of a matrix mechanism is the mean square of what the noise leaves in the workload, such as
the running sums of SGD, times the square of its sensitivity. Neither depends on the data.

Reference: McKenna 2024, Scaling up the Banded Matrix Factorization Mechanism, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent
from scipy.optimize import minimize
from scipy.signal import lfilter

from hushgrad.noise.strategy import Column, Strategy, banded, banded_inverse


@dataclass(frozen=True)
class Workload:
    """What becomes of a step's sum in the parameters after it: SGD with a momentum of `beta`.

    It is Toeplitz: after k more steps the sum has moved them by 1 + β + … + βᵏ times the learning
    rate.

    Args:
        beta: β, the heavy-ball momentum.

    Raises:
        ValueError: if β is not at least 0 and below 1.

    Example:
        >>> Workload(0.5).column(3).tolist()
        [1.0, 1.5, 1.75]
    """

    beta: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"expected 0 <= momentum < 1, got {self.beta}; 0.9 is usual")

    def column(self, steps: int) -> Column:
        """The first column of the workload's matrix A.

        >>> Workload(0.5).column(3).tolist()
        [1.0, 1.5, 1.75]
        """
        return np.cumsum(self.beta ** np.arange(steps))

    def root(self, count: int, *, inverse: bool = False) -> Column:
        """The first coefficients of A^½ or of A^-½, which are good strategies by themselves.

        Reference: Kalinin and Lampert 2024, Banded Square Root Matrix Factorization.
        """
        power = 0.5 if inverse else -0.5  # A is the series 1 / ((1 - x)(1 - βx))
        k = np.arange(1, count)
        series = np.cumprod(np.concatenate([[1.0], (k - 1 - power) / k]))
        return np.convolve(series, series * self.beta ** np.arange(count))[:count]


prefix_sums = Workload()
"""The running sums of plain SGD."""


def momentum(beta: float) -> Workload:
    """Return the workload of SGD with heavy-ball momentum β.

    Args:
        beta: β.

    Example:
        >>> momentum(0.9)
        Workload(beta=0.9)
    """
    return Workload(beta)


def least_error(
    num_steps: int,
    *,
    bands: int,
    cycle: int = 1,
    inverse: bool = False,
    workload: Workload = prefix_sums,
) -> Strategy:
    """The strategy of the least error for a run of so many steps (T), by L-BFGS.

    Args:
        num_steps: the number of steps.
        bands: how many bands (b) C has, or C⁻¹.
        cycle: the number of steps from one turn of a record to the next.
        inverse: whether it is C⁻¹ that is banded.
        workload: what becomes of a step's noise in later steps.

    Returns:
        A strategy whose largest column has norm 1 if C is banded, and whose sensitivity over all
        turns of a record is 1 if C⁻¹ is, up to six digits, to which coefficients are rounded.

    >>> round(least_error(100, bands=100, cycle=100).error(100), 2)  # independent noise: 7.11
    2.32
    """
    count = min(bands, num_steps)
    loss = _inverse_loss if inverse else _banded_loss
    problem = _Problem(workload.column(num_steps), cycle)
    starts = (workload.root(count, inverse=inverse)[1:], np.zeros(count - 1))
    tried = [
        minimize(
            lambda rest: loss(np.concatenate([[1.0], rest]), problem),
            start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 1000, "maxcor": 30, "ftol": 1e-12, "gtol": 1e-9},
        )
        for start in starts
    ]
    values = np.concatenate([[1.0], min(tried, key=lambda found: float(found.fun)).x])
    if inverse:
        scale = banded_inverse(values).sensitivity(num_steps, cycle=cycle)
        return banded_inverse(_rounded(scale * values))
    return banded(_rounded(values / np.linalg.norm(values)))


def _rounded(values: Column) -> list[float]:
    """To six digits: a plan that is made again on another machine has the same coefficients."""
    return [float(f"{value:.6g}") for value in values]


@dataclass(frozen=True)
class _Problem:
    """The first column of the workload, and the steps between two turns of a record."""

    workload: Column
    cycle: int

    @property
    def weights(self) -> Column:
        """The share of the steps whose error an entry of A·C⁻¹'s first column is in."""
        steps = len(self.workload)
        return np.arange(steps, 0, -1) / steps


def _banded_loss(column: Column, problem: _Problem) -> tuple[float, Column]:
    """log(‖c‖²·mean square of A·C⁻¹) and its gradient in all but the first coefficient of C."""
    with np.errstate(over="ignore", invalid="ignore"):
        left = lfilter([1.0], column, problem.workload)
        error = float(problem.weights @ left**2)
        # The adjoint of the recurrence runs backwards in time.
        adjoint = lfilter([1.0], column, (2 * problem.weights * left)[::-1])[::-1]
    if not (math.isfinite(error) and np.isfinite(adjoint).all()):
        return 1e30, np.zeros(len(column) - 1)
    slopes = np.array([-adjoint[k:] @ left[: len(left) - k] for k in range(1, len(column))])
    square = float(column @ column)
    return math.log(square * error), 2 * column[1:] / square + slopes / error


def _inverse_loss(weights: Column, problem: _Problem) -> tuple[float, Column]:
    """log(‖|C|·1‖²·mean square of A·C⁻¹) and its gradient in all but the first of the weights.

    1 has ones at a record's turns from the first step on, which is where it is the longest.
    """
    steps = len(problem.workload)
    turns = (np.arange(steps) % problem.cycle == 0).astype(float)
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        column = lfilter([1.0], weights, impulse)
        moved = np.convolve(np.abs(column), turns)[:steps]
        left = np.convolve(problem.workload, weights)[:steps]
        square, error = float(moved @ moved), float(problem.weights @ left**2)
        # d|C|1 / dc, then dc / dw = −c∗c shifted, both as correlations.
        pulled = np.convolve(moved[::-1], turns)[:steps][::-1] * np.sign(column) * 2
        shifted = np.convolve(column, column)[:steps]
    if not (math.isfinite(square * error) and np.isfinite(pulled).all()):
        return 1e30, np.zeros(len(weights) - 1)
    slopes = np.array(
        [
            -(pulled[k:] @ shifted[: steps - k]) / square
            + 2 * ((problem.weights * left)[k:] @ problem.workload[: steps - k]) / error
            for k in range(1, len(weights))
        ]
    )
    return math.log(square * error), slopes


def best_cycle(
    rate: float,
    num_steps: int,
    *,
    noise_for: Callable[[Callable[[float], DpEvent]], float],
    run_event: Callable[[int, DpEvent], DpEvent],
    workload: Workload = prefix_sums,
) -> tuple[int, float]:
    """Return the number of groups whose run has the least error at equal privacy.

    More groups allow more bands, which take back more of the noise, but leave less to sampling, so
    that more noise is needed. Powers of two are tried, up to 1 / rate.

    Args:
        rate: the expected batch ÷ the number of records (q).
        num_steps: the number of steps (T).
        noise_for: maps a run's event, as a function of the noise multiplier, to the least
            multiplier at which the run keeps its (ε, δ).
        run_event: maps a cycle and a Gaussian event to the event of a run with so many groups.
        workload: what becomes of a step's noise in later steps.

    Returns:
        The cycle (b), and its root mean square error times its noise multiplier.

    Example:
        >>> from hushgrad.accounting import RDP, Target, least_noise
        >>> from hushgrad.sampling import CyclicPoisson
        >>> from hushgrad.types import Relation
        >>> target = Target(2.0, 1e-5, Relation.ADD_REMOVE, RDP)
        >>> cycle, error = best_cycle(
        ...     0.25,
        ...     4,
        ...     noise_for=lambda run: least_noise(run, target)[0],
        ...     run_event=lambda cycle, event: CyclicPoisson(0.25, cycle).run_event(
        ...         event, num_records=1000, num_steps=4
        ...     ),
        ... )
        >>> cycle  # over so few steps sampling hides more than bands take back
        1
    """
    found: dict[int, float] = {}
    cycle = 1
    while cycle * rate <= 1 and cycle <= num_steps:
        strategy = least_error(num_steps, bands=cycle, cycle=cycle, workload=workload)
        event = partial(_scaled_event, run_event, cycle, strategy.column_norm(num_steps))
        sigma = noise_for(event)
        found[cycle] = sigma * strategy.error(num_steps, workload.column(num_steps))
        cycle *= 2
    best = min(found, key=lambda c: found[c])
    return best, found[best]


def _scaled_event(
    run_event: Callable[[int, DpEvent], DpEvent], cycle: int, norm: float, sigma: float
) -> DpEvent:
    return run_event(cycle, GaussianDpEvent(sigma / norm))
