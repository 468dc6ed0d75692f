"""The command that shows what clipping optimises."""

import csv
import json
import math

import pytest
from typer.testing import CliRunner

from hushgrad.cli import app


def run(*arguments: str):
    return CliRunner().invoke(app, ["clipping-bias", *arguments])


def test_it_prints_the_theorems_numbers_and_writes_picture_and_table(tmp_path) -> None:
    picture = tmp_path / "bias.png"
    done = run("--norms", "0.1,1", "--rules", "abadi,normalize", "--output", str(picture), "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    tight, wide, sign, _ = rows
    assert tight["clipped minimiser"] == pytest.approx(2 * math.log(1 / 0.1 - 1))
    assert tight["minimiser"] == pytest.approx(0, abs=1e-9) and tight["excess risk"] > 0.5
    assert wide["excess risk"] == pytest.approx(0, abs=1e-9)
    assert sign["clipped minimiser"] is None  # two pull one way for ever
    assert picture.read_bytes().startswith(b"\x89PNG")
    with picture.with_suffix(".csv").open(encoding="utf-8") as file:
        assert [row["rule"] for row in csv.DictReader(file)] == [row["rule"] for row in rows]


@pytest.mark.parametrize("loss", ["squared", "hinge", "huber", "poisson"])
def test_every_loss_is_drawn(loss: str, tmp_path) -> None:
    rules = "abadi,automatic,normalize,reparameterized,discard"
    output = str(tmp_path / "a.png")
    done = run("--loss", loss, "--norms", "0.5,2", "--rules", rules, "--output", output)
    assert done.exit_code == 0, done.output
    assert "reparameterized" in done.output


def test_a_file_of_ones_own(tmp_path) -> None:
    data = tmp_path / "data.csv"
    data.write_text("1,0\n1,1\n1,8\n", encoding="utf-8")
    output = str(tmp_path / "a.png")
    done = run(
        "--loss",
        "squared",
        "--norms",
        "0.5",
        "--rules",
        "abadi",
        "--data",
        str(data),
        "--output",
        output,
        "--json",
    )
    (row,) = json.loads(done.stdout)
    assert row["minimiser"] == pytest.approx(3) and row["clipped minimiser"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--loss", "cubic"), "expected a loss among"),
        (("--rules", "median"), "expected a rule among"),
        (("--norms", "a,b"), "expected numbers"),
        (("--norms", "-1"), "expected clip_norm > 0"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message: str, tmp_path) -> None:
    done = run(*arguments, "--output", str(tmp_path / "a.png"))
    assert done.exit_code == 2 and message in done.stderr
