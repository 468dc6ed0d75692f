"""The matrix C: its inverse, its sensitivity by brute force, and the search for its bands."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from hypothesis import given
from hypothesis import strategies as st
from numpy import ndarray
from scipy.linalg import sqrtm, toeplitz

from hushgrad.accounting import PLD
from hushgrad.noise import (
    Strategy,
    Workload,
    banded,
    banded_inverse,
    best_cycle,
    least_error,
    momentum,
    prefix_sums,
)
from hushgrad.noise.optimal import _banded_loss, _inverse_loss, _Problem
from hushgrad.sampling import CyclicPoisson

STRATEGIES = [
    banded([1.0]),
    banded([0.8, 0.6]),
    banded([0.7, -0.4, 0.3]),
    banded_inverse([1.0, -0.5]),
    banded_inverse([0.9, 0.3, -0.2]),
    least_error(9, bands=3, cycle=3),
    least_error(9, bands=4, cycle=3, inverse=True),
]
coefficients = st.lists(st.floats(-1, 1), min_size=0, max_size=4)


def matrix(column: ndarray) -> ndarray:
    return toeplitz(column, np.zeros(len(column)))


def workload_of(steps: int, beta: float = 0.0) -> ndarray:
    """What SGD with momentum makes of a sum at each step, by running it."""
    columns = []
    for first in range(steps):
        buffer, moved, path = 0.0, 0.0, []
        for step in range(steps):
            buffer = beta * buffer + (step == first)
            moved += buffer
            path.append(moved)
        columns.append(path)
    return np.array(columns).T


@given(rest=coefficients, first=st.floats(0.5, 2), inverse=st.booleans())
def test_the_noising_column_is_that_of_the_inverse(
    rest: list[float], first: float, inverse: bool
) -> None:
    strategy = Strategy((first, *rest), inverse)
    c, c_inverse = matrix(strategy.column(7)), matrix(strategy.noising(7))
    size = np.abs(c).max() * np.abs(c_inverse).max()
    assert c @ c_inverse == pytest.approx(np.eye(7), abs=1e-12 * size)
    few = c_inverse if inverse else c
    assert np.count_nonzero(np.triu(np.ones((7, 7))) * few.T) <= 7 * len(strategy.coefficients)


def test_coefficients_that_are_none_are_refused() -> None:
    for bad in ([], [0.0, 1.0], [-1.0], [1.0, math.nan]):
        with pytest.raises(ValueError, match="finite coefficients, the first above 0"):
            banded(bad)


def by_brute_force(strategy: Strategy, steps: int, cycle: int) -> float:
    """The farthest that ±1 at a record's turns moves C·x, over all signs and all first turns."""
    c, found = matrix(strategy.column(steps)), 0.0
    for first in range(min(cycle, steps)):
        turns = np.arange(first, steps, cycle)
        for signs in itertools.product((-1.0, 0.0, 1.0), repeat=len(turns)):
            x = np.zeros(steps)
            x[turns] = signs
            found = max(found, float(np.linalg.norm(c @ x)))
    return found


@pytest.mark.parametrize("cycle", [1, 2, 3, 5])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_no_participation_moves_the_product_farther(strategy: Strategy, cycle: int) -> None:
    """Signs suffice: the largest of a convex function is at a corner of the cube."""
    steps = 7
    found, stated = by_brute_force(strategy, steps, cycle), strategy.sensitivity(steps, cycle=cycle)
    assert found <= stated * (1 + 1e-12)
    c = matrix(strategy.column(steps))[:, ::cycle]
    if (c.T @ c >= -1e-12).all() and cycle < steps:
        assert found == pytest.approx(stated, rel=1e-12)


def test_vectors_move_it_no_farther_than_stated() -> None:
    rng = np.random.default_rng(0)
    for strategy in STRATEGIES:
        c = matrix(strategy.column(8))
        x = rng.standard_normal((2000, 8, 3))
        x /= np.linalg.norm(x, axis=2, keepdims=True)
        moved = np.linalg.norm(np.einsum("st,ntd->nsd", c, x), axis=(1, 2)).max()
        assert moved <= strategy.sensitivity(8)


def test_the_sensitivity_is_the_sum_of_absolute_products() -> None:
    strategy = banded([0.7, -0.4, 0.3])
    for steps, cycle in [(1, 1), (9, 1), (9, 2), (9, 4), (3, 5)]:
        products = np.abs(matrix(strategy.column(steps)).T @ matrix(strategy.column(steps)))
        each = [products[g::cycle, g::cycle].sum() for g in range(cycle)]
        assert strategy.sensitivity(steps, cycle=cycle) == pytest.approx(math.sqrt(max(each)))


def test_the_column_norm_is_the_largest_of_all_columns() -> None:
    for strategy in STRATEGIES:
        norms = np.linalg.norm(matrix(strategy.column(9)), axis=0)
        assert strategy.column_norm(9) == pytest.approx(norms.max())


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_the_error_is_that_of_the_product(beta: float) -> None:
    workload = Workload(beta)
    a = workload_of(9, beta)
    assert matrix(workload.column(9)) == pytest.approx(a)
    for strategy in STRATEGIES:
        left = a @ np.linalg.inv(matrix(strategy.column(9)))
        expected = math.sqrt((left**2).sum() / 9)
        assert strategy.error(9, workload.column(9)) == pytest.approx(expected)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_the_root_of_a_workload_is_its_root(beta: float) -> None:
    root = sqrtm(workload_of(8, beta))
    assert matrix(Workload(beta).root(8)) == pytest.approx(root, abs=1e-6)
    inverse = matrix(Workload(beta).root(8, inverse=True))
    assert inverse @ root == pytest.approx(np.eye(8), abs=1e-6)


# --- the search ---


@pytest.mark.parametrize("loss", [_banded_loss, _inverse_loss])
@pytest.mark.parametrize("cycle", [1, 3])
def test_the_gradient_is_that_of_differences(loss, cycle: int) -> None:
    problem = _Problem(momentum(0.5).column(12), cycle)
    at = np.array([1.0, 0.4, -0.2, 0.1])
    _, slopes = loss(at, problem)
    for k in range(1, len(at)):
        up, down = at.copy(), at.copy()
        up[k] += 1e-6
        down[k] -= 1e-6
        slope = (loss(up, problem)[0] - loss(down, problem)[0]) / 2e-6
        assert slopes[k - 1] == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_two_bands_are_those_of_a_search_by_hand() -> None:
    steps = 60

    def error(ratio: float) -> float:
        strategy = banded([1.0, ratio])
        return strategy.error(steps) * strategy.column_norm(steps)

    least = min(error(ratio) for ratio in np.linspace(0, 1, 1001))
    found = least_error(steps, bands=2, cycle=2)
    assert found.column_norm(steps) == pytest.approx(1, rel=1e-5)
    assert found.error(steps) == pytest.approx(least, rel=1e-5)
    assert found.error(steps) < 0.8 * error(0.0)


@pytest.mark.parametrize("workload", [prefix_sums, momentum(0.9)], ids=str)
@pytest.mark.parametrize("inverse", [False, True])
def test_more_bands_leave_less_error(workload: Workload, inverse: bool) -> None:
    steps = 64
    errors = [
        least_error(steps, bands=b, cycle=steps, inverse=inverse, workload=workload).error(
            steps, workload.column(steps)
        )
        for b in (1, 2, 4, 16, 64)
    ]
    assert all(more < fewer for fewer, more in itertools.pairwise(errors))
    root = banded(workload.root(steps))
    known = root.error(steps, workload.column(steps)) * root.column_norm(steps)
    assert errors[-1] <= known * (1 + 1e-9)  # the square root is a strategy of that many bands


def test_an_optimal_strategy_is_scaled_to_one() -> None:
    for cycle in (1, 4):
        inverse = least_error(20, bands=3, cycle=cycle, inverse=True)
        assert inverse.sensitivity(20, cycle=cycle) == pytest.approx(1, rel=1e-5)
        assert all(float(f"{c:.6g}") == c for c in inverse.coefficients)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_full_batches_leave_nothing_to_gain(beta: float) -> None:
    """No C beats Σ√(AᵀA)_tt, the error of independent noise with weights of its own at each step.

    For any X = CᵀC: (AᵀA)_st ≤ √((AᵀA)_ss (AᵀA)_tt), so that diagonal X fulfil the conditions of
    the optimum, which is convex. Equal weights are within 6 % of that for running sums.
    """
    steps, rng = 12, np.random.default_rng(0)
    a = workload_of(steps, beta)
    bound = np.sqrt((a**2).sum(0)).sum() / math.sqrt(steps)
    for _ in range(200):
        c = np.tril(rng.standard_normal((steps, steps))) + 3 * np.eye(steps)
        error = np.linalg.norm(a @ np.linalg.inv(c)) / math.sqrt(steps)
        assert error * math.sqrt(np.abs(c.T @ c).sum()) >= bound
    alone = banded([1.0]).error(steps, workload_of(steps, beta)[:, 0]) * math.sqrt(steps)
    assert alone <= (1.061 if beta == 0 else 1.2) * bound
    found = least_error(steps, bands=4, inverse=True, workload=Workload(beta))
    reached = found.error(steps, Workload(beta).column(steps)) * found.sensitivity(steps)
    assert bound <= reached <= alone * (1 + 1e-9)


def test_the_best_cycle_has_less_error_than_independent_noise() -> None:
    rate, steps, delta = 0.02, 200, 1e-5

    def noise_for(event) -> float:
        low, high = 0.3, 60.0
        for _ in range(12):
            middle = math.sqrt(low * high)
            costs = PLD.sketch().epsilon(event(middle), delta=delta)
            low, high = (low, middle) if costs <= 8 else (middle, high)
        return high

    def run_event(cycle: int, event: GaussianDpEvent):
        scheme = CyclicPoisson(rate, cycle)
        return scheme.run_event(event, num_records=1000, num_steps=steps)

    cycle, error = best_cycle(rate, steps, noise_for=noise_for, run_event=run_event)
    sigma = noise_for(lambda s: run_event(1, GaussianDpEvent(s)))
    assert cycle > 1
    assert error < 0.8 * sigma * banded([1.0]).error(steps)
