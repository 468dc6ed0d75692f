"""What a ledger promises of one process: no under-count, no lost record, clear refusals."""

from __future__ import annotations

import math
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charged_runs import STEPS, event, forked, opened, spend
from hushgrad.accounting import gaussian, least_noise, poisson, repeated, uniformly_stopped
from hushgrad.ledger import UNKNOWN, Budget, Entry, Filter, Ledger, Spend, renyi, total
from hushgrad.ledger import entry as entries
from hushgrad.ledger.records import RunRow
from hushgrad.types import Refused, Relation

RULES = [total(), renyi(8.0)]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


def budget_of(ledger: Ledger, rule: Filter = RULES[0], epsilon: float = 3.0) -> Budget:
    return ledger.set_budget("census", epsilon=epsilon, delta=1e-5, rule=rule)


# --- the file ---


def test_the_file_is_private_and_complete(ledger: Ledger) -> None:
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    ledger.close()
    assert [path.name for path in ledger.path.parent.iterdir()] == ["ledger.sqlite"]


def test_the_salt_is_random_and_stays(ledger: Ledger, tmp_path: Path) -> None:
    assert len(ledger.salt) == 32
    assert Ledger(ledger.path).salt == ledger.salt == budget_of(ledger).salt
    assert Ledger(tmp_path / "other.sqlite").salt != ledger.salt


# --- budgets ---


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
    assert (budget.rule.spelled, budget.relation) == ("renyi at order 8.0", Relation.ZERO_OUT)
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


# --- charging ---


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


# --- fingerprints ---


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


# --- a run's life ---


def test_steps_are_reserved_before_they_are_noted(ledger: Ledger) -> None:
    entry = opened(budget_of(ledger))
    with pytest.raises(Refused, match="call ahead first"):
        entry.note(0, b"x")
    entry.ahead(8)
    entry.ahead(4)
    assert entry.position == 8
    for step, digest in [(3, b"one"), (3, b"two"), (3, b"one"), (7, b"three")]:
        entry.note(step, digest)
    with pytest.raises(Refused, match="below 8, got 8"):
        entry.note(8, b"x")
    assert (entry.digests(3), entry.digests(7), entry.digests(4)) == (
        [b"one", b"two"],
        [b"three"],
        [],
    )


def test_an_extra_charge_counts_and_stays(ledger: Ledger) -> None:
    budget = budget_of(ledger)
    entry = opened(budget, spend(1.0, 1e-6))
    entry.charge(spend(0.5, 2e-6), reason="step 3 came out otherwise")
    assert budget.spent == {"epsilon": 1.5, "delta": 3e-6}
    assert entry.spends == [spend(1.0, 1e-6), spend(0.5, 2e-6)]
    with pytest.raises(Refused, match=r"at most 1\.5 of epsilon"):
        entry.charge(spend(1.6, 0.0), reason="again")
    with pytest.raises(ValueError, match="expected a reason"):
        entry.charge(spend(), reason="plan")
    entry.settle(steps=0, event=None)
    assert budget.spent == {"epsilon": 0.5, "delta": 2e-6}


def test_under_the_total_an_early_end_keeps_the_plans_cost(ledger: Ledger) -> None:
    budget = budget_of(ledger)
    entry = opened(budget)
    entry.ahead(10)
    assert budget.account.reserved == (0.5, 1e-6)
    entry.settle(steps=1, event=event(1))
    assert budget.spent == {"epsilon": 0.5, "delta": 1e-6}
    assert budget.account.reserved == (0.0, 0.0)
    assert entry.settled


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_run_that_reserved_nothing_gets_all_back(ledger: Ledger, rule: Filter) -> None:
    budget = budget_of(ledger, rule)
    opened(budget).settle(steps=0, event=None)
    assert set(budget.spent.values()) == {0.0}


def rdp(steps: int) -> float:
    return RULES[1].cost(spend(steps=steps))[0]


def test_under_renyi_unused_steps_come_back(ledger: Ledger) -> None:
    budget = budget_of(ledger, RULES[1])
    entry = opened(budget)
    assert budget.spent == {"rdp": rdp(STEPS)}
    entry.ahead(30)
    entry.settle(steps=20, event=event(20))
    assert budget.spent == {"rdp": rdp(20)}
    assert rdp(20) == pytest.approx(0.4 * rdp(STEPS), rel=1e-9)


def test_under_renyi_the_cost_stays_where_the_event_is_not_told(ledger: Ledger) -> None:
    budget = budget_of(ledger, RULES[1])
    entry = opened(budget)
    entry.ahead(30)
    entry.settle(steps=20, event=None)
    assert budget.spent == {"rdp": rdp(STEPS)}


def test_under_renyi_what_was_noted_counts_whatever_is_said(ledger: Ledger) -> None:
    budget = budget_of(ledger, RULES[1])
    entry = opened(budget)
    entry.ahead(40)
    entry.note(29, b"x")
    entry.settle(steps=20, event=event(20))
    assert budget.spent == {"rdp": rdp(30)}


def test_under_renyi_a_process_that_takes_over_cannot_know_what_was_reserved(
    ledger: Ledger,
) -> None:
    budget = budget_of(ledger, RULES[1])
    opened(budget).ahead(40)
    (row,) = budget.account.rows
    resumed = budget.resume(row.id)
    resumed.settle(steps=20, event=event(20))
    assert budget.spent == {"rdp": rdp(40)}


def test_under_renyi_a_run_of_unequal_steps_keeps_its_cost_after_a_crash(ledger: Ledger) -> None:
    budget = budget_of(ledger, RULES[1])
    opened(budget).ahead(40)
    budget.resume(budget.account.rows[0].id).settle(steps=20, event=gaussian(30.0))
    assert budget.spent == {"rdp": rdp(STEPS)}


def test_under_renyi_a_drawn_number_of_steps_gives_nothing_back(ledger: Ledger) -> None:
    budget = budget_of(ledger, RULES[1])
    drawn = replace(spend(), event=uniformly_stopped(event, STEPS))
    entry = opened(budget, drawn)
    entry.ahead(STEPS)
    entry.settle(steps=1, event=event(1))
    assert budget.spent == {"rdp": RULES[1].cost(drawn)[0]}
    assert rdp(1) < budget.spent["rdp"] < rdp(STEPS)


def test_a_run_that_did_more_than_its_plan_is_refused(ledger: Ledger) -> None:
    entry = opened(budget_of(ledger, RULES[1]))
    entry.ahead(STEPS + 1)
    with pytest.raises(Refused, match="at most what the plan costs"):
        entry.settle(steps=STEPS + 1, event=event(STEPS + 1))
    with pytest.raises(ValueError, match=f"between 0 and {STEPS + 1} steps"):
        entry.settle(steps=STEPS + 2, event=event(1))
    assert not entry.settled


def test_a_settled_run_may_be_replayed_and_is_never_released_otherwise(ledger: Ledger) -> None:
    budget = budget_of(ledger, RULES[1])
    entry = opened(budget)
    entry.ahead(40)
    entry.note(19, b"x")
    entry.settle(steps=20, event=event(20))
    again = budget.resume(entry.id)
    spent = budget.spent
    again.note(19, b"x")
    again.ahead(20)
    for step, digest in [(19, b"y"), (18, b"x"), (0, b"")]:
        with pytest.raises(Refused, match=f"got another release of step {step}; start another"):
            again.note(step, digest)
    with pytest.raises(Refused, match=r"which was settled at .* got a charge"):
        again.charge(spend(), reason="step 19 came out otherwise")
    with pytest.raises(Refused, match="below 20, got 20"):
        again.note(20, b"x")
    with pytest.raises(Refused, match=r"was settled at .* with 20 steps paid for"):
        again.ahead(21)
    again.settle(steps=1, event=event(1))
    assert budget.spent == spent
    assert again.digests(19) == [b"x"]


def test_the_process_that_was_replaced_is_refused(ledger: Ledger) -> None:
    budget = budget_of(ledger)
    old = opened(budget)
    old.ahead(8)
    look = budget.entry(old.id)
    assert look.position == 8
    old.note(0, b"x")  # reading took nothing over
    new = budget.resume(old.id)
    for entry, message in ((old, "taken it over"), (look, "only reads; resume it")):
        for call in (
            entry.require_held,
            lambda entry=entry: entry.ahead(24),
            lambda entry=entry: entry.note(0, b"x"),
            lambda entry=entry: entry.charge(spend(), reason="again"),
            lambda entry=entry: entry.settle(steps=1, event=event(1)),
        ):
            with pytest.raises(Refused, match=message):
                call()
    new.require_held()
    new.note(1, b"y")
    third = budget.resume(old.id)
    with pytest.raises(Refused, match="taken it over"):
        new.note(2, b"y")
    third.settle(steps=2, event=event(2))
    with pytest.raises(Refused, match="taken it over"):
        new.settle(steps=2, event=event(2))


def test_what_resuming_costs_is_charged_as_it_is_taken_over_or_not_at_all(ledger: Ledger) -> None:
    budget = budget_of(ledger)
    old = opened(budget, spend(1.0, 1e-6))
    old.ahead(8)

    def dear(row: RunRow) -> tuple[Spend, str]:
        assert row.position == 8
        return spend(2.5, 0.0), "again"

    def refused(row: RunRow) -> None:
        raise Refused("no")

    for charge, message in ((dear, "at most 2 of epsilon"), (refused, "no")):
        with pytest.raises(Refused, match=message):
            budget.resume(old.id, charge=charge)
        old.ahead(8)  # nothing was taken over
    assert budget.spent["epsilon"] == 1.0
    new = budget.resume(old.id, charge=lambda row: (spend(1.5, 0.0), f"{row.position} steps"))
    assert [c.reason for c in budget.account.charges] == ["plan", "8 steps"]
    assert new.position == 8
    with pytest.raises(Refused, match="taken it over"):
        old.ahead(8)


def test_a_forked_process_does_not_carry_the_run_on(ledger: Ledger) -> None:
    entry = opened(budget_of(ledger))
    entry.ahead(8)

    def child() -> None:
        with pytest.raises(Refused, match="forked from it"):
            entry.note(0, b"x")

    assert os.waitpid(forked(child), 0)[1] == 0
    entry.note(0, b"x")


def test_a_copy_of_a_ledger_is_told_from_the_one_that_was_written(ledger: Ledger) -> None:
    entry = opened(budget_of(ledger))
    ledger.close()
    moved = ledger.path.with_name("moved.sqlite")
    copy = ledger.path.with_name("copy.sqlite")
    shutil.copy(ledger.path, copy)
    ledger.path.rename(moved)
    assert not Ledger(moved).budget("census").entry(entry.id).copied
    budget = Ledger(copy).budget("census")
    assert budget.entry(entry.id).copied
    assert not budget.resume(entry.id).copied  # what the other may have done is charged by now


def test_an_unknown_run_is_refused(ledger: Ledger) -> None:
    budget = budget_of(ledger)
    other = ledger.set_budget("other", epsilon=3, delta=1e-5)
    with pytest.raises(Refused, match="ledger that the run was started with"):
        budget.entry(opened(other).id)
    with pytest.raises(Refused, match="ledger that the run was started with"):
        budget.resume(opened(other).id)


def test_after_a_loss_of_power_reserved_steps_have_an_unknown_digest(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = budget_of(ledger)
    entry = opened(budget)
    entry.ahead(8)
    entry.note(0, b"x")
    assert (entry.digests(1), entry.digests(8)) == ([], [])
    monkeypatch.setattr(entries, "boot", lambda: "another")
    for resumed in (budget.entry(entry.id), budget.resume(entry.id)):
        assert resumed.digests(0) == [b"x"]
        assert resumed.digests(1) == resumed.digests(7) == [UNKNOWN]
        assert resumed.digests(8) == resumed.digests(9) == []
    resumed.ahead(16)
    assert resumed.digests(8) == []
    resumed.note(1, b"y")
    assert resumed.digests(1) == [b"y"]


# --- against a plain model ---


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
    st.sampled_from(["open", "ahead", "note", "charge", "settle", "crash"]),
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
    if what == "ahead" and (not over or number <= reserved):
        run.ahead(number)
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
                "ahead": lambda: run.ahead(number),
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
