"""Output and objective perturbation: their δ, their sensitivity, their minimisers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from scipy import stats

from hushgrad.accounting.closed_forms import gaussian_delta, gaussian_epsilon
from hushgrad.events import ApproximateDpEvent
from hushgrad.glm import losses
from hushgrad.glm.gradients import linear_gradients
from hushgrad.glm.minimising import minimiser
from hushgrad.glm.perturbation import (
    OUTPUT_SHARE,
    TOLERANCE,
    PerturbationProblem,
    least_strength,
    objective_delta,
    objective_noise,
    objective_perturbation,
    output_perturbation,
)
from hushgrad.glm.rows import scaled_rows
from hushgrad.ledger import Ledger
from hushgrad.noise import standard_normal
from hushgrad.rng import Rng
from hushgrad.run import step
from hushgrad.types import Refused, Relation

PROBLEM = PerturbationProblem(
    losses.logistic(), 1, math.hypot(1, 0.3), 4.0, epsilon=1.0, delta=1e-5
)


def records(n: int = 60, p: int = 3, classes: int = 1):
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(n, p, dtype=torch.float64, generator=rng)
    noise = torch.randn(n, dtype=torch.float64, generator=rng)
    y = torch.sign(x[:, 0] + noise) if classes == 1 else torch.arange(n) % classes
    return scaled_rows(x, feature_norm=1.0, intercept=0.3), y


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("ratio", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("determinant", [0.0, 0.05])
def test_delta_of_one_dimension_has_its_closed_form(epsilon, ratio, determinant) -> None:
    left = epsilon - determinant
    if left >= ratio**2 / 2:
        exact = 2 * gaussian_delta(1 / ratio, epsilon=left)
    else:
        exact = 1 - 2 * math.exp(left) * stats.norm.cdf(-ratio)
    found = objective_delta(epsilon, ratio=ratio, determinant=determinant, dimensions=1)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-5) + 1e-300


@pytest.mark.parametrize("dimensions", [1, 2, 10])
def test_delta_is_the_mean_over_chi(dimensions: int) -> None:
    chi = stats.chi(dimensions).rvs(400_000, random_state=1)
    loss = 0.1 + 0.5**2 / 2 + 0.5 * chi
    drawn = np.maximum(0, -np.expm1(1.0 - loss))
    found = objective_delta(1.0, ratio=0.5, determinant=0.1, dimensions=dimensions)
    assert abs(found - drawn.mean()) <= 5 * drawn.std() / math.sqrt(len(drawn))


@pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.REPLACE_ONE])
@pytest.mark.parametrize("classes", [1, 3])
def test_the_noise_is_the_least_that_keeps_delta(relation: Relation, classes: int) -> None:
    loss = losses.logistic() if classes == 1 else losses.multinomial()
    problem = replace(PROBLEM, loss=loss, classes=classes, relation=relation, strength=20.0)
    sigma, twice = objective_noise(problem), 2 if relation is Relation.REPLACE_ONE else 1

    def delta(noise: float) -> float:
        return objective_delta(
            1.0,
            ratio=twice * problem.gradient_norm / noise,
            determinant=problem.determinant,
            dimensions=twice * classes,
        )

    assert delta(sigma) <= 1e-5 < delta(sigma * 0.999)


def test_the_bounds_of_a_problem_are_reached_and_not_passed() -> None:
    """L by a record on the wrong side of every score, c by a Hessian of full rank."""
    x = torch.tensor([1.0, 0.3], dtype=torch.float64)
    z, y = torch.tensor([-40.0], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    longest = float((PROBLEM.loss.derivative(z, y)[:, None] * x).norm())
    assert longest <= PROBLEM.gradient_norm <= longest * (1 + 1e-8)
    separate = losses.custom(
        lambda z, y: torch.nn.functional.softplus(z).sum(1),
        lipschitz=math.sqrt(3),
        smoothness=0.25,
        convex=True,
        vector=True,
    )
    problem = replace(PROBLEM, loss=separate, classes=3)
    bend = torch.kron(0.25 * torch.eye(3, dtype=torch.float64), torch.outer(x, x))
    found = float(torch.logdet(torch.eye(6, dtype=torch.float64) + bend / problem.strength))
    assert found <= problem.determinant <= found * (1 + 1e-7)


def test_both_noises_of_objective_perturbation_are_as_large_as_proved(monkeypatch) -> None:
    import hushgrad.glm.perturbation as module

    seen: dict = {}
    search, noised = module.minimiser, step.release

    def searched(rows, labels, **rest):
        seen.update(rest)
        return search(rows, labels, **rest)

    def released(bounded, noise, **rest):
        seen.update(l2=bounded.l2, multiplier=noise.noise_multiplier)
        return noised(bounded, noise, **rest)

    monkeypatch.setattr(module, "minimiser", searched)
    monkeypatch.setattr(step, "release", released)
    rows, y = records()
    for relation in (Relation.ADD_REMOVE, Relation.REPLACE_ONE):
        problem = replace(PROBLEM, relation=relation)
        found = objective_perturbation(rows, y, problem, rng=Rng.fixed(0))
        assert seen["tilt"].shape == (1, rows.width)
        key = Rng.fixed(0).derive("perturbation").derive("objective")
        drawn = standard_normal(rows.width, key)
        torch.testing.assert_close(seen["tilt"][0], found.noise * drawn, rtol=1e-12, atol=0)
        main = replace(problem, epsilon=1 - OUTPUT_SHARE, delta=(1 - OUTPUT_SHARE) * 1e-5)
        assert found.noise >= objective_noise(main) * (1 - 1e-12)
        # Both minimisers, with and without a record, may be off by γ/Λ.
        assert seen["l2"] >= 2 * seen["tolerance"] / problem.strength * (1 - 1e-12)
        spent = gaussian_epsilon(seen["multiplier"], delta=OUTPUT_SHARE * 1e-5)
        assert spent <= OUTPUT_SHARE * (1 + 1e-6)


def test_a_minimiser_is_sought_until_half_of_the_tolerance() -> None:
    rows, y = records()
    none = torch.zeros(1, rows.width, dtype=torch.float64)
    loss = losses.logistic()

    def left(theta: torch.Tensor) -> float:
        slopes = linear_gradients(rows, y, theta, loss=loss).slopes
        return float((rows.combine(slopes) + 4.0 * theta).norm())

    for share in (1.01, 1.2, 1.9):
        tolerance = share * left(none)
        found = minimiser(rows, y, loss=loss, strength=4.0, tilt=none, tolerance=tolerance)
        assert left(found) <= tolerance / 2


def test_the_noise_is_below_that_of_kifer_smith_and_thakurta() -> None:
    """Their theorem: Λ >= 2β/ε and σ² = L²(8 log(2/δ) + 4ε)/ε²."""
    beta = 0.25 * PROBLEM.row_norm**2
    problem = replace(PROBLEM, strength=2 * beta / PROBLEM.epsilon)
    theirs = PROBLEM.gradient_norm * math.sqrt(8 * math.log(2 / 1e-5) + 4)
    assert 0.5 * theirs < objective_noise(problem) < theirs


def two_records_loss(problem: PerturbationProblem, draws: int) -> np.ndarray:
    """Privacy losses of objective perturbation in one dimension, between {} and one record x = 1.

    With F = ℓ + Λθ²/2 the density of θ is known: this is the mechanism itself, not its bound.
    """
    sigma, strength = objective_noise(problem), problem.strength
    b = sigma * np.random.default_rng(0).standard_normal(draws)
    z = torch.from_numpy(-b / strength)  # without the record θ = −b/Λ
    y = torch.ones_like(z)
    slope = losses.logistic().derivative(z, y).numpy()
    bend = np.exp(-np.logaddexp(0, z.numpy()) - np.logaddexp(0, -z.numpy()))
    other = b - slope  # what b must have been with it
    losses_of = (other**2 - b**2) / (2 * sigma**2) - np.log1p(bend / strength)
    return np.asarray(losses_of)


def test_the_mechanism_itself_keeps_delta_and_needs_most_of_the_noise() -> None:
    """Exact losses of the worst simple pair: δ is kept, and half of the noise would break it."""
    problem = replace(PROBLEM, row_norm=1.0, strength=5.0, delta=1e-3)
    loss = two_records_loss(problem, 2_000_000)
    delta = np.maximum(0, -np.expm1(problem.epsilon - loss)).mean()
    assert delta <= 1e-3
    assert np.maximum(0, -np.expm1(problem.epsilon - 2 * loss)).mean() > 1e-3


def test_a_strength_that_gives_too_much_away_is_refused() -> None:
    with pytest.raises(Refused, match="raise it to"):
        objective_noise(replace(PROBLEM, strength=0.1))
    least = least_strength(PROBLEM.loss, 1, PROBLEM.row_norm, 1.0)
    assert replace(PROBLEM, strength=least).determinant == pytest.approx(0.5)


@pytest.mark.parametrize(
    "loss", [losses.hinge(), losses.squared(), losses.poisson(), losses.savage()], ids=repr
)
def test_losses_that_the_proof_does_not_cover_are_refused(loss: losses.ScoreLoss) -> None:
    with pytest.raises(Refused, match="expected a"):
        replace(PROBLEM, loss=loss)


@pytest.mark.parametrize(
    ("loss", "classes"),
    [
        (losses.logistic(), 1),
        (losses.huber(0.5), 1),
        (losses.smoothed_hinge(), 1),
        (losses.multinomial(), 3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("by", ["dense", "products", "descent"])
def test_a_minimiser_has_the_certified_gradient(loss, classes, by, monkeypatch) -> None:
    monkeypatch.setattr("hushgrad.glm.minimising._DENSE", 10**4 if by == "dense" else 0)
    if by == "descent":  # Newton's method gives up at once
        monkeypatch.setattr("hushgrad.glm.minimising._MOST_STEPS", 0)
    rows, y = records(classes=classes)
    tilt = torch.randn(classes, rows.width, dtype=torch.float64)
    theta = minimiser(rows, y, loss=loss, strength=0.5, tilt=tilt, tolerance=1e-6)
    theta.requires_grad_()
    z = rows.x[: rows.count] @ theta.T
    value = loss.value(z if classes > 1 else z[:, 0], y).sum()
    total = value + 0.25 * theta.square().sum() + (tilt * theta).sum()
    (gradient,) = torch.autograd.grad(total, theta)
    assert gradient.norm() <= 1e-6


@pytest.mark.parametrize("classes", [1, 3])
def test_one_record_moves_the_minimiser_by_at_most_its_sensitivity(classes: int) -> None:
    loss = losses.logistic() if classes == 1 else losses.multinomial()
    problem = replace(PROBLEM, loss=loss, classes=classes, strength=2.0)
    rows, y = records(classes=classes)
    none = torch.zeros(classes, rows.width, dtype=torch.float64)

    def at(labels: torch.Tensor, cut: slice) -> torch.Tensor:
        found = rows.take(cut)
        return minimiser(found, labels[cut], loss=loss, strength=2.0, tilt=none, tolerance=1e-9)

    whole, less = at(y, slice(0, 60)), at(y, slice(0, 59))
    assert 0 < (whole - less).norm() <= problem.gradient_norm / 2.0
    other = y.clone()
    other[3] = -other[3] if classes == 1 else (other[3] + 1) % classes
    assert (whole - at(other, slice(0, 60))).norm() <= 2 * problem.gradient_norm / 2.0


@pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.REPLACE_ONE])
def test_output_noise_has_its_scale_and_is_what_the_event_says(relation: Relation) -> None:
    problem = replace(PROBLEM, relation=relation)
    rows, y = records(p=30)
    none = torch.zeros(1, rows.width, dtype=torch.float64)
    exact = minimiser(rows, y, loss=problem.loss, strength=4.0, tilt=none, tolerance=1e-10)
    found = [output_perturbation(rows, y, problem, rng=Rng.from_os()) for _ in range(120)]
    errors = torch.cat([(one.theta - exact).reshape(-1) for one in found]).numpy()
    assert stats.kstest(errors / found[0].noise, "norm").pvalue > 1e-4
    assert stats.kstest(errors / (found[0].noise * 2 / 3), "norm").pvalue < 1e-6
    event = found[0].event
    assert isinstance(event, GaussianDpEvent)
    doubled = 2 if relation is Relation.REPLACE_ONE else 1
    sensitivity = doubled * problem.gradient_norm * (1 + 2 * TOLERANCE) / problem.strength
    spent = gaussian_epsilon(found[0].noise / sensitivity, delta=1e-5)
    assert 1 - 1e-3 <= spent <= 1 + 1e-6
    assert gaussian_epsilon(event.noise_multiplier / doubled, delta=1e-5) <= 1 + 1e-6


def test_objective_noise_has_its_scale() -> None:
    """b = −∇F(θ) is recovered from what is released, and is normal with the stated σ."""
    rows, y = records(400, p=30)
    problem = replace(PROBLEM, strength=50.0)
    found = [objective_perturbation(rows, y, problem, rng=Rng.from_os()) for _ in range(120)]
    x = rows.x[: rows.count]
    terms = []
    for one in found:
        slopes = problem.loss.derivative((x @ one.theta.T)[:, 0], y)
        terms.append(-(slopes @ x + 50.0 * one.theta[0]))
    drawn = torch.cat(terms).numpy()
    sigma = found[0].noise
    expected = objective_noise(
        replace(problem, epsilon=1 - OUTPUT_SHARE, delta=(1 - OUTPUT_SHARE) * 1e-5)
    )
    assert sigma == pytest.approx(expected)
    assert stats.kstest(drawn / sigma, "norm").pvalue > 1e-4
    assert stats.kstest(drawn / (sigma * 2 / 3), "norm").pvalue < 1e-6
    assert found[0].event == ApproximateDpEvent(1.0, 1e-5)


def test_rows_and_classes_that_the_noise_is_not_for_are_refused() -> None:
    rows, y = records()
    for perturb in (objective_perturbation, output_perturbation):
        with pytest.raises(Refused, match="rows of norm at most 1,"):
            perturb(rows, y, replace(PROBLEM, row_norm=1.0), rng=Rng.fixed(0))
    with pytest.raises(Refused, match="one row of parameters"):
        replace(PROBLEM, classes=3)
    with pytest.raises(Refused, match="one row of parameters"):
        replace(PROBLEM, loss=losses.multinomial())


def test_a_search_that_fails_is_charged(tmp_path) -> None:
    """That it failed is news of the records: a slope without a zero, stated to be smooth."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.set_budget("data", epsilon=2.5, delta=1e-4)
    rows, y = records()
    broken = losses.custom(
        lambda z, y: z.abs(), lambda z, y: z * torch.nan, lipschitz=1.0, smoothness=1.0, convex=True
    )
    for spent, perturb in ((1.0, objective_perturbation), (2.0, output_perturbation)):
        problem = replace(PROBLEM, loss=broken)
        with pytest.raises(Refused, match="expected to find a minimiser"):
            perturb(rows, y, problem, rng=Rng.from_os(), budget=ledger.budget("data"))
        assert ledger.budget("data").spent["epsilon"] == pytest.approx(spent)


def test_a_seed_repeats_and_a_secret_key_does_not() -> None:
    rows, y = records()
    for perturb in (objective_perturbation, output_perturbation):
        one, two = (perturb(rows, y, PROBLEM, rng=Rng.fixed(1)).theta for _ in range(2))
        assert torch.equal(one, two)
        key = Rng.from_os()
        one, two = (perturb(rows, y, PROBLEM, rng=key).theta for _ in range(2))
        assert not torch.equal(one, two)


def test_a_perturbation_is_charged_before_it_is_released(tmp_path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.set_budget("data", epsilon=2.5, delta=1e-4)
    rows, y = records()
    budget = ledger.budget("data")
    objective_perturbation(rows, y, PROBLEM, rng=Rng.from_os(), budget=budget)
    output_perturbation(rows, y, PROBLEM, rng=Rng.from_os(), budget=budget)
    assert budget.spent == pytest.approx({"epsilon": 2.0, "delta": 2e-5})
    with pytest.raises(Refused):
        objective_perturbation(rows, y, PROBLEM, rng=Rng.from_os(), budget=budget)
    with pytest.raises(Refused, match="secret key"):
        output_perturbation(rows, y, PROBLEM, rng=Rng.fixed(0), budget=budget)
