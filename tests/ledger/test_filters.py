"""The two filters: what a spend counts, what a budget allows, what is left."""

from __future__ import annotations

import math

import pytest
from dp_accounting import dp_event
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from hypothesis import given
from hypothesis import strategies as st

from charged_runs import event, spend
from hushgrad.accounting import (
    PLD,
    RDP,
    PureDpEvent,
    ShuffledDpEvent,
    gaussian,
    poisson,
    repeated,
    uniformly_stopped,
)
from hushgrad.ledger import Spend, order_for, renyi, total
from hushgrad.ledger.records import figure
from hushgrad.ledger.rules import left_of, rule_named
from hushgrad.ledger.spending import event_from_json, event_to_json
from hushgrad.sampling import TruncatedPoisson, WithoutReplacement
from hushgrad.types import Refused, Relation

CUT = TruncatedPoisson(0.1, 20).amplify(gaussian(1.0), num_records=100)


def test_the_total_counts_epsilon_and_delta() -> None:
    assert total().cost(spend(0.7, 3e-6)) == (0.7, 3e-6)
    assert total().limit(3.0, 1e-5) == (3.0, 1e-5)


@pytest.mark.parametrize("order", [1.5, 2.0, 6.9, 32.0])
def test_renyi_counts_what_the_accountant_says_at_this_order(order: float) -> None:
    # One Gaussian has α/(2σ²), whatever the order.
    one = Spend(gaussian(3.0), Relation.ADD_REMOVE, 0.0, 0.0)
    assert renyi(order).cost(one)[0] == pytest.approx(order / 18, rel=1e-9)
    doubled = Spend(gaussian(3.0), Relation.REPLACE_ONE, 0.0, 0.0)
    assert renyi(order).cost(doubled)[0] == pytest.approx(4 * order / 18, rel=1e-9)


@given(epsilon=st.floats(0.5, 20), delta=st.floats(1e-10, 1e-3), order=st.floats(2.0, 200))
def test_a_budget_converts_to_the_most_that_keeps_it(
    epsilon: float, delta: float, order: float
) -> None:
    try:
        (most,) = renyi(order).limit(epsilon, delta)
    except ValueError:
        assert compute_epsilon([order], [1e-3], delta)[0] > epsilon - 1e-3
        return
    assert compute_epsilon([order], [most], delta)[0] <= epsilon
    assert compute_epsilon([order], [most + 1e-6], delta)[0] > epsilon


def test_an_order_too_small_for_the_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match="larger order"):
        renyi(2.0).limit(1.0, 1e-5)
    with pytest.raises(ValueError, match=r"above 1\.01"):
        renyi(1.0)


def test_the_order_of_a_typical_run_is_where_it_costs_least() -> None:
    run = repeated(2000, poisson(0.01, gaussian(1.1)))
    best = order_for(run, delta=1e-5)
    cost = Spend(run, Relation.ADD_REMOVE, 0.0, 0.0)

    def epsilon_at(order: float) -> float:
        return float(compute_epsilon([order], [renyi(order).cost(cost)[0]], 1e-5)[0])

    assert epsilon_at(best) == pytest.approx(RDP.epsilon(run, delta=1e-5), rel=1e-9)
    assert epsilon_at(best) < min(epsilon_at(best / 2), epsilon_at(2 * best))


def test_a_bad_order_costs_much_more_than_a_good_one() -> None:
    run = repeated(4688, poisson(512 / 60_000, gaussian(1.0683)))  # ε = 3 by PLD, as the docs say
    assert PLD.epsilon(run, delta=1e-5) == pytest.approx(3.0, abs=0.01)
    cost = Spend(run, Relation.ADD_REMOVE, 0.0, 0.0)
    good = order_for(run, delta=1e-5)
    at = {a: compute_epsilon([a], [renyi(a).cost(cost)[0]], 1e-5)[0] for a in (good, 64.0)}
    assert 3.2 < at[good] < 3.6
    assert at[64.0] > 100


def test_what_renyi_does_not_cover_is_refused_with_the_remedy() -> None:
    with pytest.raises(Refused, match="filter total, which covers every event"):
        renyi(8.0).cost(Spend(CUT, Relation.ADD_REMOVE, 1.0, 1e-5))
    with pytest.raises(Refused, match="filter total"):
        order_for(CUT, delta=1e-5)
    assert total().cost(Spend(CUT, Relation.ADD_REMOVE, 1.0, 1e-5)) == (1.0, 1e-5)


def test_a_run_without_noise_has_no_cost_that_fits() -> None:
    assert renyi(8.0).cost(Spend(dp_event.NonPrivateDpEvent(), Relation.ADD_REMOVE, 0, 0)) == (
        math.inf,
    )


@given(
    most=st.floats(0.1, 10),
    shares=st.lists(st.floats(0, 0.3), max_size=8),
)
def test_all_that_is_left_can_be_spent_at_once(most: float, shares: list[float]) -> None:
    costs = [(most * share,) for share in shares]
    (left,) = left_of((most,), costs)
    if left > 0:
        assert math.fsum([c for (c,) in costs] + [left]) <= most
    assert left == pytest.approx(max(0.0, most - sum(c for (c,) in costs)), abs=1e-12 * most)


@pytest.mark.parametrize(
    "which",
    [
        event(),
        dp_event.ComposedDpEvent([gaussian(1.0), PureDpEvent(0.5)]),
        ShuffledDpEvent(3, gaussian(2.0)),
        WithoutReplacement(10).amplify(gaussian(1.0), num_records=100),
        CUT,
        uniformly_stopped(event, 4),
        dp_event.NonPrivateDpEvent(),
    ],
    ids=lambda which: type(which).__name__,
)
def test_an_event_is_read_as_it_was_written(which: dp_event.DpEvent) -> None:
    assert event_from_json(event_to_json(which)) == which


def test_an_event_that_cannot_be_read_again_is_refused() -> None:
    class Strange(dp_event.DpEvent):  # type: ignore[misc]
        pass

    with pytest.raises(Refused, match="able to read it again"):
        event_to_json(Strange())
    with pytest.raises(Refused, match="this version knows"):
        event_from_json('["os.system", {}]')
    with pytest.raises(Refused, match="total or renyi"):
        rule_named("other", None)


@pytest.mark.parametrize(("epsilon", "delta"), [(-1.0, 0.1), (math.nan, 0.1), (1.0, -0.1), (1, 2)])
def test_a_spend_is_a_cost(epsilon: float, delta: float) -> None:
    with pytest.raises(ValueError, match="what an accountant says"):
        spend(epsilon, delta)


@given(value=st.floats(1e-12, 1e12))
def test_figures_are_rounded_to_the_safe_side(value: float) -> None:
    assert float(figure(value)) <= value <= float(figure(value, up=True))
    assert float(figure(value)) == pytest.approx(value, rel=1e-5)
