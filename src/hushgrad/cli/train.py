"""`hushgrad train`."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hushgrad.cli.errors import sentences
from hushgrad.cli.options import bound, split
from hushgrad.cli.target import NotFound, function_named
from hushgrad.launch import launch
from hushgrad.recipe import Recipe
from hushgrad.rng import Rng


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [--NAME VALUE]...",
            help="file.py:function or module:function, which returns a Recipe, and its parameters",
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε of the whole run")] = None,
    data: Annotated[
        Path | None, typer.Option(help="the folder of the data sets; HUSHGRAD_DATA if left out")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="the folder for what the run leaves")] = None,
    seed: Annotated[int | None, typer.Option(help="reproducible, and not private")] = None,
    quiet: Annotated[bool, typer.Option(help="no progress bar")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Train a model with differential privacy, as a recipe says.

    A recipe is a function that returns a hushgrad.recipe.Recipe. Its parameters are options here.
    """
    with sentences():
        target, options = split(arguments or [])
        if target is None:
            raise ValueError("expected a recipe, got none; pass file.py:function")
        given: dict[str, Any] = {**options}
        if epsilon is not None:
            given["epsilon"] = epsilon
        if data is not None:
            given["data"] = data
        function = _function(target)
        folder = _folder(output, function.__name__)
        start = secrets.randbelow(2**31) if seed is None else seed
        found = os.environ.get("HUSHGRAD_DATA")
        offered = {"data": Path(found) if found else None, "seed": start}
        keywords = bound(function, given, offered=offered, name=target)
        torch.manual_seed(start)
        recipe = function(**keywords)
        if not isinstance(recipe, Recipe):
            raise ValueError(
                f"expected a function that returns a hushgrad.recipe.Recipe, got a "
                f"{type(recipe).__name__} from {target}; return Recipe(...)"
            )
        rng = Rng.from_os() if seed is None else Rng.fixed(seed)
        outcome = launch(recipe, rng=rng)
    plan = recipe.plan
    result = {
        "recipe": target,
        "options": {name: str(value) for name, value in given.items() if name != "data"},
        "seed": seed,
        "accuracy": outcome.accuracy,
        "epsilon": plan.epsilon if plan.noise_multiplier else None,
        "delta": plan.delta,
        "private": seed is None and plan.noise_multiplier > 0,
        "noise_multiplier": plan.noise_multiplier,
        "steps": outcome.run.steps_taken,
        "seconds": round(outcome.seconds, 3),
        "folder": str(folder),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(result))
    else:
        typer.echo(f"accuracy on the test records: {outcome.accuracy}\n{outcome.run.guarantee}")


def _function(target: str) -> Callable[..., Any]:
    try:
        return function_named(target)
    except NotFound as error:
        raise ValueError(
            f"expected a recipe as file.py:function or module:function, got {target!r} ({error})"
        ) from error


def _folder(output: Path | None, name: str) -> Path:
    if output is not None:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(f"expected a new or empty output folder, got {output}; name another")
        return output
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder
