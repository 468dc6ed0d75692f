"""Table 2 of paper C: its pieces, and the whole of it on few records."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch

from hushgrad.data.split import Split
from hushgrad.data.tables import a9a
from hushgrad.glm import PrivateLogisticRegression
from hushgrad.launch.reproduction import StudySettings
from hushgrad.types import Relation
from hushgrad_reproductions.linear import PENALTY, fit_perturbed, linear_task, minimum
from hushgrad_reproductions.methods import METHODS, PAPER, TIGHT, Task
from hushgrad_reproductions.srm_table2 import PUBLISHED, srm_table2
from hushgrad_reproductions.study import Figure, Table, figures

MODULE = importlib.import_module("hushgrad_reproductions.srm_table2")


def small(name: str, records: int = 400) -> Split:
    torch.manual_seed(0)
    x = (torch.rand(records, 6) < 0.5).float()
    y = (x[:, 0] + 0.5 * torch.randn(records) > 0.5).long()
    return Split(name, "nowhere", (x, y), (x[:100], y[:100]), "drawn", ("no", "yes"))


@pytest.mark.parametrize("scaled", [True, False])
def test_the_minimum_has_no_gradient_and_does_not_depend_on_the_scale(scaled: bool) -> None:
    found = minimum(linear_task(small("a9a"), scaled=scaled))
    plain = minimum(linear_task(small("a9a"), scaled=False))
    assert found["gradient"] < 1e-3
    assert found["objective"] == pytest.approx(plain["objective"], abs=1e-4)


def test_objective_and_gradient_are_those_of_the_paper() -> None:
    """Checked against the formula, written out."""
    task = linear_task(small("a9a"), scaled=True)
    model = task.model()
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-2, 2, 6)[None])
    theta = torch.linspace(-2, 2, 6).double() / math.sqrt(14)
    (x, y), (tx, ty) = small("a9a").train, small("a9a").test
    theta.requires_grad_()
    penalty = PENALTY * (theta**2 / (1 + theta**2)).sum()
    loss = torch.log1p(torch.exp(-(2.0 * y - 1) * (x.double() @ theta))).mean() + penalty
    (gradient,) = torch.autograd.grad(loss, theta)
    margins = (2.0 * ty - 1) * (tx.double() @ theta)
    test = (torch.log1p(torch.exp(-margins)).mean() + penalty).detach()
    found = task.measurements(model)
    assert found["gradient"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert found["objective"] == pytest.approx(float(test), rel=1e-5)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(
    ("relation", "records"), [(Relation.ADD_REMOVE, 400), (Relation.REPLACE_ONE, None)]
)
def test_objective_perturbation_states_the_bound_on_rows_and_the_relation(
    scaled: bool, relation: Relation, records: int | None, monkeypatch
) -> None:
    made: list[PrivateLogisticRegression] = []

    def spied(**settings) -> PrivateLogisticRegression:
        made.append(PrivateLogisticRegression(**settings))
        return made[0]

    monkeypatch.setattr("hushgrad_reproductions.linear.PrivateLogisticRegression", spied)
    found = fit_perturbed(
        linear_task(small("a9a"), scaled=scaled), epsilon=2.0, delta=1e-5, relation=relation, seed=0
    )
    assert made[0].feature_norm == pytest.approx(1.0 if scaled else math.sqrt(14))
    assert made[0].records == records and made[0].guarantee_.relation is relation
    assert found["accuracy"] > 0.6


SLOWLY_CALIBRATED = {"RRPSGD"}  # as many runs as it may have rounds


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, marks=pytest.mark.slow if m.name in SLOWLY_CALIBRATED else ())
        for m in METHODS
    ],
    ids=lambda m: m.name,
)
@pytest.mark.parametrize("accounting", [TIGHT], ids=lambda a: a.name)
def test_every_method_keeps_the_budget(method, accounting) -> None:
    task = Task(0.5, 20_000, scaled=True, accounting=accounting)
    plan = method.plan(task)
    assert plan.relation is accounting.relation
    if plan.noise_multiplier:
        assert plan.epsilon <= 0.5 and plan.delta == 1e-5
    else:
        assert method.name == "STORM, not private" and plan.epsilon == math.inf


def test_the_papers_accounting_replaces_a_record_and_the_tight_one_removes_it() -> None:
    assert PAPER.relation is Relation.REPLACE_ONE and TIGHT.relation is Relation.ADD_REMOVE
    (method,) = (m for m in METHODS if m.name == "DP-SRM")
    noise = [
        method.plan(Task(0.5, 20_000, scaled=True, accounting=a)).noise_multiplier
        for a in (TIGHT, PAPER)
    ]
    assert noise[1] > 1.5 * noise[0]


def test_a9a_is_studied_by_both_accountings_with_and_without_scaled_rows() -> None:
    (ways,) = (ways for load, ways in MODULE.STUDIES if load is a9a)
    assert {(a.name, scaled) for a, scaled in ways} == set(
        product(("tight", "paper"), (True, False))
    )


def test_the_one_clip_goes_by_the_length_of_rows_and_steps_against_it() -> None:
    """Rows k times as long with weights k times as small are the same problem."""
    (method,) = (m for m in METHODS if m.name == "DP-SRM, one clip")
    short = Task(0.5, 20_000, scaled=True, accounting=TIGHT)
    long = dataclasses.replace(short, scaled=False, length=4.0)
    rules, rates = (
        [method.plan(t).algorithm for t in (short, long)],
        [*map(method.rate, (short, long))],
    )
    assert rules[1].combined_clip.bound(1) == pytest.approx(4 * rules[0].combined_clip.bound(1))
    assert rates[1] == pytest.approx(rates[0] / 16)
    steps = [rate * rule.step_norm for rate, rule in zip(rates, rules, strict=True)]
    assert steps[1] == pytest.approx(steps[0] / 4)


@pytest.mark.parametrize("name", ["DP-SRM", "DP-SRM, one clip"])
@pytest.mark.parametrize("epsilon", [0.2, 0.5])
def test_srm_takes_no_more_passes_than_the_paper(name: str, epsilon: float) -> None:
    (method,) = (m for m in METHODS if m.name == name)
    plan = method.plan(Task(epsilon, 32_561, scaled=True, accounting=TIGHT))
    passes = plan.algorithm.first_batch / 32_561 + (plan.steps - 1) * plan.sampling.rate
    assert passes == pytest.approx(PUBLISHED["DP-SRM", epsilon][1], rel=0.02)


def test_the_whole_table_on_few_records(tmp_path: Path, monkeypatch) -> None:
    studies = [(lambda root: small("a9a"), ((TIGHT, True), (TIGHT, False)))]
    monkeypatch.setattr(MODULE, "STUDIES", studies)
    quick = [m for m in METHODS if m.name in ("DP-GD", "STORM, not private")]
    monkeypatch.setattr(MODULE, "METHODS", quick)
    monkeypatch.setattr(MODULE, "EPSILONS", (2.0, 3.0))
    lines: list[str] = []
    srm_table2(StudySettings(tmp_path, seeds=2, progress=lines.append))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"srm-table2-a9a.md", "srm-table2-a9a.json", "srm-figure1-a9a.png"}
    table = json.loads((tmp_path / "srm-table2-a9a.json").read_text())
    assert len(table["rows"]) == 2 * 2 * (len(quick) + 1)
    storm = [row for row in table["rows"] if row[3] == "STORM, not private"]
    column = table["headings"].index("accuracy")
    assert all(min(row[column]) > 0.7 for row in storm)
    assert any("DP-GD, ε = 3.0" in line for line in lines)


def test_published_figures_are_those_of_table_2() -> None:
    assert PUBLISHED["DP-SRM", 0.2] == (0.3579, 4) and PUBLISHED["DP-AGD", 0.5] == (0.3627, 365)


def test_a_figure_is_a_mean_with_a_margin() -> None:
    found = figures([{"x": 1.0}, {"x": 2.0}, {"x": 3.0}])["x"]
    assert found.mean == 2.0 and found.margin == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)
    assert str(found) == "2.0 ± 2.5" and str(Figure((0.5,))) == "0.50000"


def test_a_table_refuses_a_row_of_another_length() -> None:
    table = Table("t", ("a", "b"))
    with pytest.raises(ValueError, match="a cell for each of the 2 headings, got 1"):
        table.add(1)
    table.add("x", None)
    assert "| x | – |" in table.markdown()
    assert dataclasses.asdict(table)["rows"]
