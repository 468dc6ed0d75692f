"""Any sequence of operations on a ledger agrees with a plain model."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charged_runs import RULES, STEPS, budget_of, event, opened, spend
from hushgrad.ledger import Budget, Entry, Filter, Ledger
from hushgrad.types import Refused


class Plain:
    """What a ledger has to remember, in a dictionary."""

    def __init__(self, rule: Filter, limit: tuple[float, ...]) -> None:
        self.rule, self.limit = rule, limit
        self.costs: dict[str, list[tuple[float, ...]]] = {}
        self.position: dict[str, int] = {}
        self.noted: dict[str, dict[int, list[bytes]]] = {}
        self.floor: dict[str, int] = {}
        self.settled: set[str] = set()

    def spent(self) -> tuple[float, ...]:
        every = [cost for costs in self.costs.values() for cost in costs]
        return tuple(math.fsum(cost[unit] for cost in every) for unit in range(len(self.limit)))

    def fits(self, cost: tuple[float, ...]) -> bool:
        every = [*(c for costs in self.costs.values() for c in costs), cost]
        return all(math.fsum(c[u] for c in every) <= self.limit[u] for u in range(len(self.limit)))

    def settle(self, run: str, steps: int) -> None:
        last = max(self.noted[run], default=-1)
        least = max(steps, last + 1, self.floor[run])
        if self.position[run] == 0 or (self.rule.refunds and least == 0):
            self.costs[run][0] = (0.0,) * len(self.limit)
            self.position[run] = 0
        elif self.rule.refunds:
            self.costs[run][0] = self.rule.cost(spend(steps=least))
            if least < STEPS:
                self.position[run] = least
        self.settled.add(run)


OPERATIONS = st.tuples(
    st.sampled_from(["open", "reserve", "note", "charge", "settle", "crash"]),
    st.integers(0, 5),
    st.integers(0, STEPS),
)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(operations=st.lists(OPERATIONS, max_size=30))
def test_any_sequence_agrees_with_a_plain_model(
    rule: Filter, operations: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("model") / "ledger.sqlite"
    ledger = Ledger(path)
    budget = budget_of(ledger, rule, epsilon=2.0)
    model = Plain(rule, rule.limit(2.0, 1e-5))
    runs: list[Entry] = []
    for what, which, number in operations:
        if what == "crash":
            ledger = Ledger(path)
            budget = ledger.budget("census")
            runs = [budget.resume(run.id) for run in runs]
            model.floor = dict(model.position)
        elif what == "open":
            cost = spend(0.1 + number / 100, number * 1e-7)
            if model.fits(rule.cost(cost)):
                runs.append(opened(budget, cost))
                model.costs[runs[-1].id] = [rule.cost(cost)]
                model.position[runs[-1].id] = model.floor[runs[-1].id] = 0
                model.noted[runs[-1].id] = {}
            else:
                with pytest.raises(Refused, match="plan for what is left"):
                    opened(budget, cost)
        elif which < len(runs):
            _step(model, runs[which], what, number)
        agree(model, Ledger(path).budget("census"))
    agree(model, budget)


def _step(model: Plain, run: Entry, what: str, number: int) -> None:
    reserved, over = model.position[run.id], run.id in model.settled
    if what == "reserve" and (not over or number <= reserved):
        run.reserve(number)
        model.position[run.id] = max(reserved, number)
    elif what == "note" and number < reserved and (not over or number in model.noted[run.id]):
        run.note(number, bytes([number]))
        model.noted[run.id].setdefault(number, [bytes([number])])
    elif what == "settle":
        run.settle(steps=min(number, reserved), event=event(max(1, min(number, reserved))))
        if not over:
            model.settle(run.id, min(number, reserved))
    elif what == "charge" and not over:
        cost = spend(number / 100, 0.0, steps=max(1, number // 5))
        if model.fits(model.rule.cost(cost)):
            run.charge(cost, reason="again")
            model.costs[run.id].append(model.rule.cost(cost))
        else:
            with pytest.raises(Refused, match="plan for what is left"):
                run.charge(cost, reason="again")
    else:
        again = spend(0.0, 0.0, steps=1)
        with pytest.raises(Refused):
            {
                "reserve": lambda: run.reserve(number),
                "note": lambda: run.note(number, b"x"),
                "charge": lambda: run.charge(again, reason="again"),
            }[what]()


def agree(model: Plain, budget: Budget) -> None:
    account = budget.account
    assert account.spent == pytest.approx(model.spent(), rel=1e-12)
    assert {row.id: row.position for row in account.rows} == model.position
    assert {row.id for row in account.rows if row.settled} == model.settled
    for run, noted in model.noted.items():
        assert {s: budget.entry(run).digests(s) for s in noted} == noted
    assert len(account.charges) == sum(len(costs) for costs in model.costs.values())
