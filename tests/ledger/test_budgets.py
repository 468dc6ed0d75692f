"""A ledger's file and budgets: what is no budget, who is refused, what is left."""

from __future__ import annotations

import math
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from charged_runs import RULES, budget_of, opened, spend
from hushgrad.accounting import gaussian, least_noise, poisson, repeated
from hushgrad.ledger import Filter, Ledger, Spend, renyi, total
from hushgrad.types import Refused, Relation


def test_the_file_is_private_and_complete(ledger: Ledger) -> None:
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    ledger.close()
    assert [path.name for path in ledger.path.parent.iterdir()] == ["ledger.sqlite"]


def test_the_salt_is_random_and_stays(ledger: Ledger, tmp_path: Path) -> None:
    assert len(ledger.salt) == 32
    assert Ledger(ledger.path).salt == ledger.salt == budget_of(ledger).salt
    assert Ledger(tmp_path / "other.sqlite").salt != ledger.salt


def test_an_unknown_budget_is_refused_with_the_names(ledger: Ledger) -> None:
    with pytest.raises(Refused, match="set one with set_budget"):
        ledger.budget("census")
    budget_of(ledger)
    with pytest.raises(Refused, match="got 'cencus'; there are census"):
        ledger.budget("cencus")


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [(0, 1e-5), (-1, 1e-5), (math.nan, 1e-5), (1, 0), (1, 1), (1, math.nan), (math.inf, 1e-5)],
)
def test_what_is_no_budget_is_an_error(ledger: Ledger, epsilon: float, delta: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        ledger.set_budget("census", epsilon=epsilon, delta=delta)
    assert ledger.names == []


@pytest.mark.parametrize("name", ["", " census", "a\nb"])
def test_what_is_no_name_is_an_error(ledger: Ledger, name: str) -> None:
    with pytest.raises(ValueError, match="name of a data set"):
        ledger.set_budget(name, epsilon=1, delta=1e-5)


def test_a_budget_can_be_raised_and_not_lowered_below_what_is_spent(ledger: Ledger) -> None:
    budget = budget_of(ledger)
    opened(budget, spend(2.0, 2e-6))
    ledger.set_budget("census", epsilon=4, delta=1e-5)
    assert budget.epsilon == 4
    ledger.set_budget("census", epsilon=2, delta=2e-6)
    for epsilon, delta in [(1.9, 1e-5), (4.0, 1.9e-6)]:
        with pytest.raises(Refused, match="cannot be taken back"):
            ledger.set_budget("census", epsilon=epsilon, delta=delta)
    assert (budget.epsilon, budget.delta) == (2, 2e-6)
    told = [line["what"] for line in ledger.history("census") if line["entry"] is None]
    assert len(told) == 3
    assert "(4, 1e-05)-DP in place of (3, 1e-05)" in told[1]


def test_filter_and_relation_are_chosen_before_the_first_run(ledger: Ledger) -> None:
    budget = budget_of(ledger)
    ledger.set_budget("census", epsilon=3, delta=1e-5, rule=RULES[1])
    ledger.set_budget("census", epsilon=3, delta=1e-5, relation=Relation.ZERO_OUT)
    assert (budget.rule.title, budget.relation) == ("renyi at order 8.0", Relation.ZERO_OUT)
    opened(budget, replace(spend(), relation=Relation.ZERO_OUT))
    for rule, relation in [(total(), None), (renyi(9.0), None), (None, Relation.ADD_REMOVE)]:
        with pytest.raises(Refused, match="before the runs"):
            ledger.set_budget("census", epsilon=9, delta=1e-5, rule=rule, relation=relation)


def test_a_budget_without_a_limit_remembers_and_refuses_nothing(ledger: Ledger) -> None:
    budget = ledger.set_budget("run", epsilon=math.inf, delta=1)
    for _ in range(3):
        opened(budget, spend(1e6, 0.9))
    opened(budget, spend(math.inf, 0.9))
    assert budget.spent["epsilon"] == math.inf
    assert len(budget.account.rows) == 4
    with pytest.raises(Refused, match="has none"):
        budget.left  # noqa: B018


def test_a_run_that_would_overspend_is_refused(ledger: Ledger) -> None:
    budget = budget_of(ledger)
    opened(budget, spend(2.0))
    before = budget.account
    with pytest.raises(Refused, match="at most 1 of epsilon, which is what the budget census has"):
        opened(budget, spend(1.1))
    with pytest.raises(Refused, match="at most 9e-06 of delta"):
        opened(budget, spend(0.1, 9.1e-6))
    assert budget.account.charges == before.charges
    assert len(ledger.history()) == 2


@pytest.mark.parametrize("parts", [3, 7, 10])
def test_equal_parts_fit_and_the_last_one_takes_what_is_left(ledger: Ledger, parts: int) -> None:
    budget = budget_of(ledger)
    for _ in range(parts - 1):
        opened(budget, spend(3 / parts, 1e-5 / parts))
    left = budget.left
    assert (left.epsilon, left.delta) == pytest.approx((3 / parts, 1e-5 / parts), rel=1e-12)
    opened(budget, spend(left.epsilon, left.delta))
    assert budget.spent == pytest.approx({"epsilon": 3.0, "delta": 1e-5}, rel=1e-12)
    with pytest.raises(Refused):
        opened(budget, spend(1e-9, 0.0))


def test_another_relation_is_refused(ledger: Ledger) -> None:
    with pytest.raises(Refused, match="plan with relation add-remove"):
        opened(budget_of(ledger), replace(spend(), relation=Relation.REPLACE_ONE))


def test_a_run_without_noise_is_refused(ledger: Ledger) -> None:
    with pytest.raises(Refused, match="got inf"):
        opened(budget_of(ledger), spend(math.inf))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_plan_for_exactly_what_is_left_is_accepted(ledger: Ledger, rule: Filter) -> None:
    budget = budget_of(ledger, rule)
    opened(budget, spend(0.7, 3e-6))
    left = budget.left

    def run(noise: float) -> object:
        return repeated(100, poisson(0.02, gaussian(noise)))

    noise, epsilon = least_noise(run, left)
    opened(budget, Spend(run(noise), left.relation, left.epsilon, left.delta))
    assert epsilon <= left.epsilon
    more, _ = least_noise(run, replace(left, epsilon=1.01 * left.epsilon))
    with pytest.raises(Refused):
        opened(budget, Spend(run(more), left.relation, 1.01 * left.epsilon, left.delta))


def test_nothing_left_is_said(ledger: Ledger) -> None:
    budget = budget_of(ledger)
    opened(budget, spend(3.0))
    with pytest.raises(Refused, match="got nothing"):
        budget.left  # noqa: B018


def test_which_of_the_two_binds(ledger: Ledger) -> None:
    budget = budget_of(ledger)
    assert budget.account.binding is None
    opened(budget, spend(0.3, 9e-6))
    assert budget.account.binding == "delta"
    opened(budget, spend(2.3, 1e-7))
    assert budget.account.binding == "delta"
    opened(budget, spend(0.2, 0.0))
    assert budget.account.binding == "epsilon"


def test_a_name_keeps_its_data_and_data_their_name(ledger: Ledger) -> None:
    census, other = budget_of(ledger), ledger.set_budget("other", epsilon=3, delta=1e-5)
    opened(census, fingerprint="")
    opened(census, fingerprint="f")
    opened(census, fingerprint="f")
    opened(census, fingerprint="")
    with pytest.raises(Refused, match="got other data"):
        opened(census, fingerprint="g")
    with pytest.raises(Refused, match="charge the run to census"):
        opened(other, fingerprint="f")
    opened(other, fingerprint="g")
    assert (len(census.account.rows), len(other.account.rows)) == (4, 1)


def test_a_refused_run_binds_no_fingerprint(ledger: Ledger) -> None:
    budget = budget_of(ledger)
    with pytest.raises(Refused):
        opened(budget, spend(9.0), fingerprint="f")
    opened(budget, fingerprint="g")
