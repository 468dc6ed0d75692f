"""Several records at once: never cheaper than one, and checked against exact cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from hushgrad import Refused, Relation
from hushgrad.accounting import (
    GDP,
    PLD,
    RDP,
    Pld,
    PureDpEvent,
    ShuffledDpEvent,
    gaussian,
    group,
    group_epsilon,
    poisson,
    repeated,
)
from hushgrad.accounting.closed_forms import gaussian_epsilon
from hushgrad.sampling import TruncatedPoisson, WithoutReplacement

DELTA = 1e-5
ONE = Relation.REPLACE_ONE


def test_noise_on_everything_is_scaled_by_the_group() -> None:
    found = group_epsilon(gaussian(4.0), size=4, delta=DELTA)
    assert round(found, 4) == 4.3772
    assert round(group_epsilon(gaussian(4.0), size=2, delta=DELTA, relation=ONE), 4) == 4.3772
    passes = repeated(2, ShuffledDpEvent(2, gaussian(8.0)))
    assert group_epsilon(passes, size=2, delta=DELTA, relation=ONE) == pytest.approx(
        gaussian_epsilon(1.0, delta=DELTA), rel=1e-6
    )


def test_a_pure_step_is_scaled_by_the_group() -> None:
    assert group_epsilon(PureDpEvent(0.1), size=5, delta=1e-9) == pytest.approx(0.5, abs=1e-3)


def test_a_group_of_one_is_a_record() -> None:
    run = repeated(100, poisson(0.01, gaussian(1.0)))
    assert group_epsilon(run, size=1, delta=DELTA) == PLD.epsilon(run, delta=DELTA)


def test_poisson_sampling_counts_how_many_are_drawn() -> None:
    run = repeated(500, poisson(0.02, gaussian(4.0)))
    one, two, three = (group_epsilon(run, size=k, delta=DELTA) for k in (1, 2, 3))
    assert 2 * one < two < three
    # Drawing the group as a whole would be worse: then all of it is in the batch at once.
    together = PLD.epsilon(repeated(500, poisson(0.02, gaussian(4.0 / 2))), delta=DELTA)
    assert two < together * 1.01
    assert two < group_epsilon(run, size=2, delta=DELTA, accountant=RDP)


@pytest.mark.parametrize(
    ("size", "rate", "noise"), [(2, 0.1, 1.0), (3, 0.3, 2.0), (5, 0.01, 1.5), (60, 0.02, 4.0)]
)
def test_a_drawn_group_is_the_exact_mixture(size: int, rate: float, noise: float) -> None:
    """One step: N(0, σ²) against N(j, σ²) with j of the group in the batch, integrated."""
    x = np.linspace(-15, 20, 35_001)
    lengths = np.arange(size + 1)[:, None]
    drawn = (binom.pmf(lengths, size, rate) * norm.pdf(x, lengths, noise)).sum(0)
    none = norm.pdf(x, 0, noise)
    for epsilon in (0.3, 1.0):
        excess = [
            np.maximum(p - math.exp(epsilon) * q, 0) for p, q in ((drawn, none), (none, drawn))
        ]
        exact = max(part.sum() * (x[1] - x[0]) for part in excess)
        step, quick = poisson(rate, gaussian(noise)), Pld(1e-3)
        found = group_epsilon(step, size=size, delta=float(exact), accountant=quick)
        assert epsilon * (1 - 1e-5) <= found <= epsilon + 1e-2


@pytest.mark.parametrize(("size", "rate"), [(49, 0.3), (200, 0.01), (10**4, 0.5), (10**6, 1e-7)])
def test_numbers_drawn_from_a_large_group_are_only_rounded_up(size: int, rate: float) -> None:
    event = group._counted(4.0, size, rate)
    lengths, chances = event.sensitivities, event.sampling_probs
    assert len(lengths) < 80 and lengths[-1] == size
    assert math.fsum(chances) == pytest.approx(1.0, abs=1e-15)
    for at in range(0, size, max(1, size // 5000)):
        above = math.fsum(p for n, p in zip(lengths, chances, strict=True) if n > at)
        assert above >= binom.sf(at, size, rate) * (1 - 1e-9) - 1e-15
    mean = math.fsum(n * p for n, p in zip(lengths, chances, strict=True))
    assert mean <= 1.25 * size * rate + 1


def test_a_group_that_is_too_large_neither_hangs_nor_fills_the_memory() -> None:
    run = repeated(10, poisson(0.01, gaussian(1.0)))
    assert 1000 < group_epsilon(run, size=1000, delta=DELTA) < 1300
    with pytest.raises(Refused, match="so little that almost nothing is hidden"):
        group_epsilon(run, size=10**6, delta=DELTA)
    with pytest.raises(ValueError, match="from 1 to 1e"):
        group_epsilon(run, size=10**8, delta=DELTA)


def test_a_large_group_at_a_small_rate_has_probabilities() -> None:
    """q^k is below the rounding of their sum, which must not make it negative."""
    found = [
        group_epsilon(poisson(rate, gaussian(8.0)), size=12, delta=DELTA, accountant=Pld(1e-3))
        for rate in (0.003, 0.01, 0.03, 0.1)
    ]
    assert found == sorted(found)
    assert found[0] > 0


def test_two_records_at_a_rate_near_one_are_the_exact_mechanism() -> None:
    found = group_epsilon(poisson(1 - 1e-9, gaussian(2.0)), size=2, delta=DELTA)
    exact = gaussian_epsilon(1.0, delta=DELTA)
    assert exact * (1 - 1e-6) <= found <= exact * 1.001


def test_the_general_conversion() -> None:
    run = WithoutReplacement(100).run_event(gaussian(8.0), num_records=10_000, num_steps=100)
    one = RDP.epsilon(run, delta=DELTA, relation=ONE)
    two = group_epsilon(run, size=2, delta=DELTA, relation=ONE, accountant=RDP)
    assert two > 2 * one
    cut = TruncatedPoisson(0.01, 150).amplify(gaussian(4.0), num_records=10_000)
    assert group_epsilon(cut, size=2, delta=DELTA, relation=ONE) > 0


def test_what_a_group_refuses() -> None:
    run = repeated(100, poisson(0.01, gaussian(1.0)))
    with pytest.raises(Refused, match="got gdp, an approximation"):
        group_epsilon(run, size=2, delta=DELTA, accountant=GDP)
    with pytest.raises(
        ValueError, match="expected size to be a whole number from 1 to 1e\\+06, got 0"
    ):
        group_epsilon(run, size=0, delta=DELTA)
    cut = TruncatedPoisson(0.01, 150).amplify(gaussian(4.0), num_records=10_000)
    with pytest.raises(Refused, match="where the number of records changes; use replace-one"):
        group_epsilon(cut, size=2, delta=DELTA)
    with pytest.raises(Refused, match="expected enough noise to protect 100 records at once, got"):
        group_epsilon(run, size=100, delta=DELTA, accountant=RDP)
