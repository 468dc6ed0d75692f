"""Published and independently computed figures, and PLD against the exact Gaussian mechanism."""

from __future__ import annotations

import math

import pytest
from dp_accounting import (
    ComposedDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad import Refused
from hushgrad.accounting import (
    ACCOUNTANTS,
    GDP,
    PLD,
    RDP,
    ZCDP,
    Accountant,
    Pld,
    PureDpEvent,
    gaussian,
    joint_multiplier,
    on_one_batch,
    poisson,
    repeated,
)
from hushgrad.accounting.closed_forms import gaussian_delta, gaussian_epsilon

DELTA = 1e-5
NSGD = {3.6: (1.71, 1.57), 2.0: (3.48, 3.21), 1.2: (7.32, 6.76)}  # DP-NSGD, section 4


@pytest.mark.parametrize(
    ("accountant", "epsilon"), [(RDP, 7.329), (PLD, 6.769), (GDP, 6.60)], ids=str
)
def test_a_common_run(accountant: Accountant, epsilon: float) -> None:
    run = repeated(2250, poisson(0.04, gaussian(1.5)))
    digits = 2 if accountant is GDP else 3
    assert round(accountant.epsilon(run, delta=DELTA), digits) == epsilon


@pytest.mark.parametrize("noise_multiplier", NSGD)
def test_normalised_sgd_on_cifar(noise_multiplier: float) -> None:
    run = repeated(5000, poisson(1000 / 50_000, gaussian(noise_multiplier)))
    rdp, pld = NSGD[noise_multiplier]
    assert RDP.epsilon(run, delta=DELTA) == pytest.approx(rdp, abs=0.01)
    assert PLD.epsilon(run, delta=DELTA) == pytest.approx(pld, abs=0.01)


def test_a_copied_noise_multiplier_does_not_keep_its_epsilon() -> None:
    """B's σ = 0.635 "for ε = 8" on SST-2, 10 epochs of 67 batches of 1000."""
    run = repeated(670, poisson(1000 / 67_349, gaussian(0.635)))
    assert RDP.epsilon(run, delta=DELTA) == pytest.approx(8.75, abs=0.01)


def test_one_gaussian_release() -> None:
    assert round(PLD.epsilon(gaussian(1.0), delta=DELTA), 4) == 4.3772
    assert round(gaussian_epsilon(1.0, delta=DELTA), 4) == 4.3772


@settings(deadline=None, max_examples=10)
@given(noise=st.floats(0.5, 20), delta=st.floats(1e-9, 1e-2))
def test_pld_is_the_exact_mechanism_from_above(noise: float, delta: float) -> None:
    exact = gaussian_epsilon(noise, delta=delta)
    found = Pld(1e-3).epsilon(gaussian(noise), delta=delta)
    assert exact * (1 - 1e-6) - 1e-9 <= found <= exact + 1e-3


@pytest.mark.parametrize("delta", [1e-5, 1e-8, 1e-10, 1e-11])
@pytest.mark.parametrize("steps", [100, 10_000])
def test_composition_in_the_fourier_domain_never_understates(steps: int, delta: float) -> None:
    # A rate just below 1 keeps the composition numerical, and is no more private than rate 1.
    run = SelfComposedDpEvent(PoissonSampledDpEvent(1 - 1e-12, gaussian(math.sqrt(steps))), steps)
    exact = gaussian_epsilon(1.0, delta=delta)
    assert exact * (1 - 1e-7) <= PLD.epsilon(run, delta=delta) <= exact * 1.02


def test_the_margin_is_several_times_what_the_package_understates() -> None:
    """By itself it was seen to say 6.8805 here, where ε = 6.9018 is true: δ lacks 1.5e-12."""
    steps, delta = 100_000, 1e-11
    step = PoissonSampledDpEvent(1 - 1e-12, gaussian(math.sqrt(steps)))
    margin = steps * 2.0**-52
    package = PLDAccountant(value_discretization_interval=1e-4).compose(step, steps)
    epsilon = package.get_epsilon(delta)
    assert gaussian_delta(1.0, epsilon=epsilon) - delta < margin / 4
    found = PLD.delta(repeated(steps, step), epsilon=epsilon)
    assert found >= gaussian_delta(1.0, epsilon=epsilon)
    assert found - delta == pytest.approx(margin, rel=1e-3)


def test_delta_by_pld_never_understates() -> None:
    run = repeated(10_000, PoissonSampledDpEvent(1 - 1e-12, gaussian(100.0)))
    for epsilon in (1.0, 4.0, 6.5, 7.0):
        assert PLD.delta(run, epsilon=epsilon) >= gaussian_delta(1.0, epsilon=epsilon)


def test_a_delta_within_the_rounding_is_refused() -> None:
    run = repeated(10_000, poisson(0.01, gaussian(1.0)))
    with pytest.raises(
        Refused, match="expected a delta above the rounding error of the pld accountant, got"
    ):
        PLD.epsilon(run, delta=1e-13)


def test_rdp_does_not_take_rounding_for_nothing() -> None:
    """The package says ε = 0 here: each step's ε(α) underflows, and there are 1e12 of them."""
    run = repeated(10**12, poisson(1e-9, gaussian(1.0)))
    assert RDP.epsilon(run, delta=DELTA) > 0


def test_tiny_noise_neither_hangs_nor_understates() -> None:
    assert PLD.epsilon(gaussian(0.01), delta=DELTA) >= gaussian_epsilon(0.01, delta=DELTA)


@pytest.mark.parametrize("name", ["pld", "rdp", "gdp", "zcdp"])
def test_epsilon_and_delta_agree(name: str) -> None:
    accountant, run = ACCOUNTANTS[name], repeated(10, gaussian(4.0))
    epsilon = accountant.epsilon(run, delta=DELTA)
    assert accountant.delta(run, epsilon=epsilon) == pytest.approx(DELTA, rel=1e-3)


@pytest.mark.parametrize("name", ["pld", "rdp", "gdp", "zcdp"])
@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_delta_outside_its_range_raises(name: str, delta: float) -> None:
    with pytest.raises(ValueError, match="expected 0 < delta < 1, got"):
        ACCOUNTANTS[name].epsilon(gaussian(1.0), delta=delta)


@pytest.mark.parametrize("name", ["pld", "rdp", "gdp", "zcdp"])
def test_what_is_not_private_costs_everything(name: str) -> None:
    run = ComposedDpEvent([gaussian(1.0), NonPrivateDpEvent()])
    assert ACCOUNTANTS[name].epsilon(run, delta=DELTA) == math.inf


def test_zcdp_adds_up() -> None:
    assert ZCDP.rho(repeated(8, gaussian(2.0))) == pytest.approx(1.0)
    assert ZCDP.rho(ComposedDpEvent([PureDpEvent(1.0), gaussian(1.0)])) == pytest.approx(1.0)
    run = repeated(8, gaussian(2.0))
    assert ZCDP.epsilon(run, delta=DELTA) == pytest.approx(RDP.epsilon(run, delta=DELTA))


# --- steps of pure ε ---


@pytest.mark.parametrize("accountant", [PLD, RDP], ids=lambda a: a.name)
def test_a_pure_step_costs_its_epsilon(accountant: Accountant) -> None:
    assert accountant.epsilon(PureDpEvent(0.5), delta=1e-9) == pytest.approx(0.5, abs=0.02)
    many = accountant.epsilon(repeated(100, PureDpEvent(0.1)), delta=DELTA)
    assert many < 7  # by adding up it would be 10


def test_a_pure_step_is_never_cheaper_than_laplace_noise() -> None:
    for count in (1, 10, 50):
        pure, laplace = (repeated(count, e) for e in (PureDpEvent(0.3), LaplaceDpEvent(1 / 0.3)))
        for accountant in (PLD, RDP):
            dear, cheap = (accountant.epsilon(e, delta=DELTA) for e in (pure, laplace))
            assert dear >= cheap * (1 - 1e-9)


# --- several queries on one batch ---


def test_queries_on_one_batch_are_one_event() -> None:
    joint = joint_multiplier([2.0, 3.0])
    assert joint == pytest.approx((1 / 4 + 1 / 9) ** -0.5)
    both = poisson(0.1, ComposedDpEvent([gaussian(2.0), gaussian(3.0)]))
    assert both == poisson(0.1, gaussian(both.event.noise_multiplier))
    assert both.event.noise_multiplier == pytest.approx(joint, rel=1e-15)
    raw = PoissonSampledDpEvent(0.1, ComposedDpEvent([gaussian(2.0), gaussian(3.0)]))
    for accountant in (PLD, RDP):
        assert accountant.epsilon(raw, delta=DELTA) == accountant.epsilon(both, delta=DELTA)
    apart = ComposedDpEvent([poisson(0.1, gaussian(2.0)), poisson(0.1, gaussian(3.0))])
    assert PLD.epsilon(both, delta=DELTA) > 1.05 * PLD.epsilon(apart, delta=DELTA)


def test_unequal_queries_on_one_batch_are_refused() -> None:
    with pytest.raises(Refused, match="expected Gaussian queries where several use one batch"):
        on_one_batch(ComposedDpEvent([gaussian(2.0), LaplaceDpEvent(1.0)]))


@settings(deadline=None, max_examples=20)
@given(noise=st.floats(0.8, 8), rate=st.floats(0.001, 0.2), steps=st.integers(1, 3000))
def test_more_noise_fewer_steps_and_a_lower_rate_are_more_private(
    noise: float, rate: float, steps: int
) -> None:
    quick = Pld(1e-3)

    def spent(noise: float, rate: float, steps: int) -> float:
        return quick.epsilon(repeated(steps, poisson(rate, gaussian(noise))), delta=DELTA)

    here = 1.1 * spent(noise, rate, steps) + 1e-6  # each is an upper bound on a grid of its own
    assert spent(1.2 * noise, rate, steps) <= here
    assert spent(noise, rate / 1.3, steps) <= here
    assert spent(noise, rate, max(1, steps // 2)) <= here
