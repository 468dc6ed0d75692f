"""What `hushgrad train` was asked: a recipe with its options, put together and checked."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hushgrad.cli.options import bound, option_name, split
from hushgrad.cli.target import NotFound, called, function_named
from hushgrad.data.files import VARIABLE
from hushgrad.launch.builtin import CLASSIFIED, classifier
from hushgrad.launch.recipe import Recipe
from hushgrad.launch.report import REQUEST, Request
from hushgrad.ledger import Budget, Ledger
from hushgrad.run.resuming import CHECKPOINT

RUNS = Path("runs")
"""Where runs are kept that were given no folder."""


@dataclass(frozen=True)
class Asked:
    """A recipe's function, the options for it, and the name that its folders get."""

    target: str
    function: Callable[..., Any]
    options: dict[str, str]
    name: str

    def recipe(self, *, data: Path | None, seed: int) -> Recipe:
        """Call the function; it must return a Recipe."""
        given: dict[str, Any] = dict(self.options)
        if data is not None:
            given["data"] = data
        found = os.environ.get(VARIABLE)
        offered = {"data": Path(found) if found else None, "seed": seed}
        keywords = bound(self.function, given, offered=offered, name=self.target)
        torch.manual_seed(seed)
        with called(self.target):
            recipe = self.function(**keywords)
        if not isinstance(recipe, Recipe):
            raise ValueError(
                f"expected a function that returns a hushgrad.launch.recipe.Recipe, got a "
                f"{type(recipe).__name__} from {self.target}; return Recipe(…)"
            )
        return recipe


def asked_for(arguments: Sequence[str], named: dict[str, str | None]) -> Asked:
    """The recipe that the command line names, by a target or by a data set and a model."""
    target, others = split(arguments)
    options = {name: value for name, value in named.items() if value is not None} | others
    if target is None and "dataset" not in options:
        raise ValueError(
            "expected a recipe or a data set, got neither; pass file.py:function, or "
            f"--dataset with one of {', '.join(CLASSIFIED)}"
        )
    if target in CLASSIFIED and "dataset" not in options:
        options, target = {"dataset": target, **options}, None
    if target is None:
        name = f"{options['dataset']}-{options.get('model', 'linear')}"
        return Asked("hushgrad.launch.builtin:classifier", classifier, options, name)
    try:
        function = function_named(target)
    except NotFound as error:
        raise ValueError(
            f"expected a recipe as file.py:function, module:function or one of "
            f"{', '.join(CLASSIFIED)}, got {target!r} ({error}); correct the name"
        ) from error
    module = Path(target.rpartition(":")[0]).stem.rpartition(".")[2]
    return Asked(target, function, options, f"{module}-{target.rpartition(':')[2]}")


def request_for(
    asked: Asked, *, seed: int | None, data: Path | None, ledger: Sequence[str]
) -> Request:
    """The request of a new run, with the command that repeats it."""
    words = ["hushgrad", "train", *([] if asked.function is classifier else [asked.target])]
    words += [word for name, value in asked.options.items() for word in (option_name(name), value)]
    words += ["--data", str(data)] if data is not None else []
    words += ["--seed", str(seed)] if seed is not None else []
    start = secrets.randbelow(2**31) if seed is None else seed
    command = shlex.join([*words, *ledger])
    return Request(asked.target, asked.options, seed, start, command)


def folder_of(output: Path | None) -> Path:
    """The folder of the run to resume; without one, it cannot be told which run is meant."""
    if output is None:
        raise ValueError("expected the folder of the run to resume, got none; name it by --output")
    return output


def resumed_request(asked: Request, folder: Path) -> Request:
    """The request that the run in `folder` began with, which must be the same as now.

    A run that was killed before its request was written has the one of now.
    """
    if (folder / CHECKPOINT).exists() and not (folder / REQUEST).exists():
        return asked
    request = Request.read(folder)
    if (folder / "result.json").exists():
        raise ValueError(f"expected a run that is not over, got {folder}, which is; start another")
    before = (request.recipe, request.options, request.seed)
    if before != (asked.recipe, asked.options, asked.seed):
        raise ValueError(
            f"expected the recipe, options and seed that the run began with, got others; its "
            f"command was: {request.command}"
        )
    return request


def free_folder(output: Path | None, name: str) -> Path:
    """The folder of a new run: the one asked for, if it is free, or the next under runs/."""
    if output is not None:
        if output.exists():
            raise ValueError(
                f"expected a folder that is not there yet, got {output}; name another, or pass "
                "--resume to go on with the run in it"
            )
        return output
    number = 1
    while (folder := RUNS / f"{name}-{number}").exists():
        number += 1
    return folder


@contextmanager
def budget_for(ledger: Path | None, name: str | None) -> Iterator[Budget | None]:
    """The budget that the run is charged to, if a ledger and a name were given."""
    if (ledger is None) != (name is None):
        missing = "--ledger" if ledger is None else "--dataset-name"
        raise ValueError(
            f"expected --ledger and --dataset-name together, got no {missing}; give both"
        )
    if ledger is None or name is None:
        yield None
        return
    if not ledger.is_file():
        raise ValueError(
            f"expected a ledger, got no file {ledger}; make one with hushgrad ledger set-budget"
        )
    with Ledger(ledger) as books:
        yield books.budget(name)
