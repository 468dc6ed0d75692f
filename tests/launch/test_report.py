"""The folder of a run, the words of its guarantee, and what is looked at before it starts."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hushgrad as hg
from hushgrad.launch import preflight
from hushgrad.launch.curves import means
from hushgrad.launch.loop import Outcome, accuracy, carry_out, launch, start
from hushgrad.launch.recipe import Recipe
from hushgrad.launch.report import Request, report_page, versions, write_beginning, write_end
from hushgrad.launch.words import in_words
from hushgrad.run.guarantee import Guarantee
from hushgrad.run.odometer import Odometer
from hushgrad.types import Refused, Relation
from trial_recipes import good, label_out_of_range, nan_features

REQUEST = Request("recipes:good", {"epsilon": "2"}, None, 7, "hushgrad train recipes:good")


def finished(recipe: Recipe, folder: Path) -> Outcome:
    outcome = launch(recipe, rng=hg.Rng.from_os(), folder=folder)
    write_beginning(outcome.run, folder, REQUEST)
    write_end(outcome, recipe, folder, REQUEST)
    return outcome


# --- the folder ---


def test_the_folder_explains_itself(tmp_path: Path) -> None:
    recipe = good()
    outcome = finished(recipe, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for part in (
        "any one record was part of the training data or not",
        "treated as public",
        "made-up records, prepared by nothing",
        "hushgrad train recipes:good",
        "Not counted: the yes or no of three checks",
        f"torch {torch.__version__}",
        "dp-accounting 0.6",
        str(outcome.run.guarantee).splitlines()[0],
    ):
        assert part in text, part
    assert Request.read(tmp_path) == REQUEST
    with (tmp_path / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert float(rows[3]["loss"]) == outcome.run.readings[3].values["loss"]
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    saved = load_file(tmp_path / "model.safetensors")
    for name, value in recipe.model.state_dict().items():
        assert torch.equal(saved[name], value)
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["accuracy"] == outcome.accuracy == accuracy(recipe)


def test_the_average_is_what_is_kept() -> None:
    recipe = good()
    torch.manual_seed(0)  # as before this test
    alone = replace(good(), average=None)
    launch(recipe, rng=hg.Rng.fixed(0))
    assert recipe.average is not None
    averaged = recipe.average.module.state_dict()
    assert all(torch.equal(averaged[n], x) for n, x in recipe.model.state_dict().items())
    launch(alone, rng=hg.Rng.fixed(0))
    assert not torch.equal(alone.model[1].weight, recipe.model[1].weight)  # type: ignore[index]


def test_a_report_without_metrics_and_test_records_says_so() -> None:
    recipe = replace(good(), correct=None, test=None, notes=())
    recipe = replace(recipe, plan=replace(recipe.plan, metrics=None))
    text = report_page(launch(recipe, rng=hg.Rng.from_os()), recipe, REQUEST)
    assert "no public test records" in text
    assert "The plan has no metrics" in text
    assert "says nothing about how data were prepared" in text


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    ledger = hg.ledger.Ledger(tmp_path / "books.sqlite")
    ledger.set_budget("people", epsilon=0.1, delta=1e-3)
    folder = tmp_path / "runs" / "first"
    with pytest.raises(Refused):
        start(good(), rng=hg.Rng.from_os(), folder=folder, budget=ledger.budget("people"))
    assert not (tmp_path / "runs").exists()
    assert ledger.budget("people").spent["epsilon"] == 0


def test_a_run_that_is_stopped_can_be_gone_on_with(tmp_path: Path) -> None:
    recipe = good()
    run = start(recipe, rng=hg.Rng.from_os(), folder=tmp_path)
    outcome = carry_out(run, recipe, stopped=lambda: run.steps_taken == 5)
    assert (outcome.finished, outcome.accuracy, run.steps_taken) == (False, None, 5)
    again = good()
    rest = start(again, rng=hg.Rng.from_os(), folder=tmp_path, resume=True)
    assert rest.steps_taken == 5
    assert carry_out(rest, again).finished
    assert rest.guarantee.epsilon == rest.plan.epsilon  # nothing was charged again
    assert rest.readings[:5] == run.readings


def test_checkpoints_are_written_as_often_as_asked(tmp_path: Path) -> None:
    recipe = good()
    run = start(recipe, rng=hg.Rng.from_os(), folder=tmp_path)
    seen: list[int] = []

    def look(run: hg.Run) -> None:
        seen.append((tmp_path / "checkpoint.safetensors").stat().st_mtime_ns)

    carry_out(run, recipe, checkpoint_every=4, each_step=look)
    # Written before step 1, after steps 4 and 8, and by the run itself after step 12.
    assert [k + 1 for k in range(1, 12) if seen[k] != seen[k - 1]] == [5, 9]


def test_versions_are_those_installed() -> None:
    found = dict(line.split(" ", 1) for line in versions().splitlines())
    assert found["hushgrad"] == hg.__version__
    assert {"python", "torch", "dp-accounting", "platform"} <= found.keys()


# --- words ---


def guarantee(
    *, epsilon: float, reproducible: bool = False, relation: Relation = Relation.ADD_REMOVE
) -> Guarantee:
    plan = hg.plan(
        records=1000, batch=100, epochs=1, epsilon=epsilon, delta=1e-5, relation=relation
    )
    return Guarantee(plan, plan.steps, reproducible)


def test_a_guarantee_in_words() -> None:
    text = in_words(guarantee(epsilon=1))
    assert "a factor of at most e^ε = 2.7" in text
    assert "73.1 %" in text or "73.2 %" in text  # e / (1 + e) = 0.7311
    assert "at most 2.8 in 100" in text  # e · 1 % + δ
    assert "δ = 1e-05" in text


@pytest.mark.parametrize("sigma", [0.03, 0.3, 0.7, 1.0, 1.3, 2.0])
def test_no_number_in_words_is_rounded_down(sigma: float) -> None:
    plan = hg.plan(records=1000, batch=100, epochs=1, noise_multiplier=sigma, delta=1.23456748e-5)
    given = Guarantee(plan, plan.steps, False)
    text = in_words(given)
    assert "δ = 1.23457e-05" in text and "1.23457e-05)-DP" in str(given)
    factor = re.search(r"e\^ε = (?:over )?([0-9.e+]*[0-9])", text)
    assert factor is not None
    assert math.log(float(factor[1])) >= min(given.epsilon, 699)


def test_replacing_a_record_has_words_of_its_own() -> None:
    assert "was this or any other" in in_words(guarantee(epsilon=1, relation=Relation.REPLACE_ONE))


def test_no_guarantee_is_said_first() -> None:
    assert in_words(guarantee(epsilon=1, reproducible=True)).startswith("This run is reproducible")
    plan = hg.plan(records=1000, batch=100, epochs=1, noise_multiplier=0.0, delta=1e-5)
    assert in_words(Guarantee(plan, plan.steps, False)).startswith("This model is not private")


# --- ε so far ---


def test_a_reading_of_epsilon_is_never_too_small() -> None:
    plan = hg.plan(records=1000, batch=100, epochs=7.3, epsilon=2, delta=1e-5)
    odometer = Odometer(plan)
    assert odometer.epsilon(0) == 0
    for steps in (1, 2, 10, 37, 72, plan.steps):
        exact = plan.epsilon_after(steps)
        assert exact <= odometer.epsilon(steps), steps
    assert odometer.epsilon(plan.steps) < 1.01 * plan.epsilon
    assert odometer.epsilon(40) < 1.2 * plan.epsilon_after(40)
    assert len(odometer.points) <= 20
    curve = odometer.curve(37)
    assert curve[-1][0] == 37
    assert [x for x, _ in curve] == sorted({x for x, _ in curve})


def test_means_are_over_the_last_values() -> None:
    assert means([4.0, 2.0, 6.0, 0.0], span=2) == [4.0, 3.0, 4.0, 3.0]


# --- before a run ---


def test_a_check_changes_nothing() -> None:
    recipe = good()
    weights = {n: x.clone() for n, x in recipe.model.state_dict().items()}
    state = torch.get_rng_state()
    preflight.check(recipe)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, weights[n]) for n, x in recipe.model.state_dict().items())
    assert all(p.grad is None for p in recipe.model.parameters())


@pytest.mark.parametrize("where", [torch.nan, torch.inf, -torch.inf])
def test_features_must_be_finite(where: float) -> None:
    recipe = good()
    recipe.data[0][-1, -1] = where
    with pytest.raises(Refused, match="finite features"):
        preflight.check(recipe)


def test_arrays_and_loaders_are_looked_at_too() -> None:
    features, labels = nan_features().data
    for data in ((features.numpy(), labels.numpy()), hg.sampling.Loader((features, labels))):
        with pytest.raises(Refused, match="finite features"):
            preflight.check(replace(good(), data=data))
    features, labels = label_out_of_range().data
    recipe = replace(good(), data={"x": features, "y": labels})
    with pytest.raises(Refused, match="labels and indices"):
        preflight.check(replace(recipe, loss=lambda b: good().loss((b["x"], b["y"]))))


def test_a_delta_of_1_in_n_is_too_large() -> None:
    recipe = good()
    for delta, fine in ((1 / 200, False), (1 / 201, True)):
        tried = replace(recipe, plan=replace(recipe.plan, delta=delta))
        if fine:
            preflight.check(tried)
        else:
            with pytest.raises(ValueError, match="expected delta below"):
                preflight.check(tried)
    assert math.isfinite(recipe.plan.epsilon)
