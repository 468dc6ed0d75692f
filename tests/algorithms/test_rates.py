"""The papers' learning rates, noises and conditions."""

from __future__ import annotations

import math

import pytest

import hushgrad as hg
from hushgrad import Refused, Relation
from hushgrad.accounting import RDP
from hushgrad.accounting.closed_forms import recursive_momentum_noise_multiplier
from hushgrad.algorithms import Srm
from hushgrad.algorithms.rates import (
    Problem,
    clipped_rate,
    largest_clipped_rate,
    largest_normalised_rate,
    normalised_rate,
    recursive_momentum_batch,
    recursive_momentum_choice,
)
from hushgrad.clipping.rules import abadi
from hushgrad.sampling import WithoutReplacement


def test_the_rates_of_dp_nsgd_take_noise_on_the_mean() -> None:
    problem = Problem(2.0, 0.5, 0.1, 0.2)
    asked = {"steps": 100, "dimension": 10, "noise_multiplier": 2.0, "batch": 50}
    sigma = 2.0 / 50
    normalised = math.sqrt(2 / ((0.5 * (1.0 + 0.1) + 2.0) * 100 * 10 * sigma**2))
    assert normalised_rate(problem, gamma=1.0, **asked) == pytest.approx(normalised)
    literal = math.sqrt(2 / ((0.5 * 1.1 + 2.0) * 100 * 10 * 2.0**2))
    assert normalised == pytest.approx(50 * literal)
    clipping = math.sqrt(2 / ((0.5 * (3.0 + 0.1) + 2.0) * 100 * 10 * 9 * sigma**2))
    assert clipped_rate(problem, clip_norm=3.0, **asked) == pytest.approx(clipping)
    with pytest.raises(Refused, match="above the spread"):
        normalised_rate(problem, gamma=0.05, **asked)
    with pytest.raises(Refused, match="above 2τ0"):
        clipped_rate(problem, clip_norm=0.2, **asked)


def test_their_conditions_are_those_of_the_lemmas() -> None:
    problem, known = Problem(2.0, 0.5, 0.1, 0.2), {"dimension": 10, "noise": 0.4, "alpha": 0.5}
    expected = min(0.9 * 0.5 / 8, 0.8 * 0.5 / 2, 0.5 / (6 * 0.5 * 10 * 0.16))
    assert largest_normalised_rate(problem, gamma=1.0, **known) == pytest.approx(expected)
    expected = min(
        0.5 / (6 * 0.5 * 10 * 3 * 0.16),
        0.5 * 0.8 / (2 * 2 * 0.8 + 4 * 0.5 * 0.1),
        0.5 * 0.1 * 0.8 / (4 * 3 * (2 * 0.8 + 2 * 0.5 * 0.1)),
    )
    assert largest_clipped_rate(problem, clip_norm=3.0, **known) == pytest.approx(expected)
    with pytest.raises(ValueError, match="relative_spread"):
        Problem(1.0, 1.0, 0.1, 1.0)


def test_the_choice_of_theorem_5_4_has_its_rates() -> None:
    known = {"dimension": 100, "delta": 1e-5, "lipschitz": 1.0, "smoothness": 1.0, "gap": 1.0}
    small = recursive_momentum_choice(records=10**4, epsilon=1.0, **known)
    large = recursive_momentum_choice(records=8 * 10**4, epsilon=1.0, **known)
    assert large.steps / small.steps == pytest.approx(16)  # (nε)^(4/3)
    assert small.accuracy / large.accuracy == pytest.approx(4)  # (nε)^(−2/3)
    assert large.batch / small.batch == pytest.approx(4)
    assert small.gamma == pytest.approx(small.accuracy)
    doubled = recursive_momentum_choice(
        records=10**4, epsilon=1.0, **known, constants=(2.0, 1.0, 1.0, 1.0, 4.0)
    )
    assert doubled.steps == pytest.approx(2 * small.steps)
    assert doubled.gamma == pytest.approx(2 * small.gamma)


def test_corollary_5_3_is_theorem_5_1_at_its_batch() -> None:
    asked = {"records": 10**6, "epsilon": 2.0, "delta": 1e-3, "steps": 600_000}
    batch, noise = recursive_momentum_batch(**asked)
    assert batch == math.ceil(10**6 * math.sqrt(2.0 / 600_000))
    assert noise == recursive_momentum_noise_multiplier(
        2.0, delta=1e-3, steps=600_000, records=10**6, batch=batch
    )
    with pytest.raises(Refused, match="more than"):
        recursive_momentum_batch(**(asked | {"steps": 200}))
    with pytest.raises(Refused, match=r"Lemma 3\.7"):  # its O(…) hides a constant of thousands
        recursive_momentum_batch(**(asked | {"steps": 1000}))


def test_the_tight_accountant_needs_less_noise_than_theorem_5_1() -> None:
    """Side by side at the same ε, δ, batches without replacement, replace-one."""
    records, batch, steps, epsilon = 100_000, 100, 450_000, 2.0
    paper = recursive_momentum_noise_multiplier(
        epsilon, delta=1e-5, steps=steps, records=records, batch=batch
    )
    with pytest.warns(UserWarning, match="delta below 1 / records"):
        tight = hg.plan(
            records=records,
            batch=batch,
            epochs=steps * batch / records,
            delta=1e-5,
            epsilon=epsilon,
            sampling=WithoutReplacement(batch),
            relation=Relation.REPLACE_ONE,
            accountant=RDP,
            algorithm=Srm(0.01, abadi(0.01)),
        )
    assert tight.steps == steps
    assert 0.3 * paper < tight.noise_multiplier < paper


def test_theorem_5_1_does_not_cover_the_papers_own_experiment() -> None:
    """On a9a at ε = 0.5 and batches of 200 for 5 passes its condition on α fails."""
    with pytest.raises(Refused, match=r"Lemma 3\.7"):
        recursive_momentum_noise_multiplier(0.5, delta=1e-5, steps=800, records=32_561, batch=200)
