"""The public face stays small and documented, and no module grows past one sitting."""

import ast
import inspect
from itertools import pairwise
from pathlib import Path

import pytest

import hushgrad

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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_modules_are_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, (
        f"{path.name} has {lines} lines, expected at most {MAX_LINES}; split it"
    )
