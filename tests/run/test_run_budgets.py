"""Runs against a budget: charged before they start, refused where it has no room."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from resumed_runs import Trainer
from small_runs import data, small_plan

from hushgrad import Refused, Rng
from hushgrad.ledger import Ledger


def ledger(tmp_path: Path, epsilon: float) -> Ledger:
    found = Ledger(tmp_path / "ledger.sqlite")
    found.set_budget("people", epsilon=epsilon, delta=1e-3)
    return found


def test_a_run_is_charged_before_it_starts_and_keeps_its_plans_cost(tmp_path: Path) -> None:
    plan = small_plan()
    budget = ledger(tmp_path, epsilon=5.0).budget("people")
    trainer = Trainer(tmp_path / "run", plan, Rng.from_os(), budget=budget)
    assert budget.spent["epsilon"] == plan.epsilon
    trainer.go(until=3).run.finish()
    assert budget.spent["epsilon"] == plan.epsilon


def test_a_run_that_would_overspend_does_not_start(tmp_path: Path) -> None:
    plan = small_plan()
    budget = ledger(tmp_path, epsilon=1.5 * plan.epsilon).budget("people")
    Trainer(tmp_path / "one", plan, Rng.from_os(), budget=budget)
    with pytest.raises(Refused, match="budget"):
        Trainer(tmp_path / "two", plan, Rng.from_os(), budget=budget)
    assert not (tmp_path / "two" / "checkpoint.safetensors").exists()
    assert budget.spent["epsilon"] == plan.epsilon


def test_a_run_that_cannot_pay_for_its_replay_stops_before_releasing(tmp_path: Path) -> None:
    plan = small_plan()
    budget = ledger(tmp_path, epsilon=1.01 * plan.epsilon).budget("people")
    Trainer(tmp_path / "run", plan, Rng.from_os(), budget=budget).go(until=7, save_at=4)
    again = Trainer(tmp_path / "run", plan, Rng.from_os(), budget=budget, resume=True)
    again.factor = 1 + 1e-3
    before = again.weights.clone()
    with pytest.raises(Refused, match="budget"):
        again.go()
    assert torch.equal(again.weights, before)
    assert again.run.steps_taken == 4


def test_other_data_under_a_name_are_refused(tmp_path: Path) -> None:
    budget = ledger(tmp_path, epsilon=50.0).budget("people")
    Trainer(tmp_path / "one", small_plan(), Rng.from_os(), budget=budget)
    x, y = data()
    with pytest.raises(Refused, match="other data"):
        Trainer(tmp_path / "two", small_plan(), Rng.from_os(), budget=budget, records=(x + 1, y))


def test_a_run_is_not_resumed_on_data_that_have_a_budget_of_their_own(tmp_path: Path) -> None:
    books = ledger(tmp_path, epsilon=50.0)
    budget, others = books.budget("people"), books.set_budget("others", epsilon=50.0, delta=1e-3)
    x, y = data()
    shifted, options = (x + 1, y), {"budget": budget, "resume": True}
    Trainer(tmp_path / "one", small_plan(), Rng.from_os(), budget=others, records=shifted)
    Trainer(tmp_path / "two", small_plan(), Rng.from_os(), budget=budget).go(until=4, save_at=4)
    with pytest.raises(Refused, match="the data of others"):
        Trainer(tmp_path / "two", small_plan(), Rng.from_os(), records=shifted, **options)
    Trainer(tmp_path / "two", small_plan(), Rng.from_os(), **options).go()


def test_a_seed_is_no_secret_and_has_no_budget(tmp_path: Path) -> None:
    budget = ledger(tmp_path, epsilon=50.0).budget("people")
    with pytest.raises(Refused, match=r"a secret key with a budget, got Rng\.fixed"):
        Trainer(tmp_path / "one", small_plan(), Rng.fixed(0), budget=budget)
