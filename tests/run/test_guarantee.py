"""A guarantee as a value: in words, as JSON and on a model card, and when there is none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import hushgrad as hg
from hushgrad import Relation, Rng
from hushgrad.launch import preflight
from hushgrad.launch.loop import launch
from hushgrad.launch.report import Request, write_end
from hushgrad.launch.words import in_words, model_card
from hushgrad.ledger import Spend
from hushgrad.run.guarantee import Guarantee, up
from hushgrad.run.metrics import Metrics
from trial_recipes import good

REQUEST = Request("recipes:good", {"epsilon": "2"}, None, 7, "hushgrad train recipes:good")


def planned(**changes) -> hg.Plan:
    options = {"records": 1000, "batch": 100, "epochs": 1, "delta": 1e-5, "noise_multiplier": 1.0}
    return hg.plan(**(options | changes))


def test_a_run_without_steps_guarantees_nothing() -> None:
    none = Guarantee(planned(), 0, reproducible=False)
    assert none.epsilon == math.inf and not none.private
    first = str(none).splitlines()[0]
    assert first.startswith("no guarantee, since the run has taken no step; the plan's would be (")
    assert none.to_dict()["epsilon"] is None and none.to_dict()["epsilon_if_secret"] is None
    assert none.to_dict()["plan"]["epsilon"] == planned().epsilon
    for text in (in_words(none), model_card(none)):
        assert "There is no guarantee: the run has taken no private step" in text
    assert Guarantee(planned(), 1, reproducible=False).epsilon == planned().epsilon


@pytest.mark.parametrize("relation", Relation)
def test_json_holds_everything_that_the_words_say(relation: Relation) -> None:
    plan = planned(relation=relation, metrics=Metrics(watched=("right",)))
    again = Spend(plan.event(2), relation, 0.25, 1e-5)
    given = Guarantee(plan, 7, False, (again,), steps_unused=2)
    facts = json.loads(given.to_json())
    assert facts == given.to_dict()
    assert facts["private"] and facts["epsilon"] == plan.epsilon + 0.25
    assert facts["delta"] == 2e-5
    assert (facts["steps_taken"], facts["steps_unused"], facts["steps_planned"]) == (7, 2, 10)
    assert facts["relation"] == relation.value and facts["plan"]["records"] == 1000
    assert facts["plan"] == plan.describe()
    assert facts["charges"] == [{"epsilon": 0.25, "delta": 1e-5, "relation": relation.value}]
    assert facts["text"] == str(given)
    for line in (*facts["assumptions"], *facts["not_counted"]):
        assert line in facts["text"]
    assert "a record whose gradient is NaN or infinite contributes nothing" in facts["text"]


def test_what_is_infinite_is_no_number_in_json() -> None:
    for given in (
        Guarantee(planned(noise_multiplier=0.0), 10, reproducible=False),
        Guarantee(planned(), 10, reproducible=True),
    ):
        facts = json.loads(given.to_json(), parse_constant=lambda name: pytest.fail(name))
        assert facts["epsilon"] is None and not facts["private"]
    assert facts["epsilon_if_secret"] == planned().epsilon and facts["reproducible"]


def test_the_report_the_result_and_the_card_have_one_source(tmp_path: Path) -> None:
    recipe = good()
    outcome = launch(recipe, rng=Rng.from_os(), folder=tmp_path)
    found = write_end(outcome, recipe, tmp_path, REQUEST)
    given = outcome.run.guarantee
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["guarantee"] == found["guarantee"] == json.loads(given.to_json())
    assert result["epsilon"] == result["guarantee"]["epsilon"] == given.epsilon
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    card = model_card(given)
    assert "\n".join(f"    {line}".rstrip() for line in card.splitlines()) in report
    assert f"({up(given.epsilon)}, " in card and "| Records | " in card
    assert f"{given.steps_taken} of {given.plan.steps} planned" in card


def test_a_card_of_a_model_that_is_not_private_says_so() -> None:
    assert "not private: no noise" in model_card(Guarantee(planned(noise_multiplier=0.0), 9, False))
    assert "reproducible, not private" in model_card(Guarantee(planned(), 9, True))


# --- what Python checks as the command line does ---


@pytest.mark.parametrize("delta", [0.1, 0.001])
def test_a_large_delta_is_warned_of_and_stays_in_the_guarantee(delta: float) -> None:
    with pytest.warns(UserWarning, match="expected delta below 1 / records = 0.001, got 0"):
        lax = planned(delta=delta)
    given = Guarantee(lax, 10, reproducible=False)
    assert "δ is not below 1 / records" in str(given)
    assert given.to_dict()["warnings"] and "δ is not below 1 / records" in model_card(given)
    assert planned(delta=0.0009).delta == 0.0009


def test_the_rng_that_is_missing_is_named() -> None:
    with pytest.raises(TypeError, match=r"pass rng=hg\.Rng\.from_os\(\), or hg\.Rng\.fixed"):
        hg.train(None, None, None, plan=planned())  # type: ignore[call-arg,arg-type]
    with pytest.raises(TypeError, match=r"launch\(\) needs rng="):
        launch(good())  # type: ignore[call-arg]


def test_rng_has_no_default() -> None:
    import inspect

    parameter = inspect.signature(hg.train).parameters["rng"]
    assert parameter.default is inspect.Parameter.empty


def test_the_preflight_refuses_what_python_warns_of() -> None:
    with pytest.warns(UserWarning, match="expected delta below"):
        recipe = good(delta=0.1)
    with pytest.raises(ValueError, match="expected delta below 1 / records"):
        preflight.check(recipe)
