"""Algorithms by name: on the command line, and what a run of each leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hushgrad.accounting.closed_forms import sampled_gaussian_epsilon
from hushgrad.algorithms.named import NAMED
from hushgrad.cli import app
from hushgrad.launch.builtin import classifier
from hushgrad.run.guarantee import up
from hushgrad.types import Relation


@pytest.mark.parametrize("name", NAMED)
def test_every_name_has_a_plan_that_it_can_take(name: str) -> None:
    plan = classifier(dataset="digits", algorithm=name, epochs=2, noise_multiplier=3.0).plan
    setting = NAMED[name](1024, plan.records)
    assert repr(plan.algorithm) == repr(setting.algorithm)
    assert (plan.metrics is not None) == plan.parts.carries_metrics
    assert (plan.relation is Relation.REPLACE_ONE) == (name == "ldp")
    assert plan.epsilon > 0
    assert not plan.parts.output.silent  # a folder is written


@pytest.mark.parametrize("name", ["srm", "agd"])
def test_a_run_by_name_says_what_it_did(name: str, tmp_path: Path) -> None:
    asked = ["train", "--dataset", "digits", "--algorithm", name, "--epochs", "2", "--json"]
    result = CliRunner().invoke(app, [*asked, "--output", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert 2.9 < found["epsilon"] <= 3
    plan = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    assert plan["algorithm"].startswith({"srm": "Srm(", "agd": "Agd("}[name])
    assert plan["algorithm"] in (tmp_path / "run" / "report.md").read_text(encoding="utf-8")


def test_a_name_that_there_is_not_is_told(tmp_path: Path) -> None:
    asked = ["train", "--dataset", "digits", "--algorithm", "magic"]
    result = CliRunner().invoke(app, [*asked, "--output", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert "spiderboost" in result.output
    assert not (tmp_path / "run").exists()


def test_the_closed_form_stands_beside_the_accountants() -> None:
    asked = ["account", "--steps", "10000", "--delta", "1e-7", "--records", "1000000"]
    asked += ["--batch", "500", "--sampling", "without-replacement", "--relation", "replace-one"]
    asked += ["--accountant", "rdp", "--noise-multiplier"]
    row = {}
    for noise in ("6", "1"):  # at 1 the condition of Lemma 3.7 on the noise fails
        result = CliRunner().invoke(app, [*asked, noise])
        assert result.exit_code == 0, result.output
        row[noise] = next(x for x in result.output.splitlines() if "DP-SRM" in x).split()[-3:]
    formula = sampled_gaussian_epsilon(6.0, rate=5e-4, steps=10_000, delta=1e-7)
    assert row == {"6": ["–", up(formula), "–"], "1": ["–", "–", "–"]}
