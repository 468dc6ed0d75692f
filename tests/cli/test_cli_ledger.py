"""`hushgrad ledger`: what it prints, what it refuses, what it never tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from charged_runs import event, opened, spend
from hushgrad.accounting import gaussian, poisson, repeated
from hushgrad.cli import app
from hushgrad.ledger import Ledger, order_for

TYPICAL = (
    *("--typical-records", "60000", "--typical-batch", "512"),
    *("--typical-epochs", "40", "--typical-noise-multiplier", "1.1"),
)


def run(path: Path, *arguments: str) -> Any:
    environment = {"HUSHGRAD_LEDGER": str(path)}
    return CliRunner().invoke(app, ["ledger", *arguments], env=environment)


def set_budget(path: Path, *options: str, epsilon: str = "3", delta: str = "1e-5") -> Any:
    return run(path, "set-budget", "census", "--epsilon", epsilon, "--delta", delta, *options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def facts(path: Path) -> dict[str, Any]:
    result = run(path, "show", "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_show_says_what_is_spent_reserved_left_and_binds(path: Path) -> None:
    assert set_budget(path).exit_code == 0
    budget = Ledger(path).budget("census")
    opened(budget, spend(1.0, 8e-6))
    ended = opened(budget, spend(0.5, 1e-6))
    ended.reserve(1)
    ended.settle(steps=1, event=event(1))
    assert facts(path) == {
        "name": "census",
        "epsilon": 3.0,
        "delta": 1e-5,
        "relation": "add-remove",
        "filter": "total",
        "order": None,
        "limit": {"epsilon": 3.0, "delta": 1e-5},
        "spent": {"epsilon": 1.5, "delta": pytest.approx(9e-6)},
        "reserved": {"epsilon": 1.0, "delta": 8e-6},
        "left": {"epsilon": 1.5, "delta": pytest.approx(1e-6)},
        "binds": "delta",
        "runs": 2,
        "open_runs": 1,
    }
    shown = run(path, "show").stdout
    assert "census: (3, 1e-05)-DP, add-remove, filter total" in shown
    assert "2 runs, 1 of them open" in shown
    (line,) = [line for line in shown.splitlines() if "binds" in line]
    assert line.split()[0] == "δ"


def test_a_renyi_budget_takes_an_order_or_a_typical_run(path: Path) -> None:
    assert set_budget(path, "--filter", "renyi", "--order", "8").exit_code == 0
    assert facts(path)["order"] == 8
    assert set_budget(path, "--filter", "renyi", *TYPICAL).exit_code == 0
    typical = repeated(4688, poisson(512 / 60_000, gaussian(1.1)))
    assert facts(path)["order"] == order_for(typical, delta=1e-5)
    assert facts(path)["limit"].keys() == {"rdp"}
    assert "Rényi DP" in run(path, "show", "census").stdout


def test_raising_a_budget_keeps_its_filter_and_relation(path: Path) -> None:
    set_budget(path, "--filter", "renyi", "--order", "8", "--relation", "zero-out")
    assert set_budget(path, epsilon="5").exit_code == 0
    found = facts(path)
    assert (found["epsilon"], found["filter"], found["relation"]) == (5.0, "renyi", "zero-out")
    told = json.loads(run(path, "history", "--json").stdout)
    assert "(5, 1e-05)-DP in place of (3, 1e-05)" in told[1]["what"]
    assert run(path, "history", "census").stdout.split().count("census") == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--epsilon", "0"), "expected epsilon > 0"),
        (("--epsilon", "nan"), "expected epsilon > 0"),
        (("--delta", "1.5"), "expected 0 < delta < 1"),
        (("--order", "8"), "with --filter renyi only"),
        (("--filter", "total", *TYPICAL), "with --filter renyi only"),
        (("--filter", "renyi"), "either --order or all of"),
        (("--filter", "renyi", *TYPICAL[:6]), "either --order or all of"),
        (("--filter", "renyi", "--order", "8", *TYPICAL), "either --order or all of"),
        (("--filter", "renyi", "--order", "1"), "expected an order above"),
        (("--filter", "renyi", "--order", "2"), "use a larger order"),
        (("--filter", "renyi", *TYPICAL, "--typical-batch", "0"), "1 <= batch <= records"),
        (("--filter", "renyi", *TYPICAL, "--typical-epochs", "-1"), "epochs above 0"),
        (("--filter", "renyi", *TYPICAL, "--relation", "replace-one"), "filter total"),
        (("--filter", "median"), "Invalid value"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    path: Path, options: tuple[str, ...], said: str
) -> None:
    result = set_budget(path, *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not path.exists()
    assert list(path.parent.iterdir()) == []


def test_a_budget_below_what_is_spent_is_refused(path: Path) -> None:
    set_budget(path)
    opened(Ledger(path).budget("census"), spend(2.0))
    before = run(path, "export").stdout
    result = set_budget(path, epsilon="1")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: expected a budget of at least what is spent")
    assert run(path, "export").stdout == before


@pytest.mark.parametrize("command", ["show", "history", "export"])
def test_a_missing_ledger_is_not_made(path: Path, command: str) -> None:
    result = run(path, command)
    assert result.exit_code == 2
    assert "got no file at" in result.stderr
    assert not path.exists()


def test_an_unknown_name_is_refused(path: Path) -> None:
    set_budget(path)
    for command in ("show", "history"):
        result = run(path, command, "cencus")
        assert result.exit_code == 2
        assert "there are census" in result.stderr


def test_the_export_tells_nothing_private(path: Path, tmp_path: Path) -> None:
    set_budget(path)
    ledger = Ledger(path)
    entry = opened(ledger.budget("census"), spend(1.0, 1e-6), "a-fingerprint")
    entry.reserve(4)
    entry.note(1, b"a-digest")
    output = tmp_path / "export.json"
    assert run(path, "export", "--output", str(output)).exit_code == 0
    text = output.read_text()
    assert json.loads(text) == json.loads(run(path, "export").stdout)
    for secret in ("a-fingerprint", "a-digest", b"a-digest".hex(), ledger.salt.hex(), "holder"):
        assert secret not in text
    (exported,) = json.loads(text)["budgets"][0]["runs"]
    assert exported["plan"] == {"a": 1}
    assert exported["steps_reserved"] == 4
    (charge,) = exported["charges"]
    assert (charge["epsilon"], charge["delta"], charge["reason"]) == (1.0, 1e-6, "plan")
    result = run(path, "export", "--output", str(tmp_path / "no" / "folder.json"))
    assert result.exit_code == 2
    assert "name another --output" in result.stderr


def test_a_file_that_is_no_ledger_is_one_sentence(path: Path) -> None:
    path.write_text("hello")
    result = run(path, "show")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: expected a ledger at")
