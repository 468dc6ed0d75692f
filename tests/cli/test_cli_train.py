"""`hushgrad train`: one command from a recipe to a folder, or one sentence and nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hushgrad
import trial_recipes
from hushgrad.cli import app
from hushgrad.cli.options import arguments_for, split_arguments
from hushgrad.ledger import Ledger

HERE = Path(__file__).parents[1]
RECIPES = str(HERE / "trial_recipes.py")
COMMAND = (sys.executable, "-c", "from hushgrad.cli import app; app()", "train")
ENVIRONMENT = dict(os.environ, PYTHONPATH=str(Path(hushgrad.__file__).parents[1]))
FILES = {
    *("checkpoint.safetensors", "curves.png", "ledger.json", "ledger.sqlite", "metrics.csv"),
    *("model.safetensors", "plan.json", "report.md", "request.json", "result.json"),
    "versions.txt",
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HUSHGRAD_DATA", raising=False)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", *arguments])


def trained(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


# --- what a run leaves ---


def test_a_recipe_in_one_command(tmp_path: Path) -> None:
    found = trained(f"{RECIPES}:good", "--epsilon", "3", "--output", "out")
    assert found["private"] is True
    assert 2.9 < found["epsilon"] <= 3
    assert found["steps"] == 12
    assert 0 <= found["accuracy"] <= 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES  # and no key
    written = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert written == found
    assert (tmp_path / "out" / "metrics.csv").read_text(encoding="utf-8").count("\n") == 13
    plan = json.loads((tmp_path / "out" / "plan.json").read_text(encoding="utf-8"))
    assert plan["records"] == 200 and plan["epsilon"] == found["epsilon"]


def test_folders_are_numbered() -> None:
    names = [trained(f"{RECIPES}:good", "--steps", "2")["folder"] for _ in range(2)]
    assert names == ["runs/trial_recipes-good-1", "runs/trial_recipes-good-2"]


def test_without_json_the_guarantee_is_said_in_words() -> None:
    result = run(f"{RECIPES}:good", "--output", "out")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "test records, taken to be public" in said
    assert "1e-04)-DP" in said or "0.0001)-DP" in said
    assert "any one record was part of the training data or not" in said
    assert "report.md" in said


def test_options_in_place_of_a_recipe() -> None:
    given = ("--model", "mlp", "--epochs", "0.5", "--batch", "200", "--lr", "0.5")
    found = trained("--dataset", "digits", *given, "--epsilon", "1")
    assert found["folder"] == "runs/digits-mlp-1"
    assert found["epsilon"] <= 1
    assert found["options"]["model"] == "mlp"


def test_a_data_set_by_name_is_a_recipe() -> None:
    assert trained("digits", "--epochs", "0.5")["folder"] == "runs/digits-linear-1"


def test_a_module_is_a_recipe_too() -> None:
    assert trained("trial_recipes:good", "--steps", "2")["steps"] == 2


def test_the_recipe_in_the_docs_works() -> None:
    page = (HERE.parent / "docs" / "training.md").read_text(encoding="utf-8")
    source = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    Path("mine.py").write_text(source, encoding="utf-8")
    assert trained("mine.py:census", "--epsilon", "2")["epsilon"] <= 2


def test_a_seed_repeats_a_run_and_is_not_private(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert (
            trained(f"{RECIPES}:good", "--steps", "3", "--seed", "3", "--output", name)["private"]
            is False
        )
    trained(f"{RECIPES}:good", "--steps", "3", "--seed", "4", "--output", "c")
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b != c
    report = (tmp_path / "a" / "report.md").read_text(encoding="utf-8")
    assert "not private" in report.splitlines()[0]


def test_a_run_without_noise_says_so() -> None:
    given = ("digits", "--noise-multiplier", "0", "--epochs", "0.5", "--output", "out")
    found = trained(*given)
    assert found["private"] is False
    assert found["epsilon"] is None
    assert "no noise was added" in Path("out/report.md").read_text(encoding="utf-8")


def test_a_ledger_is_charged() -> None:
    budget = Ledger("books.sqlite").set_budget("people", epsilon=5, delta=1e-3)
    charged = ("--ledger", "books.sqlite", "--dataset-name", "people")
    found = trained(f"{RECIPES}:good", *charged, "--output", "out")
    assert budget.spent["epsilon"] == found["epsilon"]
    assert not Path("out/ledger.sqlite").exists()
    extract = json.loads(Path("out/ledger.json").read_text(encoding="utf-8"))
    assert extract["settled"] is True
    assert [charge["epsilon"] for charge in extract["charges"]] == [found["epsilon"]]


# --- bad input: one sentence, exit code 2, nothing written, nothing spent ---

GOOD = f"{RECIPES}:good"
BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "no recipe": ((), "expected a recipe or a data set"),
    "unknown option": ((GOOD, "--frobnicate", "3"), "--frobnicate"),
    "unknown option of a data set": (("digits", "--widht", "3"), "--widht"),
    "short option": ((GOOD, "-x"), "'-x'"),
    "two recipes": ((GOOD, GOOD), "one recipe"),
    "not a number": ((GOOD, "--epsilon", "three"), "expected --epsilon as a number"),
    "epsilon 0": ((GOOD, "--epsilon", "0"), "epsilon"),
    "epsilon below 0": ((GOOD, "--epsilon", "-1"), "epsilon"),
    "epsilon nan": ((GOOD, "--epsilon", "nan"), "epsilon"),
    "delta above 1/n": ((GOOD, "--delta", "0.005"), "expected delta below 1 / records"),
    "delta 0": ((GOOD, "--delta", "0"), "expected 0 < delta < 1"),
    "batch above n": ((GOOD, "--batch", "201"), "expected 1 <= batch <= records"),
    "nan features": ((f"{RECIPES}:nan_features",), "expected finite features"),
    "label above": ((f"{RECIPES}:label_out_of_range",), "expected labels and indices"),
    "label below": ((f"{RECIPES}:negative_label",), "expected labels and indices"),
    "records that meet": ((f"{RECIPES}:refused",), "BatchNorm"),
    "missing file": ((f"{RECIPES}:missing_file",), "no-such-file.csv"),
    "missing data set": (("mnist", "--data", "nowhere"), "nowhere"),
    "no data folder": (("mnist",), "HUSHGRAD_DATA"),
    "data for a recipe without": ((GOOD, "--data", "nowhere"), "--data"),
    "gpu absent": ((GOOD, "--device", "cuda:99"), "expected a device"),
    "no such device": ((GOOD, "--device", "toaster"), "expected a device"),
    "unknown data set": (("--dataset", "cats"), "digits"),
    "unknown model": (("digits", "--model", "gpt"), "linear, mlp, cnn"),
    "no images": (("a9a", "--model", "cnn", "--data", "nowhere"), "nowhere"),
    "unknown recipe": (("no_such_module_anywhere:f",), "no_such_module_anywhere"),
    "unknown function": ((f"{RECIPES}:nothing",), "no function 'nothing'"),
    "unknown file": (("nothing.py:f",), "no file nothing.py"),
    "no colon": (("cats",), "no colon"),
    "unknown installed recipe": (
        ("mnist:manual",),
        "no recipe 'manual'; it has abadi, automatic, strong",
    ),
    "unknown rule": (("digits", "--clip", "median"), "automatic, abadi, normalize, discard"),
    "unknown algorithm": (("digits", "--algorithm", "adam"), "sgd, gd, srm"),
    "returns a number": (
        (f"{RECIPES}:number",),
        "returns a hushgrad.launch.recipe.Recipe, got a int",
    ),
    "missing option": ((f"{RECIPES}:required",), "--width"),
    "folder in use": ((GOOD, "--output", "used"), "used"),
    "nothing to resume": ((GOOD, "--resume"), "--output"),
    "no run to resume": ((GOOD, "--resume", "--output", "used"), "--resume"),
    "budget exhausted": (
        (GOOD, "--ledger", "books.sqlite", "--dataset-name", "people"),
        "people",
    ),
    "unknown budget": ((GOOD, "--ledger", "books.sqlite", "--dataset-name", "cats"), "cats"),
    "unknown ledger": ((GOOD, "--ledger", "no.sqlite", "--dataset-name", "people"), "no.sqlite"),
    "a ledger without a name": ((GOOD, "--ledger", "books.sqlite"), "--dataset-name"),
    "a seed with a budget": (
        (GOOD, "--seed", "1", "--ledger", "books.sqlite", "--dataset-name", "people"),
        "Rng.fixed",
    ),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=list(BAD))
def test_bad_input_is_one_sentence_and_leaves_nothing(
    arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with Ledger("books.sqlite") as ledger:
        ledger.set_budget("people", epsilon=1, delta=1e-3)
        history = ledger.history()
    before = sorted(tmp_path.rglob("*"))
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ") and words in line
    assert sorted(tmp_path.rglob("*")) == before
    with Ledger("books.sqlite") as ledger:
        assert ledger.history() == history
        assert ledger.budget("people").spent["epsilon"] == 0


def test_a_refusal_names_no_value_of_a_record() -> None:
    for name in ("nan_features", "label_out_of_range", "negative_label"):
        message = run(f"{RECIPES}:{name}").stderr
        assert not any(place in message for place in ("17", "41", "Target", "-1"))


def test_a_click_error_exits_with_2_and_leaves_nothing(tmp_path: Path) -> None:
    assert run(GOOD, "--checkpoint-every", "0").exit_code == 2
    assert list(tmp_path.iterdir()) == []


# --- nothing private is shown ---


def test_a_loss_without_noise_is_nowhere(tmp_path: Path) -> None:
    shown = ENVIRONMENT | {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": "150"}
    command = [*COMMAND, f"{RECIPES}:sentinel", "--output", "out"]
    result = subprocess.run(command, env=shown, capture_output=True, check=True)
    said = (result.stdout + result.stderr).decode()
    assert "so far, had this been the plan" in said  # the bar was shown
    assert "private metrics" in said
    digits = f"{trial_recipes.SENTINEL:.8f}"[:6].encode()  # 7.3191
    everything = said.encode() + b"".join(p.read_bytes() for p in (tmp_path / "out").iterdir())
    assert digits not in everything
    losses_shown = re.findall(r"loss ≈ (\S+)", said)
    assert losses_shown and set(losses_shown) != {f"{trial_recipes.SENTINEL:.3g}"}
    readings = Path("out/metrics.csv").read_text(encoding="utf-8").splitlines()[1:]
    losses = [float(line.split(",")[1]) for line in readings]
    # The noise of a reading of the loss is of the size of the loss: without it all were alike.
    assert max(losses) - min(losses) > 1


# --- Ctrl-C and resuming ---


def interrupted(*arguments: str, when: Callable[[], bool]) -> subprocess.CompletedProcess[bytes]:
    """Run the command in a process of its own, and press Ctrl-C once `when` holds."""
    command = [*COMMAND, *arguments]
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not when() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    target = (f"{RECIPES}:with_dropout", "--seed", "5", "--pause", "0.2")
    trained(f"{RECIPES}:with_dropout", "--seed", "5", "--output", "whole")
    part = tmp_path / "part"
    stopped = interrupted(*target, "--output", "part", when=(part / "plan.json").exists)
    assert stopped.returncode == 130, stopped.stderr.decode()
    said = stopped.stderr.decode()
    assert "Interrupted after" in said and "--output part --resume" in said
    assert (part / "checkpoint.safetensors").exists() and (part / "key").exists()
    assert not (part / "result.json").exists()
    going_on = run(*target, "--output", "part", "--resume")
    assert going_on.exit_code == 0, going_on.output
    for name in ("model.safetensors", "metrics.csv"):
        assert (part / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not (part / "key").exists()
    assert json.loads((part / "result.json").read_text(encoding="utf-8"))["steps"] == 12


def test_a_resume_is_of_the_same_run(tmp_path: Path) -> None:
    trained(GOOD, "--output", "out")
    again = run(GOOD, "--output", "out", "--resume")
    assert again.exit_code == 2 and "which is" in again.stderr
    (tmp_path / "out" / "result.json").unlink()
    other = run(GOOD, "--steps", "5", "--output", "out", "--resume")
    assert other.exit_code == 2 and "began with" in other.stderr


# --- a full disk ---


@pytest.mark.parametrize(
    ("name", "nth"),
    [
        ("request.json", 1),
        ("versions.txt", 1),
        ("checkpoint.safetensors", 2),
        ("checkpoint.safetensors", 3),
        ("model.safetensors", 1),
        ("curves.png", 1),
        ("report.md", 1),
        ("result.json", 1),
    ],
)
def test_a_full_disk_is_one_sentence_and_nothing_is_lost(
    name: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen, replace = tmp_path / "out", [], os.replace

    def full(old: Path, new: Path) -> None:
        seen.append(new.name)
        if seen.count(name) >= nth and new.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(old, new)

    arguments = (GOOD, "--steps", "4", "--checkpoint-every", "2", "--output", "out")
    monkeypatch.setattr(os, "replace", full)
    stopped = run(*arguments)
    assert stopped.exit_code == 1, stopped.output
    assert "Error: expected to write out" in stopped.stderr
    assert "No space left on device" in stopped.stderr
    assert "--output out --resume" in stopped.stderr
    assert "Traceback" not in stopped.output
    assert not list(folder.glob("*.partial"))
    assert not (folder / "result.json").exists()
    monkeypatch.setattr(os, "replace", replace)
    going_on = run(*arguments, "--resume")
    assert going_on.exit_code == 0, going_on.output
    left = {path.name for path in folder.iterdir()}
    assert left - {"ledger.sqlite-wal", "ledger.sqlite-shm"} == FILES  # this process reads on
    (row,) = Ledger(folder / "ledger.sqlite").budget("run").account.rows
    assert row.settled and row.steps == 4
    assert run(*arguments, "--resume").exit_code == 2


# --- options ---


def test_options_are_converted_by_their_annotations() -> None:
    def function(*, a: int, b: float | None = None, c: bool = False, d: Path = Path()) -> None: ...

    given = {"a": "3", "b": "0.5", "c": "yes", "d": "x/y"}
    found = arguments_for(function, given, offered={"e": 1}, name="f")
    assert found == {"a": 3, "b": 0.5, "c": True, "d": Path("x/y")}
    assert arguments_for(function, {}, offered={"a": 7}, name="f") == {"a": 7}
    with pytest.raises(ValueError, match="--a as a whole number"):
        arguments_for(function, {"a": "0.5"}, offered={}, name="f")
    with pytest.raises(ValueError, match="true or false"):
        arguments_for(function, {"a": "1", "c": "perhaps"}, offered={}, name="f")


def test_a_word_after_an_option_is_its_value() -> None:
    assert split_arguments(["r:f", "--a-b", "-1", "--flag"]) == (
        "r:f",
        {"a_b": "-1", "flag": "true"},
    )
