"""A run's life in a ledger: reserved, noted, settled, taken over."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest

from charged_runs import RULES, STEPS, budget_of, event, forked, opened, spend
from hushgrad.accounting import gaussian, uniformly_stopped
from hushgrad.ledger import UNKNOWN, Filter, Ledger, Spend
from hushgrad.ledger import entry as entries
from hushgrad.ledger.records import RunRow
from hushgrad.types import Refused


def test_steps_are_reserved_before_they_are_noted(ledger: Ledger) -> None:
    entry = opened(budget_of(ledger))
    with pytest.raises(Refused, match="call reserve first"):
        entry.note(0, b"x")
    entry.reserve(8)
    entry.reserve(4)
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
    entry.reserve(10)
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
    entry.reserve(30)
    entry.settle(steps=20, event=event(20))
    assert budget.spent == {"rdp": rdp(20)}
    assert rdp(20) == pytest.approx(0.4 * rdp(STEPS), rel=1e-9)


def test_under_renyi_the_cost_stays_where_the_event_is_not_told(ledger: Ledger) -> None:
    budget = budget_of(ledger, RULES[1])
    entry = opened(budget)
    entry.reserve(30)
    entry.settle(steps=20, event=None)
    assert budget.spent == {"rdp": rdp(STEPS)}


def test_under_renyi_what_was_noted_counts_whatever_is_said(ledger: Ledger) -> None:
    budget = budget_of(ledger, RULES[1])
    entry = opened(budget)
    entry.reserve(40)
    entry.note(29, b"x")
    entry.settle(steps=20, event=event(20))
    assert budget.spent == {"rdp": rdp(30)}


def test_under_renyi_a_process_that_takes_over_cannot_know_what_was_reserved(
    ledger: Ledger,
) -> None:
    budget = budget_of(ledger, RULES[1])
    opened(budget).reserve(40)
    (row,) = budget.account.rows
    resumed = budget.resume(row.id)
    resumed.settle(steps=20, event=event(20))
    assert budget.spent == {"rdp": rdp(40)}


def test_under_renyi_a_run_of_unequal_steps_keeps_its_cost_after_a_crash(ledger: Ledger) -> None:
    budget = budget_of(ledger, RULES[1])
    opened(budget).reserve(40)
    budget.resume(budget.account.rows[0].id).settle(steps=20, event=gaussian(30.0))
    assert budget.spent == {"rdp": rdp(STEPS)}


def test_under_renyi_a_drawn_number_of_steps_gives_nothing_back(ledger: Ledger) -> None:
    budget = budget_of(ledger, RULES[1])
    drawn = replace(spend(), event=uniformly_stopped(event, STEPS))
    entry = opened(budget, drawn)
    entry.reserve(STEPS)
    entry.settle(steps=1, event=event(1))
    assert budget.spent == {"rdp": RULES[1].cost(drawn)[0]}
    assert rdp(1) < budget.spent["rdp"] < rdp(STEPS)


def test_a_run_that_did_more_than_its_plan_is_refused(ledger: Ledger) -> None:
    entry = opened(budget_of(ledger, RULES[1]))
    entry.reserve(STEPS + 1)
    with pytest.raises(Refused, match="at most what the plan costs"):
        entry.settle(steps=STEPS + 1, event=event(STEPS + 1))
    with pytest.raises(ValueError, match=f"between 0 and {STEPS + 1} steps"):
        entry.settle(steps=STEPS + 2, event=event(1))
    assert not entry.settled


def test_a_settled_run_may_be_replayed_and_is_never_released_otherwise(ledger: Ledger) -> None:
    budget = budget_of(ledger, RULES[1])
    entry = opened(budget)
    entry.reserve(40)
    entry.note(19, b"x")
    entry.settle(steps=20, event=event(20))
    again = budget.resume(entry.id)
    spent = budget.spent
    again.note(19, b"x")
    again.reserve(20)
    for step, digest in [(19, b"y"), (18, b"x"), (0, b"")]:
        with pytest.raises(Refused, match=f"got another release of step {step}; start another"):
            again.note(step, digest)
    with pytest.raises(Refused, match=r"which was settled at .* got a charge"):
        again.charge(spend(), reason="step 19 came out otherwise")
    with pytest.raises(Refused, match="below 20, got 20"):
        again.note(20, b"x")
    with pytest.raises(Refused, match=r"was settled at .* with 20 steps paid for"):
        again.reserve(21)
    again.settle(steps=1, event=event(1))
    assert budget.spent == spent
    assert again.digests(19) == [b"x"]


def test_the_process_that_was_replaced_is_refused(ledger: Ledger) -> None:
    budget = budget_of(ledger)
    old = opened(budget)
    old.reserve(8)
    look = budget.entry(old.id)
    assert look.position == 8
    old.note(0, b"x")  # reading took nothing over
    new = budget.resume(old.id)
    for entry, message in ((old, "taken it over"), (look, "only reads; resume it")):
        for call in (
            entry.require_held,
            lambda entry=entry: entry.reserve(24),
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
    old.reserve(8)

    def dear(row: RunRow) -> tuple[Spend, str]:
        assert row.position == 8
        return spend(2.5, 0.0), "again"

    def refused(row: RunRow) -> None:
        raise Refused("no")

    for charge, message in ((dear, "at most 2 of epsilon"), (refused, "no")):
        with pytest.raises(Refused, match=message):
            budget.resume(old.id, charge=charge)
        old.reserve(8)  # nothing was taken over
    assert budget.spent["epsilon"] == 1.0
    new = budget.resume(old.id, charge=lambda row: (spend(1.5, 0.0), f"{row.position} steps"))
    assert [c.reason for c in budget.account.charges] == ["plan", "8 steps"]
    assert new.position == 8
    with pytest.raises(Refused, match="taken it over"):
        old.reserve(8)


def test_a_forked_process_does_not_carry_the_run_on(ledger: Ledger) -> None:
    entry = opened(budget_of(ledger))
    entry.reserve(8)

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
    entry.reserve(8)
    entry.note(0, b"x")
    assert (entry.digests(1), entry.digests(8)) == ([], [])
    monkeypatch.setattr(entries, "boot_id", lambda: "another")
    for resumed in (budget.entry(entry.id), budget.resume(entry.id)):
        assert resumed.digests(0) == [b"x"]
        assert resumed.digests(1) == resumed.digests(7) == [UNKNOWN]
        assert resumed.digests(8) == resumed.digests(9) == []
    resumed.reserve(16)
    assert resumed.digests(8) == []
    resumed.note(1, b"y")
    assert resumed.digests(1) == [b"y"]
