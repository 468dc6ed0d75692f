"""`hushgrad doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from torch import Tensor, nn

from hushgrad.batches.nested import leaves_of
from hushgrad.cli.target import explain_failure, find_function
from hushgrad.diagnosis import doctor as examine


def doctor(
    target: Annotated[
        str,
        typer.Argument(
            help="module:function or file.py:function; it returns a model, its loss and a batch"
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Show how a model's per-sample gradients are computed, and prove them on probes.

    Exits with 0 if the model is certified, 1 if it is refused, 2 if TARGET is no such function.
    """
    model, loss, batch = _load(target)
    console = Console()
    try:
        with explain_failure("the model and its loss"):
            diagnosis = examine(model, loss, batch)
    except ValueError as refusal:  # a finding about the model, not a mistake in the command
        if as_json:
            typer.echo(json.dumps({"verdict": f"refused: {refusal}", "healthy": False}))
        else:
            console.print(f"[bold red]refused[/bold red]: {escape(str(refusal))}")
        raise typer.Exit(1) from refusal
    if as_json:
        facts = asdict(diagnosis) | {"verdict": diagnosis.verdict, "healthy": diagnosis.healthy}
        typer.echo(json.dumps(facts))
    else:
        console.print(diagnosis)
    # For scripts: a model that is refused is not a mistake in the command, which is 2.
    raise typer.Exit(0 if diagnosis.healthy else 1)


def _load(target: str) -> Any:
    """Model, loss and batch of the function that the target names."""
    try:
        with explain_failure(target):
            model, loss, batch = find_function(target)()
        _require_model(model, loss, batch)
    except (OSError, ValueError) as error:
        # typer names the argument itself, and says how to get help.
        message = (
            f"expected module:function, a function without arguments that returns model, loss and "
            f"batch, got {target!r} ({error}); try hushgrad.launch.demo:cnn"
        )
        raise typer.BadParameter(message) from error
    return model, loss, batch


def _require_model(model: Any, loss: Any, batch: Any) -> None:
    if not isinstance(model, nn.Module) or not callable(loss):
        raise ValueError(f"it returned a {type(model).__name__} and a {type(loss).__name__}")
    if not any(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) for leaf in leaves_of(batch)):
        raise ValueError("its batch holds no record")
