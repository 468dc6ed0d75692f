"""The public face stays small and documented, and no module grows past one sitting."""

import ast
import doctest
import importlib
import inspect
import re
from collections import defaultdict
from enum import Enum
from itertools import pairwise
from pathlib import Path

import pytest

import hushgrad
from hushgrad.moved import MOVED

SOURCE = Path(__file__).parents[1] / "src" / "hushgrad"
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_NAMES = 25
MAX_LINES = 400


def docstring_below_assignment(name: str) -> str:
    """The string below `name = …` in the source: how a constant or an alias is documented."""
    for path in MODULES:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for statement, following in pairwise(body):
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            named = any(isinstance(t, ast.Name) and t.id == name for t in targets)
            match following:
                case ast.Expr(ast.Constant(str(text))) if named:
                    return text
    return ""


def own_docstring(name: str, value: object) -> str:
    """The docstring written for `value` itself, not one that it inherits."""
    if inspect.isclass(value):
        text = vars(value).get("__doc__") or ""
        # A dataclass without a docstring is given its signature.
        return "" if text.startswith(f"{value.__name__}(") else text
    if inspect.isroutine(value) or inspect.ismodule(value):
        return value.__doc__ or ""
    return docstring_below_assignment(name)


def test_names_are_few_sorted_and_unique() -> None:
    assert len(hushgrad.__all__) <= MAX_NAMES
    assert list(hushgrad.__all__) == sorted(set(hushgrad.__all__))


@pytest.mark.parametrize("name", hushgrad.__all__)
def test_every_name_is_documented(name: str) -> None:
    assert own_docstring(name, getattr(hushgrad, name)).strip(), f"{name} has no docstring"


# Rooms whose public names teach: a docstring with arguments, an example that runs, a plain start.
TEACHING_ROOMS = (
    *("accounting", "algorithms", "clipping", "data", "glm"),
    *("gradients", "ledger", "noise", "sampling"),
)


def public_callables() -> dict[str, object]:
    """The functions and classes of the package's face, and of the rooms that teach."""
    found = {name: getattr(hushgrad, name) for name in hushgrad.__all__}
    for room in TEACHING_ROOMS:
        module = importlib.import_module(f"hushgrad.{room}")
        found |= {f"{room}.{name}": getattr(module, name) for name in module.__all__}
    return {n: x for n, x in found.items() if inspect.isclass(x) or inspect.isroutine(x)}


def parameters_of(value: object) -> list[str]:
    """The arguments that a user passes; none for protocols, enumerations and exceptions."""
    if inspect.isclass(value) and (
        issubclass(value, Enum | Exception) or getattr(value, "_is_protocol", False)
    ):
        return []
    parameters = inspect.signature(value).parameters.values()  # type: ignore[arg-type]
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def explained(text: str) -> list[str]:
    """The names in a docstring's section `Args:`."""
    section = re.search(r"^Args:\n((?: {4}.*\n|\n)*)", inspect.cleandoc(text) + "\n", re.MULTILINE)
    lines = section[1].splitlines() if section else []
    heads = (re.match(r" {4}(\w[\w, ]*):", line) for line in lines)
    return [name for head in heads if head for name in head[1].split(", ")]


@pytest.mark.parametrize("name", public_callables())
def test_a_public_docstring_teaches(name: str) -> None:
    value = public_callables()[name]
    text = own_docstring(name.rpartition(".")[2], value)
    first = inspect.cleandoc(text).partition("\n")[0]
    assert first.endswith((".", ":")), f"{name}: expected one sentence in the first line"
    missing = set(parameters_of(value)) - set(explained(text))
    assert not missing, f"{name}: expected a line in Args for {sorted(missing)}"
    assert doctest.DocTestParser().get_examples(text), f"{name}: expected an example (>>>)"


def test_explained_reads_arguments_of_a_docstring() -> None:
    text = "First.\n\n    Args:\n        a, b: x\n            y: z\n        c: x\n\n"
    assert explained(text) == ["a", "b", "c"]
    assert explained("First.") == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_modules_are_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, (
        f"{path.name} has {lines} lines, expected at most {MAX_LINES}; split it"
    )


# Commands are named for the function that they call. The others are used with their module's
# name: a rule or a loss of one's own, noise or its event.
TWICE = {"custom", "doctor", "gaussian", "plan", "poisson", "train"}


def defined(path: Path) -> set[str]:
    """The public functions, classes and types (aliases in CapWords) that a module defines."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = {s.name for s in body if isinstance(s, ast.ClassDef | ast.FunctionDef)}
    for statement in body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            names |= {name} if name[0].isupper() and not name.isupper() else set()
    return {name for name in names if not name.startswith("_")}


def test_no_name_stands_for_two_things() -> None:
    where = defaultdict(list)
    for path in MODULES:
        for name in defined(path):
            where[name].append(str(path.relative_to(SOURCE)))
    twice = {name: paths for name, paths in where.items() if len(paths) > 1}
    assert {name: paths for name, paths in twice.items() if name not in TWICE} == {}
    assert twice.keys() == TWICE


@pytest.mark.parametrize("old", MOVED)
def test_a_module_that_moved_is_named_by_its_new_name(old: str) -> None:
    importlib.import_module(MOVED[old])
    with pytest.raises(ModuleNotFoundError, match=rf"hushgrad\.{old} is now called {MOVED[old]}"):
        importlib.import_module(f"hushgrad.{old}")


def test_a_module_that_never_was_is_missing_as_usual() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'hushgrad\.persampel'"):
        importlib.import_module("hushgrad.persampel")
