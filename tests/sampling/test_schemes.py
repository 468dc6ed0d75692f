"""Schemes as values: replay, public divisors, events and relations."""

from __future__ import annotations

import dp_accounting as dp
import numpy as np
import pytest
from scipy import stats

from hushgrad.events import ShuffledDpEvent
from hushgrad.rng import Rng
from hushgrad.sampling import (
    FullBatch,
    Poisson,
    Sampling,
    Scheme,
    Shuffled,
    Stated,
    TruncatedPoisson,
    WithoutReplacement,
    require_relation,
)
from hushgrad.types import Refused, Relation

GAUSS = dp.GaussianDpEvent(1.3)
RANDOM = [Poisson(0.05), TruncatedPoisson(0.05, 48), WithoutReplacement(50), Shuffled(50)]
SCHEMES = [*RANDOM, FullBatch()]
NAMES = [str(scheme) for scheme in SCHEMES]


@pytest.mark.parametrize("scheme", SCHEMES, ids=NAMES)
def test_a_batch_is_ascending_and_replayed(scheme: Scheme) -> None:
    assert isinstance(scheme, Scheme) and isinstance(scheme, Sampling)
    drawn = [scheme.draw(1000, step=5, rng=Rng.fixed(1)) for _ in range(2)]
    assert (drawn[0] == drawn[1]).all()
    assert drawn[0].dtype == np.int64
    assert (np.diff(drawn[0]) > 0).all()
    assert drawn[0].min() >= 0
    assert drawn[0].max() < 1000


@pytest.mark.parametrize("scheme", RANDOM, ids=NAMES[:-1])
def test_another_step_or_key_draws_another_batch(scheme: Scheme) -> None:
    sets = {
        scheme.draw(1000, step=step, rng=rng).tobytes()
        for rng in (Rng.fixed(1), Rng.fixed(2), Rng.from_os())
        for step in range(40)
    }
    assert len(sets) == 3 * 40


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (Poisson(0.05), dp.PoissonSampledDpEvent(0.05, GAUSS)),
        (TruncatedPoisson(0.05, 48), dp.TruncatedSubsampledGaussianDpEvent(1000, 0.05, 48, 1.3)),
        (WithoutReplacement(50), dp.SampledWithoutReplacementDpEvent(1000, 50, GAUSS)),
        (FullBatch(), GAUSS),
        (Shuffled(50), ShuffledDpEvent(1, GAUSS)),
    ],
    ids=str,
)
def test_the_event_of_a_step_and_of_a_run(scheme: Scheme, expected: dp.DpEvent) -> None:
    for sampling in (scheme, Stated([], scheme)):
        assert sampling.amplify(GAUSS, num_records=1000) == expected
        run = sampling.run_event(GAUSS, num_records=1000, num_steps=41)
        epochs = ShuffledDpEvent(3, GAUSS)
        assert run == (epochs if scheme == Shuffled(50) else dp.SelfComposedDpEvent(expected, 41))


@pytest.mark.parametrize(
    ("num_steps", "epochs"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_a_shuffled_epoch_costs_one_event(num_steps: int, epochs: int) -> None:
    """1000 records in batches of 64 are 16 steps, the last of 40 records."""
    run = Shuffled(64).run_event(GAUSS, num_records=1000, num_steps=num_steps)
    assert run == ShuffledDpEvent(epochs, GAUSS)


def test_truncation_is_accounted_for_gaussian_noise_only() -> None:
    with pytest.raises(Refused, match=r"expected Gaussian noise on truncated batches, got Lapl"):
        TruncatedPoisson(0.05, 48).amplify(dp.LaplaceDpEvent(1.0), num_records=1000)


def test_truncation_costs_what_it_happens() -> None:
    """A bound that is never met costs nothing; one that is met often costs more than none."""

    def epsilon(scheme: Scheme) -> float:
        accountant = dp.pld.PLDAccountant()
        accountant.compose(scheme.run_event(GAUSS, num_records=1000, num_steps=20))
        return float(accountant.get_epsilon(1e-5))

    plain = epsilon(Poisson(0.05))
    assert epsilon(TruncatedPoisson(0.05, 150)) == pytest.approx(plain, rel=1e-3)
    assert epsilon(TruncatedPoisson(0.05, 48)) > 1.1 * plain


def test_the_divisor_is_public() -> None:
    assert Poisson(0.05).expected_batch(1000) == 50
    assert WithoutReplacement(50).expected_batch(1000) == 50
    assert Shuffled(64).expected_batch(1000) == 64
    assert FullBatch().expected_batch(1000) == 1000
    assert Stated([], Poisson(0.05)).expected_batch(1000) == 50
    sizes = np.arange(1001)
    mean = (np.minimum(sizes, 48) * stats.binom.pmf(sizes, 1000, 0.05)).sum()
    assert TruncatedPoisson(0.05, 48).expected_batch(1000) == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("scheme", [WithoutReplacement(50), Shuffled(50)], ids=str)
def test_fixed_sizes_are_never_add_remove(scheme: Scheme) -> None:
    for sampling in (scheme, Stated([], scheme)):
        with pytest.raises(Refused, match=r"expected replace-one or zero-out with .*50.*, got add"):
            require_relation(sampling, Relation.ADD_REMOVE)
        with pytest.raises(Refused, match=r"sample with Poisson\(rate\), or state the guarantee"):
            require_relation(sampling, Relation.ADD_REMOVE)
        require_relation(sampling, Relation.REPLACE_ONE)
        require_relation(sampling, Relation.ZERO_OUT)


@pytest.mark.parametrize("relation", Relation)
@pytest.mark.parametrize("scheme", [Poisson(0.1), TruncatedPoisson(0.1, 9), FullBatch()], ids=str)
def test_records_by_themselves_have_every_relation(scheme: Scheme, relation: Relation) -> None:
    require_relation(scheme, relation)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.01, 2.0**-33, float("nan"), float("inf")])
def test_what_is_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"expected 2\*\*-32 <= rate <= 1, got .*; pass batch /"):
        Poisson(rate)
    with pytest.raises(ValueError, match="<= rate <= 1"):
        TruncatedPoisson(rate, 5)


@pytest.mark.parametrize("make", [WithoutReplacement, Shuffled, lambda b: TruncatedPoisson(0.1, b)])
def test_what_is_no_batch_is_refused(make: type) -> None:
    with pytest.raises(ValueError, match=r"expected a whole (max_)?batch >= 1, got 0; pass a"):
        make(0)


@pytest.mark.parametrize("scheme", [WithoutReplacement(11), Shuffled(11)], ids=str)
def test_a_batch_larger_than_the_data_is_refused(scheme: Scheme) -> None:
    with pytest.raises(ValueError, match=r"expected batch <= num_records = 10, got 11; use Full"):
        scheme.draw(10, step=0, rng=Rng.fixed(0))


def test_a_guarantee_can_name_its_sampling() -> None:
    assert Poisson(0.01).statement == "Poisson sampling, q = 0.01"
    assert Stated([], Poisson(0.01)).statement == (
        "Poisson sampling, q = 0.01, as stated by the user"
    )
    assert Shuffled(5).statement == "shuffled epochs in batches of 5, no amplification"
