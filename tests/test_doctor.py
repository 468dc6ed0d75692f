"""The doctor: what it shows of a model, and what the command line makes of it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import hushgrad
from hushgrad import Refused
from hushgrad.cli import app
from hushgrad.gradients import dense, loop
from hushgrad.launch import demo

DEMOS: dict[str, Callable[[], Any]] = {"cnn": demo.cnn, "transformer": demo.transformer}


@pytest.mark.parametrize("name", DEMOS)
def test_every_parameter_has_its_row(name: str) -> None:
    model, loss, batch = DEMOS[name]()
    diagnosis = hushgrad.doctor(model, loss, batch)
    assert diagnosis.healthy
    assert diagnosis.form == "traced"
    assert diagnosis.why_not == {}
    assert diagnosis.verdict == "certified: private training will use the traced form"
    shapes = {row.name: row.shape for row in diagnosis.rows}
    assert shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    for row in diagnosis.rows:
        assert row.flops > 0, row.name
        assert row.bytes > 0, row.name
        assert row.form in ("Gram", "materialised"), row.name
        assert "dim" in row.batch_position, row.name
    assert len(diagnosis.checks) >= 5
    assert all(check.found for check in diagnosis.checks)


def test_operations_and_positions_are_named() -> None:
    model, loss, batch = demo.transformer()
    rows = {row.name: row for row in hushgrad.doctor(model, loss, batch).rows}
    assert rows["words.weight"].operations.split(", ")[0] == "embedding"
    assert "matmul" in rows["words.weight"].operations  # tied: both uses are named
    assert rows["norm.weight"].operations == "layer_norm"
    assert rows["query_key_value.weight"].operations == "linear"
    assert rows["query_key_value.weight"].batch_position == "dim 0"
    # As its own bound: 15 positions of 32 inputs and 96 outputs, in float32.
    assert rows["query_key_value.weight"].bytes in (4 * 15 * (32 + 96), 4 * 32 * 96)


@pytest.mark.parametrize("form", [dense, loop], ids=str)
def test_another_form_can_be_examined(form: Any) -> None:
    model, loss, batch = demo.cnn()
    diagnosis = hushgrad.doctor(model, loss, (batch[0][:6], batch[1][:6]), form=form)
    assert diagnosis.healthy
    assert diagnosis.form == form.name
    assert all(row.form.startswith(form.name) and row.bytes > 0 for row in diagnosis.rows)


def test_a_form_that_was_passed_over_is_explained() -> None:
    weight = nn.Parameter(torch.randn(3))
    model = nn.Module()
    model.weight = weight

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return 2 * g

    diagnosis = hushgrad.doctor(
        model, lambda x: (x * Doubled.apply(weight.exp())).sum(1), torch.randn(8, 3)
    )
    assert diagnosis.healthy
    assert diagnosis.form != "traced"
    assert "weight" in diagnosis.why_not["traced"]


def test_the_model_stays_as_it_was() -> None:
    model, loss, batch = demo.cnn()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    hushgrad.doctor(model, loss, batch)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    assert model.training


def test_a_refused_model_raises() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(Refused, match="layer '1' is a BatchNorm1d in training mode"):
        hushgrad.doctor(model, lambda x: model(x).sum(1), torch.randn(8, 3))


def test_the_tables_show_every_parameter() -> None:
    model, loss, batch = demo.transformer()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(hushgrad.doctor(model, loss, batch))
    text = console.export_text()
    for name, _ in model.named_parameters():
        assert name in text
    assert "certified: private training will use the traced form" in text
    assert "fails" not in text


# --- the command line ---


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the current directory, as a user would have it."""
    source = """
import torch
from torch import nn

def refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return model, lambda x: model(x).sum(1), torch.randn(8, 3)

def frozen():
    model = nn.Linear(3, 4).requires_grad_(False)
    return model, lambda x: model(x).sum(1), torch.randn(8, 3)

def uneven():
    model = nn.Linear(3, 4)
    return model, lambda b: model(b[0]).sum(1), (torch.randn(8, 3), torch.randn(7))

def pair():
    return 1, 2

number = 3
"""
    (tmp_path / "hushgrad_doctor_case.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield "hushgrad_doctor_case"
    sys.modules.pop("hushgrad_doctor_case", None)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.mark.parametrize("name", DEMOS)
def test_a_certified_model_exits_with_0(name: str) -> None:
    result = run(f"hushgrad.launch.demo:{name}")
    assert result.exit_code == 0, result.output
    assert "certified" in result.output


def test_json_has_rows_and_verdict() -> None:
    result = run("hushgrad.launch.demo:cnn", "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    model = demo.cnn()[0]
    assert [row["name"] for row in facts["rows"]] == [n for n, _ in model.named_parameters()]
    assert all(row["flops"] > 0 and row["bytes"] > 0 for row in facts["rows"])
    assert facts["healthy"] is True
    assert facts["verdict"].startswith("certified")
    assert facts["form"] == "traced"


def test_a_refused_model_exits_with_1_and_its_message(target: str) -> None:
    result = run(f"{target}:refused")
    assert result.exit_code == 1
    assert "refused" in result.output
    assert "BatchNorm1d in training mode" in " ".join(result.output.split())
    assert "replace_batchnorm" in result.output


def test_a_refusal_is_json_too(target: str) -> None:
    result = run(f"{target}:refused", "--json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert facts["healthy"] is False
    assert facts["verdict"].startswith("refused: layer '1' is a BatchNorm1d")


@pytest.mark.parametrize(
    ("function", "message"), [("frozen", "private parameter"), ("uneven", "first dimension")]
)
def test_a_subject_that_makes_no_sense_exits_with_1_and_its_message(
    target: str, function: str, message: str
) -> None:
    result = run(f"{target}:{function}")
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    "suffix",
    ["", ":", ":nothing", ":pair", ":number"],
    ids=["no colon", "empty", "missing", "pair", "number"],
)
def test_a_bad_function_exits_with_2(target: str, suffix: str) -> None:
    result = run(target + suffix)
    assert result.exit_code == 2
    assert "hushgrad.launch.demo:cnn" in result.output.replace("\n", "")


@pytest.mark.parametrize("bad", ["no_such_module_anywhere:f", "cnn", ""])
def test_a_bad_module_exits_with_2(bad: str) -> None:
    result = run(bad)
    assert result.exit_code == 2
    assert "module:function" in result.output
