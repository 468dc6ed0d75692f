"""Projected descent, the choice of an iterate, and runs of a random length."""

from __future__ import annotations

import math

import dp_accounting as dp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from record_by_record import (
    RECORDS,
    assert_close,
    clipped,
    combine,
    data,
    gradients_at,
    plan_of,
    point_of,
    size,
    total,
    watched,
)
from scipy import stats
from torch import nn

from hushgrad import Refused, Relation, Rng
from hushgrad.accounting import PLD, MixedDpEvent, PureDpEvent
from hushgrad.accounting.closed_forms import gaussian_epsilon
from hushgrad.algorithms import (
    Affine,
    Ball,
    Box,
    Sgd,
    Simplex,
    average,
    noisy_min,
    rrpsgd,
    smallest,
)
from hushgrad.algorithms.output import choosing
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.clipping.rules import Adaptive
from hushgrad.noise import Noise, laplace, release
from hushgrad.noise.releasing import grid
from hushgrad.sampling import FullBatch
from hushgrad.types import Bounded

FULL = {"sampling": FullBatch(), "batch": RECORDS, "epochs": 6}
C1 = 0.8


def vector(values: list[float]) -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.tensor(values, dtype=torch.float64))}


SETS = {
    "ball": (Ball(0.7), lambda x: float(x.norm()) <= 0.7 + 1e-9),
    "box": (Box(-0.2, 0.3), lambda x: bool(((x >= -0.2) & (x <= 0.3)).all())),
    "simplex": (
        Simplex(1.5),
        lambda x: bool((x >= 0).all()) and abs(float(x.sum()) - 1.5) < 1e-9,
    ),
    "affine": (
        Affine(torch.ones(1, 4).double(), torch.tensor([2.0]).double()),
        lambda x: abs(float(x.sum()) - 2) < 1e-9,
    ),
}


@pytest.mark.parametrize("name", SETS)
@given(st.lists(st.floats(-5, 5), min_size=4, max_size=4), st.integers(0, 10**6))
def test_a_projection_is_the_nearest_point_of_its_set(
    name: str, values: list[float], seed: int
) -> None:
    project, inside = SETS[name]
    params = vector(values)
    start = params["a"].detach().clone()
    project(params)
    found = params["a"].detach().clone()
    assert inside(found)
    project(params)
    assert torch.allclose(params["a"], found, atol=1e-9)
    other = vector((5 * np.random.default_rng(seed).normal(size=4)).tolist())
    project(other)  # any point of the set: the angle at the nearest one is not acute
    assert float((start - found) @ (other["a"].detach() - found)) <= 1e-7


def test_projected_gradient_descent_is_the_papers(monkeypatch) -> None:
    plan = plan_of(Sgd(average(), Ball(0.9)), **FULL)
    seen = watched(plan, monkeypatch)
    for t, batch in enumerate(seen.batches):
        assert len(batch[1]) == RECORDS
        each = [clipped(g, C1) for g in gradients_at(seen.points[t], batch)]
        summed = total(each, seen.points[0])
        assert_close(seen.sums[t].sum, summed, 1e-6)
        mean = {n: x / RECORDS for n, x in seen.released[t].items()}
        moved = combine((1.0, seen.points[t]), (-0.5, mean))
        moved = {n: min(1.0, 0.9 / size(moved)) * x for n, x in moved.items()}
        assert_close(seen.points[t + 1], moved, 1e-9)
    assert_close(point_of(seen.net), combine(*((1 / 6, p) for p in seen.points[1:])), 1e-9)
    assert plan.event(6) == dp.SelfComposedDpEvent(dp.GaussianDpEvent(0.7), 6)


def test_the_divisor_is_public_when_a_record_is_removed(monkeypatch) -> None:
    """Trap 2: dividing by the number of records found would move the mean by up to 2L/(n + 1)."""
    plan = plan_of(Sgd(), **FULL)
    x, y = data()
    fewer = watched(plan, monkeypatch, records=(x[1:], y[1:]))
    whole = watched(plan, monkeypatch, records=(x, y))
    apart = size(combine((1.0, whole.sums[0].sum), (-1.0, fewer.sums[0].sum)))
    assert apart <= C1 * (1 + 1e-6)
    for seen in (whole, fewer):
        mean = {n: v / RECORDS for n, v in seen.released[0].items()}
        assert_close(seen.points[1], combine((1.0, seen.points[0]), (-0.5, mean)), 1e-9)


def test_the_means_of_the_literal_divisor_differ_by_more_than_it_claims() -> None:
    g = {"a": torch.full((1,), C1)}
    h = {"a": torch.full((1,), -C1)}
    n = 10
    with_all = total([g] * (n - 1) + [h], g)["a"] / n
    without = total([g] * (n - 1), g)["a"] / (n - 1)
    assert float((with_all - without).abs()) > 1.9 * C1 / n
    epsilons = [gaussian_epsilon(1 / k * math.sqrt(2 * math.log(1e5)), delta=1e-5) for k in (1, 2)]
    assert epsilons[0] <= 1.0
    assert epsilons[1] == pytest.approx(1.63, abs=0.01)


def test_the_free_choice_is_the_smallest_released_gradient(monkeypatch) -> None:
    plan = plan_of(Sgd(smallest()), **FULL)
    seen = watched(plan, monkeypatch, penalty=0.05)
    deviation = 0.7 * seen.sums[0].l2 / RECORDS
    scores = []
    for t, released in enumerate(seen.released):
        mean = {n: x / RECORDS + 0.1 * seen.points[t][n] for n, x in released.items()}
        entries = sum(x.numel() for x in mean.values())
        scores.append(size(mean) ** 2 - entries * deviation**2)
    best = scores.index(min(scores))
    assert_close(point_of(seen.net), seen.points[best], 1e-12)
    assert plan.epsilon == plan_of(Sgd(), **FULL).epsilon


def test_the_paid_choice_is_a_pure_event_beside_the_steps() -> None:
    plan = plan_of(Sgd(noisy_min(0.3)), **FULL)
    plain = plan_of(Sgd(), **FULL)
    assert plan.event(6) == dp.ComposedDpEvent([plain.event(6), PureDpEvent(0.3)])
    assert plain.epsilon < plan.epsilon <= plain.epsilon + 0.3 + 1e-3
    met = plan_of(Sgd(noisy_min(0.3)), **FULL, noise_multiplier=None, epsilon=2.0)
    assert 1.99 < met.epsilon <= 2.0


@pytest.mark.parametrize(
    ("relation", "factor"), [(Relation.ADD_REMOVE, 2.0), (Relation.REPLACE_ONE, 4.0)]
)
def test_the_paid_choice_has_its_noise(monkeypatch, relation: Relation, factor: float) -> None:
    """Trap 3: scale 2L/(nε') under add/remove and 4L/(nε') under replace-one, two-sided."""
    epsilon, drawn, scores = 0.2, list[float](), list[float]()

    def spy(bounded: Bounded, noise: Noise, *, rng: Rng, step: int, **past):
        if "norm" not in bounded.sum:
            return release(bounded, noise, rng=rng, step=step, **past)
        assert bounded.l1 == pytest.approx(factor / 2 * C1 * (1 + SUM_SLACK) / RECORDS, rel=1e-9)
        assert noise.noise_multiplier == pytest.approx(2 / (epsilon - 2**-14), rel=1e-9)
        found = release(bounded, noise, rng=rng, step=step, **past)
        drawn.append(float(found.values["norm"] - bounded.sum["norm"]))
        scores.append(float(bounded.sum["norm"]))
        return found

    monkeypatch.setattr("hushgrad.run.step.release", spy)
    plan = plan_of(Sgd(noisy_min(epsilon)), **(FULL | {"epochs": 120}), relation=relation)
    seen = watched(plan, monkeypatch, lr=0.05)
    assert scores[0] == pytest.approx(size(seen.sums[0].sum) / RECORDS, rel=1e-6)
    scale = factor * C1 * (1 + SUM_SLACK) / (RECORDS * epsilon)
    fits = stats.kstest(drawn, stats.laplace(scale=scale).cdf)
    literal = stats.kstest(drawn, stats.laplace(scale=scale * epsilon).cdf)
    assert fits.pvalue > 1e-3
    assert literal.pvalue < 1e-6
    best = int(np.argmin(np.array(scores) + np.array(drawn)))
    assert_close(point_of(seen.net), seen.points[best], 1e-12)


def test_the_paid_choice_needs_full_batches_one_rule_and_silence(tmp_path) -> None:
    with pytest.raises(Refused, match="full batches"):
        plan_of(Sgd(noisy_min(0.3)))
    with pytest.raises(Refused, match="one clipping norm"):
        plan_of(Sgd(noisy_min(0.3)), **FULL, clip=Adaptive())
    for epsilon in (0.0, 2**-13, math.inf):
        with pytest.raises(ValueError, match="for a choice"):
            noisy_min(epsilon)


@pytest.mark.parametrize("epsilon", [2**-11, 0.01, 1.0])
def test_the_grid_is_part_of_the_price_of_a_choice(epsilon: float) -> None:
    """One score rises by Δ and the other, with its noise at `a`, falls by Δ, both on the grid.

    Then the first needs Δ + r(a) − r(a − Δ) more of its own noise to be the least, r rounding to
    the grid, and so much over the scale is what its odds tell. Scale 2Δ/ε alone falls short.
    """

    def worst(noise: Noise) -> float:
        told = []
        for most in np.linspace(0.8, 1.6, 41):
            scale = noise.scale(Bounded({}, most, most))
            step = grid(scale)
            a = np.linspace(-2, 2, 4001) * most
            turned = most + step * (np.rint(a / step) - np.rint((a - most) / step))
            told.append(turned.max() / scale)
        return max(told)

    assert worst(choosing(epsilon)) <= epsilon * (1 + 1e-9)
    if epsilon < 0.1:
        assert worst(laplace(2 / epsilon)) > epsilon * (1 + 1e-3)


def test_a_penalty_does_not_carry_norms_to_where_a_record_is_lost(monkeypatch) -> None:
    found = list[float]()

    def spy(bounded: Bounded, noise: Noise, *, rng: Rng, step: int, **past):
        if "norm" in bounded.sum:
            found.append(float(bounded.sum["norm"]) / bounded.l2)
        return release(bounded, noise, rng=rng, step=step, **past)

    monkeypatch.setattr("hushgrad.run.step.release", spy)
    watched(plan_of(Sgd(noisy_min(0.2)), **FULL), monkeypatch, penalty=1e20, lr=0.0)
    assert max(found) == 2.0**36


def test_random_rounds_cost_the_mean_of_their_deltas(monkeypatch) -> None:
    plan, whole = plan_of(rrpsgd()), plan_of(Sgd())
    event = plan.event(8)
    assert isinstance(event, MixedDpEvent)
    at = plan.epsilon
    deltas = [PLD.delta(whole.event(t), epsilon=at) for t in range(1, 9)]
    assert sum(deltas) / 8 == pytest.approx(1e-4, rel=2e-2)
    expected_rounds = PLD.delta(whole.event(4), epsilon=at)
    assert expected_rounds < 0.8e-4  # what accounting for the expected number would claim
    seen = watched(plan, monkeypatch)
    assert 1 <= len(seen.batches) <= 8
