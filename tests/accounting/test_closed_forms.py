"""The papers' closed forms hold where their conditions do, and are refused elsewhere."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushgrad import Refused, Relation
from hushgrad.accounting import PLD, RDP, gaussian, joint_multiplier, repeated
from hushgrad.accounting.closed_forms import (
    adaptive_clipping_multiplier,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    gradient_descent_noise_multiplier,
    recursive_momentum_noise_multiplier,
    sampled_gaussian_epsilon,
    sampled_gaussian_rdp,
    truncated_rdp,
)
from hushgrad.sampling import WithoutReplacement

DELTA = 1e-5
ONE = Relation.REPLACE_ONE


@given(noise=st.floats(0.1, 50), delta=st.floats(1e-10, 0.1))
def test_the_exact_mechanism_inverts_on_the_private_side(noise: float, delta: float) -> None:
    epsilon = gaussian_epsilon(noise, delta=delta)
    if epsilon == 0:
        assert gaussian_delta(noise, epsilon=0.0) <= delta
        return
    assert gaussian_delta(noise, epsilon=epsilon) <= delta * (1 + 1e-9)
    assert gaussian_delta(noise, epsilon=0.9999 * epsilon) > delta
    found = gaussian_noise_multiplier(epsilon, delta=delta)
    assert gaussian_delta(found, epsilon=epsilon) <= delta * (1 + 1e-9)
    assert found == pytest.approx(noise, rel=1e-5)


# --- clipped DP gradient descent, Theorem 2.2 ---


@pytest.mark.parametrize(("claimed", "true"), [(1.0, 1.63), (3.0, 5.68)])
def test_a_private_divisor_breaks_theorem_2_2(claimed: float, true: float) -> None:
    """The mean moves by 2L/(n+1) and not by L/n: half the noise."""
    printed = gradient_descent_noise_multiplier(claimed, delta=DELTA, steps=1)
    assert round(gaussian_epsilon(printed / 2, delta=DELTA), 2) == true


@pytest.mark.parametrize("steps", [1, 100])
def test_theorem_2_2_suffices_up_to_8_and_not_beyond(steps: int) -> None:
    for epsilon in (0.5, 3.0, 7.96):
        noise = gradient_descent_noise_multiplier(epsilon, delta=DELTA, steps=steps)
        assert PLD.epsilon(repeated(steps, gaussian(noise)), delta=DELTA) <= epsilon
    for epsilon in (7.98, 10.0):
        with pytest.raises(
            Refused, match=r"Theorem 2\.2 keeps delta 1e-05, got .* exact mechanism"
        ):
            gradient_descent_noise_multiplier(epsilon, delta=DELTA, steps=steps)
    printed = math.sqrt(2 * math.log(1 / DELTA)) / 10
    assert gaussian_delta(printed, epsilon=10.0) == pytest.approx(2.9e-5, rel=0.02)


# --- C, Lemma 3.7 ---


@pytest.mark.parametrize(("noise", "rate"), [(2.0, 0.001), (4.0, 0.001), (8.0, 0.01)])
def test_lemma_3_7_is_above_the_package(noise: float, rate: float) -> None:
    event = WithoutReplacement(int(rate * 100_000)).amplify(gaussian(noise), num_records=100_000)
    orders, values = RDP.curve(event, ONE)
    found = dict(zip(orders, values, strict=True))
    for alpha in (2.0, 3.0):
        assert sampled_gaussian_rdp(alpha, rate=rate, noise_multiplier=noise) >= found[alpha]
    run = repeated(1000, event)
    closed = sampled_gaussian_epsilon(noise, rate=rate, steps=1000, delta=DELTA)
    assert closed >= RDP.epsilon(run, delta=DELTA, relation=ONE)


def test_the_conditions_of_lemma_3_7() -> None:
    edge = 2 * math.sqrt(0.7)
    assert sampled_gaussian_rdp(1.5, rate=1e-4, noise_multiplier=edge * (1 + 1e-9)) > 0
    with pytest.raises(Refused, match=r">= 0\.7 for Lemma 3\.7, got 0\.69"):
        sampled_gaussian_rdp(1.5, rate=1e-4, noise_multiplier=0.999 * edge)
    # σ' = 2: α = 8 asks for 8 <= 8/3·log(1/(τ·8·5)) + 1, that is τ <= 0.0018.
    assert sampled_gaussian_rdp(8.0, rate=0.0018, noise_multiplier=4.0) > 0
    for alpha, rate in ((8.0, 0.0019), (1.0, 0.001), (80.0, 0.001)):
        with pytest.raises(Refused, match=r"expected 1 < α <= .* for Lemma 3\.7, got α = "):
            sampled_gaussian_rdp(alpha, rate=rate, noise_multiplier=4.0)
    with pytest.raises(Refused, match=r"for which Lemma 3\.7 allows an order above 1"):
        sampled_gaussian_epsilon(4.0, rate=0.9, steps=10, delta=DELTA)


def test_theorem_5_1_keeps_its_epsilon() -> None:
    noise = recursive_momentum_noise_multiplier(
        8.0, delta=DELTA, steps=20_000, records=60_000, batch=500
    )
    sampling = WithoutReplacement(500)
    run = sampling.run_event(gaussian(noise), num_records=60_000, num_steps=20_000)
    assert RDP.epsilon(run, delta=DELTA, relation=ONE) <= 8.0
    closed = sampled_gaussian_epsilon(noise, rate=500 / 60_000, steps=20_000, delta=DELTA)
    assert closed <= 8.0
    with pytest.raises(Refused, match=r"Lemma 3\.7"):
        recursive_momentum_noise_multiplier(
            3.0, delta=DELTA, steps=5000, records=60_000, batch=2000
        )


# --- DP-NSGD, Proposition E.3 ---


def test_proposition_e_3_is_above_the_package_where_it_is_proved() -> None:
    noise = 2 * math.sqrt(5)
    event = WithoutReplacement(1000).amplify(gaussian(noise), num_records=100_000)
    found = dict(zip(*RDP.curve(event, ONE), strict=True))
    for alpha in (2.0, 5.0, 11.0):
        assert truncated_rdp(alpha, rate=0.01, noise_multiplier=noise) >= found[alpha]


def test_the_conditions_of_proposition_e_3() -> None:
    for noise in (1.2, 2.4, 4.47):  # B uses 1.2, at which it is unproved
        with pytest.raises(Refused, match=r"√5 and rate < 0\.1 for Proposition E\.3, got"):
            truncated_rdp(2.0, rate=0.01, noise_multiplier=noise)
    with pytest.raises(Refused, match=r"and 0\.1; use the rdp accountant"):
        truncated_rdp(2.0, rate=0.1, noise_multiplier=6.0)
    with pytest.raises(Refused, match=r"expected 1 < α < .* got α = 25"):
        truncated_rdp(25.0, rate=0.01, noise_multiplier=6.0)


def test_the_conditions_of_the_source_follow_from_two_of_them() -> None:
    """Bun et al. 2018, Theorem 11, has four; at ρ, γ <= 0.1 the last two hold by themselves."""
    for rho in (1e-6, 1e-3, 0.03, 0.1):
        for rate in (1e-6, 1e-3, 0.1):
            assert math.log(1 / rate) >= 3 * rho * (2 + math.log2(1 / rho))
            assert math.log(1 / rate) >= 6 * rho
    assert math.log(1 / 0.9) < 3 * 0.1 * (2 + math.log2(1 / 0.1))  # not at every rate


# --- quantile-adaptive clipping ---


@given(noise=st.floats(0.1, 50), share=st.floats(1.01, 1e4))
def test_the_sum_and_its_count_together_are_the_noise_asked_for(noise: float, share: float) -> None:
    count = share * noise
    left = adaptive_clipping_multiplier(noise, count_noise=count / 2)
    assert left > noise
    assert joint_multiplier([left, count]) == pytest.approx(noise, rel=1e-9)


def test_the_paper_s_choice_costs_next_to_nothing() -> None:
    """σ_b is a twentieth of 100 clients: 5, and z = 1 becomes 1.005 on the sum."""
    assert adaptive_clipping_multiplier(1.0, count_noise=5.0) == pytest.approx(0.99**-0.5)


@pytest.mark.parametrize("count", [0.5, 0.3, 0.0, -5.0, math.inf, math.nan])
def test_a_count_that_costs_everything_is_refused(count: float) -> None:
    with pytest.raises(Refused, match="expected 0 < noise_multiplier < 2 count_noise"):
        adaptive_clipping_multiplier(1.0, count_noise=count)
