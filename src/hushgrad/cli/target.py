"""`module:function` and `file.py:function`: a function of the user's by its name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class NotFound(ValueError):
    """Raised where a target names no function; says what is wrong with it."""


def function_named(target: str) -> Callable[..., Any]:
    """The function that `module:function` or `file.py:function` names.

    A module is looked for in the current folder first. A file may import its neighbours.
    """
    place, colon, name = target.rpartition(":")
    if not colon:
        raise NotFound("no colon in it")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
    found = getattr(module, name, None)
    if not callable(found):
        raise NotFound(f"{place} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def _from_module(name: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except (ImportError, ValueError) as error:
        raise NotFound(str(error)) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise NotFound(f"there is no file {path}")
    _look_in(path.resolve().parent)
    _look_in(Path.cwd())
    name = f"hushgrad_target_{path.stem}"  # a file random.py must not take the place of random
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up there
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise NotFound(f"{path} cannot be imported: {error}") from error
    return module


def _look_in(folder: Path) -> None:
    """Put a folder on the path of imports, for good: a function may import when it is called."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
