"""One of several events, drawn in public: the mean of their δ, and no less."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, DpEvent, NonPrivateDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from hushgrad import Refused, Relation
from hushgrad.accounting import (
    GDP,
    PLD,
    RDP,
    ZCDP,
    Accountant,
    MixedDpEvent,
    Pld,
    PureDpEvent,
    ShuffledDpEvent,
    Target,
    gaussian,
    group_epsilon,
    least_noise,
    poisson,
    repeated,
    uniformly_stopped,
)
from hushgrad.accounting.closed_forms import gaussian_delta, gaussian_epsilon
from hushgrad.ledger.spending import event_from_json, event_to_json
from hushgrad.sampling import Shuffled, TruncatedPoisson

DELTA = 1e-5
ADD, ONE, ZERO = Relation.ADD_REMOVE, Relation.REPLACE_ONE, Relation.ZERO_OUT
QUICK = Pld(1e-3)


def rounds_of(event: DpEvent) -> Callable[[int], DpEvent]:
    return lambda number: repeated(number, event)


def brute_delta(noise: float, steps: int, epsilon: float) -> float:
    """The mean over t of the exact δ of t Gaussian releases."""
    found = [gaussian_delta(noise / math.sqrt(t), epsilon=epsilon) for t in range(1, steps + 1)]
    return math.fsum(found) / steps


# --- against brute force ---


@pytest.mark.parametrize("steps", [1, 2, 5, 17])
@pytest.mark.parametrize("epsilon", [0.2, 0.5, 1.0])
def test_delta_is_the_mean_of_the_exact_deltas(steps: int, epsilon: float) -> None:
    run = uniformly_stopped(rounds_of(gaussian(3.0)), steps)
    exact = brute_delta(3.0, steps, epsilon)
    found = QUICK.delta(run, epsilon=epsilon)
    assert exact * (1 - 1e-9) <= found <= exact * 1.001 + 1e-12
    assert epsilon * (1 - 1e-9) <= QUICK.epsilon(run, delta=exact) <= epsilon + 1e-3


def test_delta_is_the_divergence_of_the_pair_that_leaves() -> None:
    """(index, output) integrated outright, for two events with unequal probabilities."""
    run, epsilon = MixedDpEvent((gaussian(1.0), gaussian(0.6)), (0.8, 0.2)), 1.0

    def excess(x: float) -> float:
        parts = [
            chance * (stats.norm.pdf(x, 1, noise) - math.exp(epsilon) * stats.norm.pdf(x, 0, noise))
            for noise, chance in ((1.0, 0.8), (0.6, 0.2))
        ]
        return math.fsum(max(part, 0.0) for part in parts)

    exact, _ = integrate.quad(excess, -10, 12, limit=500)
    assert exact * (1 - 1e-6) <= PLD.delta(run, epsilon=epsilon) <= exact * 1.001


def test_poisson_sampling_in_a_mixture_is_the_mean_of_each() -> None:
    step = poisson(0.05, gaussian(1.2))
    run = uniformly_stopped(rounds_of(step), 6)
    for relation in (ADD, ONE, ZERO):
        each = [QUICK.delta(repeated(t, step), epsilon=1.0, relation=relation) for t in range(1, 7)]
        found = QUICK.delta(run, epsilon=1.0, relation=relation)
        assert found == pytest.approx(np.mean(each), rel=1e-6)


def test_rdp_is_the_divergence_at_each_order() -> None:
    run = MixedDpEvent((gaussian(1.0), gaussian(3.0)), (0.25, 0.75))
    orders, values = RDP.curve(run, ADD)
    for order, value in zip(orders, values, strict=True):
        first, second = ((order - 1) * order / (2 * z**2) for z in (1.0, 3.0))
        if first < 700:
            exact = math.log(0.25 * math.exp(first) + 0.75 * math.exp(second)) / (order - 1)
            assert value == pytest.approx(exact, rel=1e-9)
        else:  # there the dearer event is all that counts
            assert value == pytest.approx((first + math.log(0.25)) / (order - 1), rel=1e-9)


@pytest.mark.parametrize("accountant", [QUICK, RDP], ids=lambda a: a.name)
@pytest.mark.parametrize("relation", [ADD, ZERO])
def test_equal_events_are_that_event(accountant: Accountant, relation: Relation) -> None:
    event = repeated(20, poisson(0.1, gaussian(1.5)))
    run = MixedDpEvent((event,) * 5, (0.1, 0.2, 0.3, 0.2, 0.2))
    alone = accountant.epsilon(event, delta=DELTA, relation=relation)
    found = accountant.epsilon(run, delta=DELTA, relation=relation)
    assert found == pytest.approx(alone, rel=1e-9)


# --- how it stands to what is wrong, and to what is loose ---


@pytest.mark.parametrize("accountant", [QUICK, RDP], ids=lambda a: a.name)
def test_the_expected_number_of_rounds_understates(accountant: Accountant) -> None:
    step, steps = gaussian(10.0), 99
    run = uniformly_stopped(rounds_of(step), steps, levels=steps)
    expected = accountant.epsilon(repeated(50, step), delta=DELTA)
    found = accountant.epsilon(run, delta=DELTA)
    assert 1.15 * expected < found < accountant.epsilon(repeated(steps, step), delta=DELTA)
    # By exact arithmetic: at the ε of the expected number, the true δ is ten times the claimed one.
    claimed = gaussian_epsilon(10 / math.sqrt(50), delta=DELTA)
    assert brute_delta(10.0, steps, claimed) > 10 * DELTA


def test_rounding_up_overstates_a_little() -> None:
    rounds = rounds_of(poisson(0.02, gaussian(2.0)))
    for accountant, steps in ((RDP, 640), (QUICK, 80)):
        fine, coarse = (
            accountant.epsilon(uniformly_stopped(rounds, steps, levels=levels), delta=DELTA)
            for levels in (steps, steps // 10)
        )
        assert fine < coarse < 1.1 * fine


@settings(max_examples=8)
@given(
    noise=st.floats(0.8, 5),
    steps=st.integers(1, 12),
    levels=st.integers(1, 12),
    more=st.floats(1, 2),
)
def test_it_lies_between_the_first_round_and_all(
    noise: float, steps: int, levels: int, more: float
) -> None:
    def spent(noise: float, levels: int) -> float:
        run = uniformly_stopped(rounds_of(gaussian(noise)), steps, levels=levels)
        return QUICK.delta(run, epsilon=1.0)

    here = spent(noise, levels)
    ends = [QUICK.delta(repeated(t, gaussian(noise)), epsilon=1.0) for t in (1, steps)]
    assert ends[0] <= here * (1 + 1e-9) and here <= ends[1] * (1 + 1e-9) + 1e-12
    assert here >= brute_delta(noise, steps, 1.0) * (1 - 1e-9)
    assert spent(more * noise, levels) <= here * (1 + 1e-9) + 1e-12
    assert spent(noise, steps) <= here * (1 + 1e-9) + 1e-12


@settings(max_examples=10)
@given(chances=st.lists(st.floats(0, 1), min_size=2, max_size=6).filter(lambda p: sum(p) > 0.1))
def test_any_public_distribution_is_its_mean(chances: list[float]) -> None:
    total = math.fsum(chances)
    shares = [p / total for p in chances]
    shares[shares.index(max(shares))] += 1 - math.fsum(shares)
    events = [gaussian(4.0 / (k + 1)) for k in range(len(shares))]
    run = MixedDpEvent(tuple(events), tuple(shares))
    exact = math.fsum(p * gaussian_delta(4.0 / (k + 1), epsilon=1.0) for k, p in enumerate(shares))
    assert exact * (1 - 1e-9) <= QUICK.delta(run, epsilon=1.0) <= exact * 1.01 + 1e-9
    # RDP is looser at every distribution.
    assert RDP.epsilon(run, delta=DELTA) >= QUICK.epsilon(run, delta=DELTA) - 1e-2


# --- composition, relations, groups ---


def test_composition_is_left_to_rdp() -> None:
    run = uniformly_stopped(rounds_of(gaussian(8.0)), 10)
    for event in (
        ComposedDpEvent([run, gaussian(4.0)]),
        repeated(2, run),
        MixedDpEvent((repeated(2, run), gaussian(1.0)), (0.5, 0.5)),
    ):
        assert not PLD.supports(event, ADD)
        with pytest.raises(Refused, match=r"composed with other events; use the rdp accountant"):
            PLD.epsilon(event, delta=DELTA)
    both = RDP.curve(ComposedDpEvent([run, gaussian(4.0)]), ADD)[1]
    alone = RDP.curve(run, ADD)[1] + RDP.curve(gaussian(4.0), ADD)[1]
    np.testing.assert_allclose(both, alone, rtol=1e-12)


def test_a_mixture_of_mixtures_is_a_mixture() -> None:
    one, two, three = gaussian(1.0), gaussian(2.0), gaussian(3.0)
    nested = MixedDpEvent((MixedDpEvent((one, two), (0.5, 0.5)), three), (0.4, 0.6))
    flat = MixedDpEvent((one, two, three), (0.2, 0.2, 0.6))
    for accountant in (PLD, RDP):
        found = [accountant.epsilon(event, delta=DELTA) for event in (nested, flat)]
        assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_what_is_not_covered_inside_a_mixture_is_refused() -> None:
    shuffled = uniformly_stopped(
        lambda t: Shuffled(10).run_event(gaussian(4.0), num_records=100, num_steps=t), 30
    )
    for accountant in (PLD, RDP, ZCDP, GDP):
        with pytest.raises(Refused):
            accountant.epsilon(shuffled, delta=DELTA)
    assert PLD.epsilon(shuffled, delta=DELTA, relation=ONE) < gaussian_epsilon(
        4.0 / 2 / math.sqrt(3), delta=DELTA
    )
    with pytest.raises(
        Refused, match="got one of several events, drawn at random; use the pld or rdp"
    ):
        ZCDP.epsilon(uniformly_stopped(rounds_of(gaussian(8.0)), 10), delta=DELTA)
    sampled = uniformly_stopped(rounds_of(poisson(0.1, gaussian(2.0))), 10)
    with pytest.raises(Refused, match="use the pld accountant"):
        RDP.epsilon(sampled, delta=DELTA, relation=ONE)


def test_a_drawn_event_without_noise_costs_its_probability() -> None:
    run = MixedDpEvent((NonPrivateDpEvent(), gaussian(2.0)), (1e-6, 1 - 1e-6))
    assert PLD.delta(run, epsilon=50.0) == pytest.approx(1e-6)
    assert PLD.epsilon(run, delta=1e-7) == math.inf
    assert PLD.epsilon(run, delta=DELTA) > PLD.epsilon(gaussian(2.0), delta=DELTA)
    assert RDP.epsilon(run, delta=DELTA) == math.inf


def test_a_group_is_grouped_in_each_event() -> None:
    run = uniformly_stopped(rounds_of(gaussian(30.0)), 12)
    halved = uniformly_stopped(rounds_of(gaussian(15.0)), 12)
    found = group_epsilon(run, size=2, delta=DELTA)
    assert found == pytest.approx(PLD.epsilon(halved, delta=DELTA), rel=1e-9)
    sampled = MixedDpEvent((repeated(5, poisson(0.1, gaussian(3.0))), gaussian(9.0)), (0.5, 0.5))
    both = [group_epsilon(sampled, size=k, delta=DELTA) for k in (1, 2, 3)]
    assert both == sorted(both)
    cut = TruncatedPoisson(0.01, 150).amplify(gaussian(4.0), num_records=10_000)
    with pytest.raises(Refused, match="use replace-one"):
        group_epsilon(MixedDpEvent((cut, gaussian(4.0)), (0.5, 0.5)), size=2, delta=DELTA)


def test_a_stopped_run_is_calibrated() -> None:
    """A first release at the same multiplier, then as many as are drawn: DP-SRM's shape."""

    def run(noise: float) -> DpEvent:
        first, later = poisson(0.2, gaussian(noise)), poisson(0.01, gaussian(noise))
        return uniformly_stopped(
            lambda t: ComposedDpEvent([first, repeated(t - 1, later)]), 2000, levels=16
        )

    noise, spent = least_noise(run, Target(2.0, DELTA, accountant=RDP))
    assert spent == RDP.epsilon(run(noise), delta=DELTA) <= 2.0
    assert RDP.epsilon(run(0.998 * noise), delta=DELTA) > 2.0


def test_a_ledger_keeps_it() -> None:
    run = ComposedDpEvent(
        [uniformly_stopped(rounds_of(gaussian(8.0)), 5), ShuffledDpEvent(2, gaussian(1.0))]
    )
    assert event_from_json(event_to_json(run)) == run


# --- what makes no mixture ---


@pytest.mark.parametrize(
    "chances", [(0.5,), (0.5, 0.6), (0.4, 0.5), (-0.5, 1.5), (math.nan, 1.0), ()]
)
def test_what_is_no_distribution_raises(chances: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected (one probability for each|probabilities of 0)"):
        MixedDpEvent((gaussian(1.0), gaussian(2.0)), chances)


def test_rounds_that_are_no_prefixes_are_refused() -> None:
    with pytest.raises(Refused, match=r"expected rounds\(t\) to hold every event of rounds\(t - 1"):
        uniformly_stopped(lambda t: PureDpEvent(0.1 * t), 10)
    with pytest.raises(ValueError, match="expected steps and levels of 1 or more, got 0 and 64"):
        uniformly_stopped(rounds_of(gaussian(1.0)), 0)
