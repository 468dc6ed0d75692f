"""What `hushgrad train` was asked: a recipe with its options, put together and checked."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hushgrad.cli.options import arguments_for, option_name, split_arguments
from hushgrad.cli.target import NotFound, explain_failure, find_function
from hushgrad.data import CLASSIFIED
from hushgrad.data.files import VARIABLE
from hushgrad.launch.builtin import MODELS, classifier
from hushgrad.launch.plugins import RECIPES, first_line, load_plugin, plugin_names, recipes_in
from hushgrad.launch.recipe import Recipe
from hushgrad.launch.report import REQUEST, Request
from hushgrad.run.resuming import CHECKPOINT

RUNS = Path("runs")
"""Where runs are kept that were given no folder."""


@dataclass(frozen=True)
class RecipeCall:
    """A recipe's function with its options, before it is called.

    Args:
        target: the recipe as the command line names it.
        function: what makes the recipe.
        options: options by the names of the function's parameters, as text.
        name: what the folders of its runs are called.
    """

    target: str
    function: Callable[..., Any]
    options: dict[str, str]
    name: str

    def recipe(self, *, data: Path | None, seed: int) -> Recipe:
        """Call the function.

        Args:
            data: the folder of the data sets; what HUSHGRAD_DATA names if None.
            seed: that of the first weights.

        Raises:
            ValueError: an option makes no sense, or what is returned is no Recipe.
        """
        given: dict[str, Any] = dict(self.options)
        if data is not None:
            given["data"] = data
        found = os.environ.get(VARIABLE)
        # Offered, not given: a recipe that takes neither is called without them.
        offered = {"data": Path(found) if found else None, "seed": seed}
        keywords = arguments_for(self.function, given, offered=offered, name=self.target)
        torch.manual_seed(seed)  # for a recipe that has no parameter of this name
        with explain_failure(self.target):
            recipe = self.function(**keywords)
        if not isinstance(recipe, Recipe):
            raise ValueError(
                f"expected a function that returns a hushgrad.launch.recipe.Recipe, got a "
                f"{type(recipe).__name__} from {self.target}; return Recipe(…)"
            )
        return recipe


def read_call(arguments: Sequence[str], named: Mapping[str, str | None]) -> RecipeCall:
    """The recipe that the command line names, by a target or by a data set and a model.

    Args:
        arguments: the target, if there is one, and options of the recipe.
        named: the options of the recipe that the command declares itself, None if left out.

    Raises:
        ValueError: there is no target and no data set, or no such recipe.

    >>> read_call(["digits", "--clip", "abadi"], {"model": "mlp"}).options
    {'dataset': 'digits', 'model': 'mlp', 'clip': 'abadi'}
    """
    target, others = split_arguments(arguments)
    options = {name: value for name, value in named.items() if value is not None} | others
    if target is None and "dataset" not in options:
        raise ValueError(
            "expected a recipe or a data set, got neither; pass file.py:function, a name of "
            f"hushgrad train list, or --dataset with one of {', '.join(CLASSIFIED)}"
        )
    # `digits` alone is short for `--dataset digits`.
    if target in CLASSIFIED and "dataset" not in options:
        options, target = {"dataset": target, **options}, None
    if target is None:
        name = f"{options['dataset']}-{options.get('model', 'linear')}"
        return RecipeCall("hushgrad.launch.builtin:classifier", classifier, options, name)
    try:
        function = _find_recipe(target)
    except NotFound as error:
        raise ValueError(
            f"expected a recipe as file.py:function, module:function or one of "
            f"{', '.join(CLASSIFIED)}, got {target!r} ({error}); correct the name, or see "
            "hushgrad train list"
        ) from error
    module = Path(target.rpartition(":")[0]).stem.rpartition(".")[2]
    return RecipeCall(target, function, options, f"{module}-{target.rpartition(':')[2]}")


def _find_recipe(target: str) -> Callable[..., Any]:
    """The function of an installed recipe, a module or a file.

    Installed recipes come first, so that a name means the same in every folder; a file of one's
    own that is called alike is reached by its `.py`.
    """
    place, _, name = target.rpartition(":")
    if place not in plugin_names(RECIPES):
        return find_function(target)
    try:
        with explain_failure(f"the recipes of {place}"):
            module = load_plugin(RECIPES, place)
    except (ValueError, OSError) as error:
        raise NotFound(str(error)) from error
    recipes = recipes_in(module)
    if name not in recipes:
        raise NotFound(f"{place} has no recipe {name!r}; it has {', '.join(recipes)}")
    return recipes[name]


def recipe_lines() -> Iterator[tuple[str, str]]:
    """What can be trained by name, each with a line on what it is.

    One recipe package that cannot be imported does not hide the others: its line says why.
    """
    for place in plugin_names(RECIPES):
        try:
            with explain_failure(f"the recipes of {place}"):
                module = load_plugin(RECIPES, place)
        except (ValueError, OSError) as error:
            yield f"{place}:…", f"cannot be imported: {error}"
            continue
        for name, function in recipes_in(module).items():
            yield f"{place}:{name}", first_line(function)
    models = ", ".join(MODELS)
    for name in CLASSIFIED:
        yield name, f"The data set {name}, with --model {models}."


def request_for(
    call: RecipeCall, *, seed: int | None, data: Path | None, ledger: Sequence[str]
) -> Request:
    """The request of a new run, with the command that repeats it.

    Args:
        call: the recipe and its options.
        seed: the run's seed, None for a private run.
        data: the folder of the data sets, if one was named.
        ledger: the options that name a budget, none if there is none.
    """
    # The built-in recipe is spelled by its options, of which the data set is one.
    words = ["hushgrad", "train", *([] if call.function is classifier else [call.target])]
    words += [word for name, value in call.options.items() for word in (option_name(name), value)]
    words += ["--data", str(data)] if data is not None else []
    words += ["--seed", str(seed)] if seed is not None else []
    # First weights are public, so their seed may be kept; the run's key has nothing to do with it.
    start = secrets.randbelow(2**31) if seed is None else seed
    command = shlex.join([*words, *ledger])
    return Request(call.target, call.options, seed, start, command)


def folder_to_resume(output: Path | None) -> Path:
    """The folder of the run to resume.

    Raises:
        ValueError: none was named, so that it cannot be told which run is meant.
    """
    if output is None:
        raise ValueError("expected the folder of the run to resume, got none; name it by --output")
    return output


def request_to_resume(new: Request, folder: Path) -> Request:
    """The request that the run in `folder` began with, which must be the same as now.

    A run that was killed before its request was written has the one of now.

    Raises:
        ValueError: the run is over, or it began with another recipe, other options or another seed.
    """
    if (folder / CHECKPOINT).exists() and not (folder / REQUEST).exists():
        return new
    request = Request.read(folder)
    # Written last, so that it marks a run that left everything.
    if (folder / "result.json").exists():
        raise ValueError(f"expected a run that is not over, got {folder}, which is; start another")
    # Other options would make another plan, which the checkpoint is not of.
    before = (request.recipe, request.options, request.seed)
    if before != (new.recipe, new.options, new.seed):
        raise ValueError(
            f"expected the recipe, options and seed that the run began with, got others; its "
            f"command was: {request.command}"
        )
    return request


def free_folder(output: Path | None, name: str) -> Path:
    """The folder of a new run: the one that was named, or the next free one under runs/.

    Raises:
        ValueError: the folder that was named is there already.
    """
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
