"""`hushgrad account` and `hushgrad plan`: names that scripts rely on, tables, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import DpEvent
from typer.testing import CliRunner

from hushgrad.accounting import gaussian
from hushgrad.cli import app
from hushgrad.cli.chart import draw_chart
from hushgrad.ledger import Entry, Ledger, Spend
from hushgrad.sampling import FullBatch, Poisson
from hushgrad.types import Relation

RUN = ("--noise-multiplier", "1.5", "--steps", "2250", "--delta", "1e-5")
ACCOUNT = ("account", "--rate", "0.04", *RUN)
PLAN = ("plan", "--records", "50000", "--batch", "1000", "--epochs", "100", "--delta", "1e-5")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def facts(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


# --- JSON ---


@pytest.mark.parametrize(
    ("accountant", "epsilon"), [("pld", 6.769), ("rdp", 7.329), ("gdp", 6.602)]
)
def test_account_prints_what_scripts_read(accountant: str, epsilon: float) -> None:
    found = facts(*ACCOUNT, "--accountant", accountant)
    assert round(found["epsilon"], 3) == epsilon
    assert found["approximate"] is (accountant == "gdp")
    assert {k: found[k] for k in ("delta", "accountant", "relation", "sampling")} == {
        "delta": 1e-5,
        "accountant": accountant,
        "relation": "add-remove",
        "sampling": "poisson",
    }


def test_records_and_batch_are_a_rate() -> None:
    found = facts("account", "--records", "25000", "--batch", "1000", *RUN)
    assert round(found["epsilon"], 3) == 6.769
    assert found["rate"] == 0.04


@pytest.mark.parametrize(
    ("accountant", "relation", "epsilon"),
    [("pld", "replace-one", 4.3772), ("rdp", "replace-one", 4.7285), ("pld", "zero-out", 1.9931)],
)
def test_the_multiplier_means_the_same_under_every_relation(
    accountant: str, relation: str, epsilon: float
) -> None:
    options = ("--noise-multiplier", "2", "--steps", "1", "--delta", "1e-5")
    chosen = ("--accountant", accountant, "--relation", relation)
    found = facts("account", "--sampling", "full", *options, *chosen)
    assert round(found["epsilon"], 4) == epsilon
    assert found["relation"] == relation


def test_fixed_size_takes_a_rate_or_sizes() -> None:
    fixed = ("account", "--sampling", "without-replacement", *RUN)
    asked = ("--accountant", "rdp", "--relation", "replace-one")
    by_rate = facts(*fixed, "--rate", "0.04", *asked)
    by_size = facts(*fixed, "--records", "25000", "--batch", "1000", *asked)
    assert by_rate["epsilon"] == by_size["epsilon"]


def test_truncated_poisson_is_cut_at_the_batch_unless_told() -> None:
    sizes = ("--records", "1000", "--batch", "50", "--noise-multiplier", "2")
    cut = ("account", "--sampling", "truncated-poisson", *sizes, "--steps", "5", "--delta", "1e-5")
    early, late = facts(*cut), facts(*cut, "--max-batch", "90")
    assert (early["max_batch"], late["max_batch"]) == (50, 90)
    assert early["epsilon"] > late["epsilon"] > 0


def test_plan_finds_the_noise() -> None:
    found = facts(*PLAN, "--epsilon", "3")
    assert found["steps"] == 5000
    assert found["rate"] == 0.02
    assert found["noise_multiplier"] == pytest.approx(2.107, abs=2e-3)
    assert 2.99 < found["epsilon"] <= 3


@pytest.mark.parametrize(("noise", "rdp"), [("3.6", 1.71), ("2.0", 3.48), ("1.2", 7.32)])
def test_plan_finds_epsilon(noise: str, rdp: float) -> None:
    found = facts(*PLAN, "--noise-multiplier", noise, "--accountant", "rdp")
    assert found["epsilon"] == pytest.approx(rdp, abs=0.01)
    assert found["noise_multiplier"] == float(noise)


def test_part_of_a_pass_is_rounded_up() -> None:
    sizes = ("--records", "60000", "--batch", "512", "--epochs", "40", "--delta", "1e-5")
    assert facts("plan", *sizes, "--noise-multiplier", "2")["steps"] == 4688
    full = ("--records", "100", "--batch", "100", "--epochs", "7", "--delta", "1e-5")
    found = facts("plan", *full, "--noise-multiplier", "5", "--sampling", "full")
    assert (found["steps"], found["rate"]) == (7, 1.0)


# --- for readers ---


def test_every_accountant_and_relation_is_shown() -> None:
    result = run(*ACCOUNT)
    assert result.exit_code == 0
    for word in ("6.7688", "7.3294", "≈ 6.60", "13.4885", "replace-one", "zero-out", "–", "█"):
        assert word in result.stdout
    assert "may under-state" in result.stdout


def test_plan_is_shown_with_its_noise_rounded_up() -> None:
    result = run(*PLAN, "--epsilon", "3", "--accountant", "rdp")
    assert result.exit_code == 0
    found = facts(*PLAN, "--epsilon", "3", "--accountant", "rdp")["noise_multiplier"]
    shown = float(result.stdout.split("noise multiplier ")[1].split()[0])
    assert found <= shown < found + 1e-4


def test_the_growth_can_be_plotted(tmp_path: Path) -> None:
    path = tmp_path / "growth.png"
    result = run(*ACCOUNT, "--plot", str(path), "--json")
    assert result.exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_chart_of_nothing_is_flat() -> None:
    assert "█" not in draw_chart([(1, 0.0), (2, 0.0)])


# --- bad input ---

FULL = ("--sampling", "full")
CUT = ("--sampling", "truncated-poisson")
FIXED = ("--sampling", "without-replacement")
BAD: list[tuple[tuple[str, ...], str]] = [
    (
        ("account", "--rate", "0.1", "--noise-multiplier", "0", "--steps", "1", "--delta", "1e-5"),
        "expected noise_multiplier > 0 and finite, got 0.0",
    ),
    (
        ("account", "--rate", "0.1", "--noise-multiplier", "-1", "--steps", "1", "--delta", "1e-5"),
        "expected noise_multiplier > 0 and finite, got -1.0",
    ),
    (
        ("account", "--rate", "0.1", "--noise-multiplier", "1", "--steps", "0", "--delta", "1e-5"),
        "expected steps to be a whole number above 0, got 0",
    ),
    (
        ("account", "--rate", "0.1", "--noise-multiplier", "1", "--steps", "1", "--delta", "0"),
        "expected 0 < delta < 1, got 0.0",
    ),
    (
        ("account", "--rate", "0.1", "--noise-multiplier", "1", "--steps", "1", "--delta", "1"),
        "expected 0 < delta < 1, got 1.0",
    ),
    (("account", *RUN), "expected either --rate, or --records and --batch, got neither"),
    (
        (*ACCOUNT, "--records", "100", "--batch", "10"),
        "expected either --rate, or --records and --batch, got both",
    ),
    (("account", "--rate", "1.5", *RUN), "expected 0 < --rate <= 1, got 1.5"),
    (("account", "--rate", "0", *RUN), "expected 0 < --rate <= 1, got 0.0"),
    (("account", "--records", "100", *RUN), "got no --batch; give both"),
    (("account", "--batch", "100", *RUN), "got no --records; give both"),
    (
        ("account", "--records", "100", "--batch", "200", *RUN),
        "expected 1 <= --batch <= --records, got 200 of 100",
    ),
    (("account", "--records", "0", "--batch", "1", *RUN), "expected --records of 1 or more, got 0"),
    ((*ACCOUNT, "--max-batch", "5"), "expected --max-batch with truncated-poisson only"),
    ((*ACCOUNT, *CUT), "expected --records and --batch with truncated-poisson"),
    (
        ("account", *CUT, "--records", "9", "--batch", "5", "--max-batch", "10", *RUN),
        "expected 1 <= --max-batch <= --records, got 10 of 9",
    ),
    ((*ACCOUNT, *FULL), "expected every record in each batch with full"),
    (
        ("account", *FULL, "--records", "10", "--batch", "5", *RUN),
        "expected every record in each batch with full",
    ),
    ((*ACCOUNT, *FIXED), "use rdp under replace-one, or Poisson sampling under add-remove"),
    ((*ACCOUNT, "--accountant", "rdp", "--relation", "replace-one"), "use the pld accountant"),
    (PLAN, "expected either --epsilon or --noise-multiplier, got neither"),
    ((*PLAN, "--epsilon", "1", "--noise-multiplier", "1"), "got both; give one of them"),
    ((*PLAN, "--epsilon", "-1"), "expected epsilon > 0 and finite, got -1.0"),
    ((*PLAN, "--epsilon", "3", "--accountant", "gdp"), "got gdp, an approximation"),
    (
        (*PLAN, "--noise-multiplier", "3", "--accountant", "gdp"),
        "got gdp, an approximation",
    ),
    ((*PLAN, "--epsilon", "3", "--epochs", "0"), "expected epochs above 0, got 0.0"),
    ((*PLAN, "--epsilon", "3", "--batch", "60000"), "got 60000 of 50000"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
@pytest.mark.parametrize("as_json", [True, False])
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], message: str, as_json: bool
) -> None:
    result = run(*arguments, *(["--json"] if as_json else []))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: expected ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("missing", ["--noise-multiplier", "--steps", "--delta"])
def test_a_missing_option_exits_with_2(missing: str) -> None:
    at = ACCOUNT.index(missing)
    assert run(*ACCOUNT[:at], *ACCOUNT[at + 2 :]).exit_code == 2


def test_an_unknown_choice_exits_with_2() -> None:
    for option in ("--accountant", "--relation", "--sampling"):
        assert run(*ACCOUNT, option, "no-such-thing").exit_code == 2


def test_a_large_delta_is_warned_of() -> None:
    sizes = ("--records", "100", "--batch", "10", "--noise-multiplier", "2", "--steps", "1")
    result = run("account", *sizes, "--delta", "0.01", "--json")
    assert result.exit_code == 0
    assert result.stderr.startswith("Warning: delta 0.01 is not below 1 / records")
    assert json.loads(result.stdout)["warnings"]
    assert facts("account", *sizes, "--delta", "0.009")["warnings"] == []


# --- groups ---


def test_a_group_costs_more_than_a_record() -> None:
    alone = facts(*ACCOUNT)
    assert (alone["group"], alone["group_epsilon"]) == (1, alone["epsilon"])
    full = ("account", "--sampling", "full", "--noise-multiplier", "4", "--steps", "1")
    found = facts(*full, "--delta", "1e-5", "--group", "4")
    assert found["group"] == 4
    assert round(found["group_epsilon"], 4) == 4.3772
    assert found["epsilon"] < 1
    shown = run(*full, "--delta", "1e-5", "--group", "4").stdout
    assert "4 records at once, or a user with so many: ε = 4.377" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--group", "0"), "expected size to be a whole number from 1 to 1e+06, got 0"),
        (("--group", "2", "--accountant", "gdp"), "got gdp, an approximation"),
    ],
)
def test_a_group_that_cannot_be_is_refused(options: tuple[str, ...], message: str) -> None:
    result = run(*ACCOUNT, *options, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


# --- shuffled batches ---


def test_shuffled_batches_cost_one_release_a_pass() -> None:
    sizes = ("--records", "1000", "--batch", "64", "--noise-multiplier", "4", "--delta", "1e-5")
    asked = ("account", "--sampling", "shuffled", *sizes, "--relation", "replace-one")
    one, two = (facts(*asked, "--steps", steps) for steps in ("16", "17"))
    full = ("account", "--sampling", "full", "--noise-multiplier", "4", "--delta", "1e-5")
    assert one["epsilon"] == facts(*full, "--steps", "1", "--relation", "replace-one")["epsilon"]
    assert two["epsilon"] > one["epsilon"]
    refused = run("account", "--sampling", "shuffled", *sizes, "--steps", "16")
    assert refused.exit_code == 2
    assert "or Poisson sampling under add-remove" in refused.stderr


# --- what a budget has left ---

SIZES = PLAN[:-2]
FULL_PLAN = ("plan", "--records", "1000", "--batch", "1000", "--epochs", "10", *FULL)


def ledger_at(path: Path, *options: str) -> tuple[str, ...]:
    told = ("--epsilon", "3", "--delta", "1e-5", *options)
    result = run("ledger", "set-budget", "census", "--ledger", str(path), *told)
    assert result.exit_code == 0, result.output
    return ("--ledger", str(path), "--dataset", "census")


def spend(path: Path, found: dict[str, Any], event: DpEvent) -> Entry:
    cost = Spend(event, Relation(found["relation"]), found["epsilon"], found["delta"])
    return Ledger(path).budget("census").open(cost, label="run", plan={}, fingerprint="")


def test_a_plan_takes_what_the_budget_has_left(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    asked = ledger_at(path)
    first = facts(*SIZES, "--epsilon", "1", "--delta", "1e-6", *asked)
    event = Poisson(0.02).run_event(
        gaussian(first["noise_multiplier"]), num_records=50_000, num_steps=5000
    )
    spend(path, first, event)
    found = facts(*SIZES, *asked)
    assert 2 - 2e-3 < found["epsilon"] + first["epsilon"] - 1 <= 2
    assert found["delta"] == pytest.approx(9e-6)
    spend(path, found, event)  # exactly what was planned is accepted
    refused = run(*SIZES, "--epsilon", "1", "--delta", "1e-7", *asked)
    assert refused.exit_code == 2


def test_a_plan_under_the_renyi_filter_is_made_at_its_order(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    asked = ledger_at(path, "--filter", "renyi", "--order", "8", "--relation", "replace-one")
    found = facts(*FULL_PLAN, *asked)
    assert (found["relation"], found["accountant"], found["delta"]) == ("replace-one", "rdp", 1e-5)
    assert 2.99 < found["epsilon"] <= 3
    noise = found["noise_multiplier"]
    # Rényi DP at order 8 of 10 releases under replace-one, against the filter's limit.
    assert 10 * 8 * 4 / (2 * noise**2) == pytest.approx(1.78589, rel=2e-3)
    entry = spend(path, found, FullBatch().run_event(gaussian(noise), num_records=1, num_steps=10))
    assert entry.spends[0].epsilon == found["epsilon"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--relation", "replace-one"), "expected --relation add-remove, which the budget census"),
        (
            ("--delta", "1e-4"),
            "expected --delta of at most 1e-05, which the budget census has left",
        ),
        (("--epsilon", "4"), "of epsilon, which is what the budget census has left of 3, got"),
        (("--noise-multiplier", "0.3"), "of epsilon, which is what the budget census has left"),
        (("--accountant", "gdp"), "got gdp, an approximation"),
        (("--dataset", "other"), "other"),
    ],
)
def test_a_plan_that_a_budget_has_no_room_for_is_refused(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "ledger.sqlite"
    asked = ledger_at(path)
    before = path.read_bytes()
    result = run(*FULL_PLAN, *asked, *options, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert path.read_bytes() == before


def test_a_renyi_filter_leaves_no_choice_of_accountant(tmp_path: Path) -> None:
    asked = ledger_at(tmp_path / "ledger.sqlite", "--filter", "renyi", "--order", "8")
    for options in (("--accountant", "pld"), ("--delta", "1e-6")):
        result = run(*FULL_PLAN, *asked, *options)
        assert result.exit_code == 2
        assert "leave out --accountant and --delta" in result.stderr


def test_a_ledger_and_its_data_set_are_named_together(tmp_path: Path) -> None:
    for options, missing in (
        (("--ledger", str(tmp_path / "none.sqlite")), "--dataset"),
        (("--dataset", "census"), "--ledger"),
    ):
        result = run(*SIZES, *options)
        assert result.exit_code == 2
        assert f"got no {missing}; give both" in result.stderr
    none = tmp_path / "none.sqlite"
    result = run(*SIZES, "--ledger", str(none), "--dataset", "census")
    assert result.exit_code == 2
    assert "expected a ledger, got no file at" in result.stderr
    assert not none.exists()
    assert "expected --delta, got none" in run(*SIZES, "--epsilon", "1").stderr
