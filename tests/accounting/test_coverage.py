"""Every sampling × relation × accountant: the figure, or the refusal with its remedy."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.dp_event import (
    NoOpDpEvent,
    RandomizedResponseDpEvent,
    RepeatAndSelectDpEvent,
    SampledWithReplacementDpEvent,
    ZCDpEvent,
)
from scipy.stats import binom, hypergeom, norm

from hushgrad import Refused, Relation
from hushgrad.accounting import (
    ACCOUNTANTS,
    PLD,
    RDP,
    Accountant,
    Pld,
    PureDpEvent,
    ShuffledDpEvent,
    gaussian,
    joint_multiplier,
    poisson,
    repeated,
)
from hushgrad.accounting.closed_forms import gaussian_epsilon
from hushgrad.sampling import Shuffled, TruncatedPoisson, WithoutReplacement

DELTA = 1e-5
ADD, ONE, ZERO = Relation.ADD_REMOVE, Relation.REPLACE_ONE, Relation.ZERO_OUT

EVENTS: dict[str, DpEvent] = {
    "full": gaussian(2.0),
    "poisson": poisson(0.05, gaussian(2.0)),
    "truncated": TruncatedPoisson(0.05, 70).amplify(gaussian(2.0), num_records=1000),
    "fixed size": WithoutReplacement(50).amplify(gaussian(2.0), num_records=1000),
    "shuffled": Shuffled(50).run_event(gaussian(2.0), num_records=1000, num_steps=41),
    "with replacement": SampledWithReplacementDpEvent(1000, 50, gaussian(2.0)),
    "laplace": LaplaceDpEvent(2.0),
    "poisson laplace": PoissonSampledDpEvent(0.05, LaplaceDpEvent(2.0)),
    "pure": PureDpEvent(0.5),
    "response": RandomizedResponseDpEvent(0.5, 2),
    "zcdp": ZCDpEvent(0.1),
    "select": RepeatAndSelectDpEvent(gaussian(2.0), 10, 1),
}
# Which accountants cover what, as tried against dp_accounting 0.6.
ALL, BOTH = {"pld", "rdp", "gdp", "zcdp"}, {"pld", "rdp"}
COVERED: dict[str, dict[Relation, set[str]]] = {
    "full": {ADD: ALL, ONE: ALL, ZERO: ALL},
    "poisson": {ADD: BOTH | {"gdp"}, ONE: {"pld"}, ZERO: BOTH | {"gdp"}},
    "truncated": {ADD: {"pld"}, ONE: {"pld"}, ZERO: {"pld"}},
    "fixed size": {ADD: set(), ONE: {"rdp"}, ZERO: set()},
    "shuffled": {ADD: set(), ONE: ALL, ZERO: ALL},
    "with replacement": {ADD: set(), ONE: set(), ZERO: set()},
    "laplace": {ADD: BOTH | {"zcdp"}, ONE: {"rdp", "zcdp"}, ZERO: BOTH | {"zcdp"}},
    "poisson laplace": {ADD: {"pld"}, ONE: set(), ZERO: {"pld"}},
    "pure": {relation: BOTH | {"zcdp"} for relation in Relation},
    "response": {ADD: set(), ONE: BOTH, ZERO: BOTH},
    "zcdp": {relation: {"rdp", "zcdp"} for relation in Relation},
    "select": {relation: {"rdp"} for relation in Relation},
}
CASES = [
    pytest.param(name, relation, accountant, id=f"{name}-{relation.value}-{accountant}")
    for name in EVENTS
    for relation in Relation
    for accountant in ACCOUNTANTS
]


@pytest.mark.parametrize(("name", "relation", "accountant"), CASES)
def test_what_is_not_covered_is_refused(name: str, relation: Relation, accountant: str) -> None:
    asked, event = ACCOUNTANTS[accountant], EVENTS[name]
    covered = accountant in COVERED[name][relation]
    assert asked.supports(event, relation) is covered
    run = ComposedDpEvent([SelfComposedDpEvent(event, 2)])
    assert asked.supports(run, relation) is covered
    if covered:
        return
    with pytest.raises(Refused, match=f"an event that the {accountant} accountant covers") as told:
        asked.epsilon(run, delta=DELTA, relation=relation)
    with pytest.raises(Refused):
        asked.delta(run, epsilon=1.0, relation=relation)
    remedy = str(told.value).split("; use ")[1]
    for other in {"pld", "rdp"} & COVERED[name][relation]:
        assert other in remedy
    assert f"under {relation.value}, got " in str(told.value)


REFUSALS: list[tuple[str, Relation, Accountant, str]] = [
    ("fixed size", ADD, PLD, "use rdp under replace-one, or Poisson sampling under add-remove"),
    ("fixed size", ONE, PLD, "use the rdp accountant"),
    ("fixed size", ZERO, RDP, "use rdp under replace-one, or Poisson sampling under zero-out"),
    ("poisson", ONE, RDP, "use the pld accountant"),
    ("truncated", ADD, RDP, "use the pld accountant"),
    ("laplace", ONE, PLD, "use the rdp accountant"),
    ("with replacement", ONE, PLD, "use Gaussian noise and Poisson sampling"),
    ("poisson laplace", ONE, RDP, "use pld under add-remove, or pld under zero-out"),
]


@pytest.mark.parametrize(("name", "relation", "accountant", "remedy"), REFUSALS)
def test_a_refusal_names_the_remedy(
    name: str, relation: Relation, accountant: Accountant, remedy: str
) -> None:
    with pytest.raises(Refused) as told:
        accountant.epsilon(EVENTS[name], delta=DELTA, relation=relation)
    assert str(told.value).endswith(f"; {remedy}")


def test_shuffled_batches_are_never_add_remove() -> None:
    with pytest.raises(Refused, match="got shuffled batches of Gaussian noise; use pld under repl"):
        PLD.epsilon(EVENTS["shuffled"], delta=DELTA)


def test_the_ban_on_add_remove_is_in_the_event_itself() -> None:
    """Also of a step by itself, of part of an epoch, and inside other events."""
    sampling = Shuffled(50)
    step = sampling.amplify(gaussian(2.0), num_records=1000)
    part = sampling.run_event(gaussian(2.0), num_records=1000, num_steps=1)
    for event in (step, part, ComposedDpEvent([gaussian(2.0), repeated(3, step)])):
        for accountant in ACCOUNTANTS.values():
            with pytest.raises(Refused):
                accountant.epsilon(event, delta=DELTA)
            assert accountant.epsilon(event, delta=DELTA, relation=ONE) > 0


def test_next_to_no_noise_is_refused_by_the_grid_and_bounded_by_renyi() -> None:
    event = dp_accounting.GaussianDpEvent(1e-9)
    with pytest.raises(Refused, match="more noise"):
        PLD.epsilon(event, delta=1e-5)
    assert RDP.epsilon(event, delta=1e-5) >= 1 / (2 * 1e-9**2)


def test_nothing_costs_nothing() -> None:
    assert repeated(0, gaussian(1.0)) == NoOpDpEvent()
    none = Shuffled(50).run_event(gaussian(2.0), num_records=1000, num_steps=0)
    for accountant in ACCOUNTANTS.values():
        assert accountant.epsilon(none, delta=DELTA) == pytest.approx(0, abs=1e-6)


# --- what the same noise means ---


@pytest.mark.parametrize(
    ("accountant", "relation", "epsilon"),
    [
        (PLD, ADD, 1.9931),
        (PLD, ONE, 4.3772),
        (PLD, ZERO, 1.9931),
        (RDP, ADD, 2.1657),
        (RDP, ONE, 4.7285),
        (RDP, ZERO, 2.1657),
    ],
)
def test_replace_one_doubles_the_sensitivity_once(
    accountant: Accountant, relation: Relation, epsilon: float
) -> None:
    """noise/C = 2. Forgetting to double says 1.99 or 2.17, doubling twice 9.997."""
    found = accountant.epsilon(gaussian(2.0), delta=DELTA, relation=relation)
    assert round(found, 4) == epsilon


@pytest.mark.parametrize("accountant", list(ACCOUNTANTS.values()), ids=lambda a: a.name)
def test_replace_one_is_add_remove_at_half_the_noise(accountant: Accountant) -> None:
    twice = accountant.epsilon(gaussian(2.0), delta=DELTA, relation=ONE)
    assert twice == pytest.approx(accountant.epsilon(gaussian(1.0), delta=DELTA), rel=1e-6)
    passes = accountant.epsilon(ShuffledDpEvent(4, gaussian(4.0)), delta=DELTA, relation=ONE)
    assert passes == pytest.approx(twice, rel=1e-6)
    assert passes >= gaussian_epsilon(1.0, delta=DELTA) * (1 - 1e-6)


def test_fixed_size_sampling_is_told_noise_over_sensitivity() -> None:
    package = dp_accounting.rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    ).compose(
        dp_accounting.SampledWithoutReplacementDpEvent(1000, 50, dp_accounting.GaussianDpEvent(1.0))
    )
    found = RDP.epsilon(EVENTS["fixed size"], delta=DELTA, relation=ONE)
    assert found == pytest.approx(package.get_epsilon(DELTA))


def test_a_batch_of_everything_is_full_batch() -> None:
    whole = WithoutReplacement(1000).amplify(gaussian(4.0), num_records=1000)
    found = RDP.epsilon(whole, delta=DELTA, relation=ONE)
    assert found == pytest.approx(RDP.epsilon(gaussian(4.0), delta=DELTA, relation=ONE), rel=1e-6)
    assert poisson(1.0, gaussian(4.0)) == gaussian(4.0)


def test_repeat_and_select_is_told_noise_over_sensitivity() -> None:
    inner = ComposedDpEvent([SelfComposedDpEvent(gaussian(2.0), 3)])
    halved = ComposedDpEvent([SelfComposedDpEvent(gaussian(1.0), 3)])
    one, add = (RepeatAndSelectDpEvent(event, 10, 1) for event in (inner, halved))
    assert RDP.epsilon(one, delta=DELTA, relation=ONE) == RDP.epsilon(add, delta=DELTA)


def test_cutting_batches_costs_and_less_the_later_they_are_cut() -> None:
    plain = PLD.epsilon(repeated(50, poisson(0.05, gaussian(2.0))), delta=DELTA)
    found = [
        PLD.epsilon(
            TruncatedPoisson(0.05, largest).run_event(
                gaussian(2.0), num_records=1000, num_steps=50
            ),
            delta=DELTA,
        )
        for largest in (50, 60, 80)
    ]
    assert found == sorted(found, reverse=True)
    assert found[-1] >= plain * (1 - 1e-6)


# --- truncated Poisson with fewer records than the public count ---


def divergence(one: Any, two: Any, epsilon: float) -> float:
    """∫ max(p − e^ε q, 0), the larger of both directions, on a grid that is fine for noise 1."""
    x = np.linspace(-20, 16, 18_001)
    p, q = ((w[:, None] * norm.pdf(x, c[:, None], 1.0)).sum(0) for w, c in (one, two))
    gaps = [np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((p, q), (q, p))]
    return float(max(gaps) * (x[1] - x[0]))


def truncated_sums(places: int, filled: int, *, rate: float, most: int, last: float) -> Any:
    """Weights and centres of the sum over a cut batch, by counting.

    Of the `places`, `filled` hold a record of −1, one holds `last` (0 if it was removed), the
    others nothing. All are drawn, and cut at random, whether they hold something or not.
    """
    weights, centres = [], []
    for drawn in range(places):  # of the places other than the last one
        for here in (0, 1):
            chance = binom.pmf(drawn, places - 1, rate) * (rate if here else 1 - rate)
            kept = min(drawn + here, most)
            stays = kept / (drawn + here) if here else 0.0
            for stayed, share in ((1, stays), (0, 1 - stays)):
                count = kept - stayed
                if share == 0 or count > drawn:
                    continue
                for full in range(count + 1):
                    weight = hypergeom.pmf(full, places - 1, filled, count)
                    weights.append(chance * share * weight)
                    centres.append(stayed * last - full)
    return np.array(weights), np.array(centres, dtype=float)


@pytest.mark.parametrize(("places", "filled"), [(12, 11), (12, 6), (12, 0)])
def test_truncation_covers_fewer_records_in_public_places(places: int, filled: int) -> None:
    """The event for the public count holds although some places are empty (see `Loader`)."""
    rate, most = 0.5, 4
    event = TruncatedPoisson(rate, most).amplify(gaussian(1.0), num_records=places)
    with_it, without = (
        truncated_sums(places, filled, rate=rate, most=most, last=last) for last in (1.0, 0.0)
    )
    assert with_it[0].sum() == pytest.approx(1)
    for epsilon in (0.2, 0.5, 1.0, 2.0):
        exact = divergence(with_it, without, epsilon)
        assert exact <= Pld(1e-3).delta(event, epsilon=epsilon) * (1 + 1e-6)


def test_truncation_of_the_records_alone_is_not_covered() -> None:
    """Were empty places left out, the event for the public count would promise too much."""
    rate, most, records, public = 0.5, 4, 5, 400
    promised = TruncatedPoisson(rate, most).amplify(gaussian(1.0), num_records=public)
    with_it, without = (
        truncated_sums(records, 0, rate=rate, most=most, last=last) for last in (1.0, 0.0)
    )
    assert divergence(with_it, without, 1.0) > 2 * Pld(1e-3).delta(promised, epsilon=1.0)


# --- what makes no event ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gaussian(0.0), "expected noise_multiplier > 0 and finite, got 0.0"),
        (lambda: gaussian(float("nan")), "expected noise_multiplier > 0 and finite, got nan"),
        (lambda: poisson(0.0, gaussian(1.0)), r"expected 2\*\*-32 <= rate <= 1, got 0.0"),
        (lambda: poisson(2.0, gaussian(1.0)), r"expected 2\*\*-32 <= rate <= 1, got 2.0"),
        (lambda: repeated(-1, gaussian(1.0)), "expected a whole number of steps, 0 or more, got"),
        (lambda: joint_multiplier([]), "expected noise multipliers above 0"),
        (lambda: joint_multiplier([1.0, 0.0]), "expected noise multipliers above 0"),
    ],
)
def test_numbers_that_make_no_sense_raise(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- the grid of the privacy losses ---


def test_replacing_one_at_a_tiny_rate_is_not_kept_on_a_coarse_grid() -> None:
    """By (2/σ)² alone the grid would be 470 times as coarse, and ε 18.6."""
    run = repeated(10**6, poisson(1e-4, gaussian(0.5)))
    found = PLD.epsilon(run, delta=1e-6, relation=Relation.REPLACE_ONE)
    finer = Pld(5e-5).epsilon(run, delta=1e-6, relation=Relation.REPLACE_ONE)
    assert finer <= found <= 1.003 * finer
    assert found == pytest.approx(5.628, abs=0.01)


@pytest.mark.parametrize(("rate", "noise"), [(1e-4, 0.5), (0.01, 0.25), (0.3, 1.0)])
def test_one_step_of_replacing_one_is_the_exact_mixture(rate: float, noise: float) -> None:
    x = np.linspace(-14, 14, 56_001)
    ahead, behind = (
        (1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, at, noise) for at in (1, -1)
    )
    for epsilon in (0.05, 1.0):
        exact = float(np.maximum(ahead - math.exp(epsilon) * behind, 0).sum() * (x[1] - x[0]))
        step = poisson(rate, gaussian(noise))
        found = PLD.delta(step, epsilon=epsilon, relation=Relation.REPLACE_ONE)
        assert exact * (1 - 1e-6) <= found <= exact * 1.001 + 1e-12


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("noise", [5e-324, 1e-308, 1e-154, 1e154, 1e308])
@pytest.mark.parametrize("accountant", list(ACCOUNTANTS.values()), ids=lambda a: a.name)
def test_noise_that_cannot_be_squared_is_no_crash(
    accountant: Accountant, noise: float, relation: Relation
) -> None:
    found = []
    for event in (gaussian(noise), repeated(10, poisson(0.01, gaussian(noise)))):
        if accountant.supports(event, relation):
            found.append(accountant.epsilon(event, delta=1e-5, relation=relation))
    assert all(e == math.inf if noise < 1 else 0 <= e < 1e-6 for e in found)


@pytest.mark.parametrize("relation", list(Relation))
def test_many_small_losses_are_not_rounded_up_to_larger_ones(relation: Relation) -> None:
    """On a grid of 1e-4 it would be 1.86 times the Gaussian mechanism of their χ², their limit."""
    steps, rate, noise = 10**6, 1e-4, 4.0
    run = repeated(steps, poisson(rate, gaussian(noise)))
    squared = 4 * math.sinh(noise**-2) if relation is ONE else math.expm1(noise**-2)
    limit = gaussian_epsilon(1 / (rate * math.sqrt(steps * squared)), delta=1e-5)
    assert limit <= PLD.epsilon(run, delta=1e-5, relation=relation) <= 1.02 * limit


def test_steps_whose_sum_no_grid_holds_are_refused_at_once() -> None:
    for steps, rate, noise in ((10**9, 0.5, 0.5), (4 * 10**10, 0.01, 1.0), (10**12, 0.01, 1.0)):
        with pytest.raises(
            Refused,
            match=r"(enough noise for the grid|above the rounding error) of the pld accountant",
        ):
            PLD.epsilon(repeated(steps, poisson(rate, gaussian(noise))), delta=1e-5)


def test_a_thousand_million_steps_end() -> None:
    """Two hundred losses to that power is a number with two thousand million digits."""
    run = repeated(10**9, poisson(1e-6, gaussian(4.0)))
    assert 0.02 < PLD.epsilon(run, delta=1e-5) < 0.5
