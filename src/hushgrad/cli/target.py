"""`module:function` and `file.py:function`: a function of the user's by its name."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_LIBRARY = re.compile(r"site-packages|^<frozen")


class NotFound(ValueError):
    """Raised where a target names no function; says what is wrong with it."""


@contextmanager
def explain_failure(what: str, *, besides: type[Exception] = ValueError) -> Iterator[None]:
    """Turn what the user's own code raises into one sentence with the file and the line.

    Args:
        what: what is run, as the user calls it.
        besides: one more kind of error that passes as it is.

    Raises:
        ValueError: the block raised anything but `ValueError`, `OSError` or `besides`, which are
            sentences already. `SystemExit` counts too: a recipe that ends the process by itself
            has returned nothing.

    >>> with explain_failure("the recipe"):
    ...     1 / 0
    Traceback (most recent call last):
    ValueError: expected the recipe to run, got ZeroDivisionError: division by zero ...
    """
    try:
        yield
    except (ValueError, OSError, besides):
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"expected {what} to run, got {type(error).__name__}: {error}{_place(error)}; "
            "correct it there"
        ) from error


def _place(error: BaseException) -> str:
    """Where an error came from, in the innermost file that is not a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    # The user looks for the mistake in their own file, not where torch raised.
    own = [frame for frame in frames if not _LIBRARY.search(frame.filename)]
    if not own or Path(own[-1].filename).parent == Path(__file__).parent:
        return ""
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})"


def find_function(target: str) -> Callable[..., Any]:
    """The function that `module:function` or `file.py:function` names.

    A module is looked for in the current folder first. A file may import its neighbours.

    Args:
        target: a module's dotted name or a file, a colon, and the name of a function in it.

    Raises:
        NotFound: there is none, or its module cannot be imported.

    >>> find_function("math:floor")(2.5)
    2
    """
    place, colon, name = target.rpartition(":")
    if not colon:
        raise NotFound("no colon in it")
    # The ending decides, not whether there is such a file: a missing one is named as a file.
    module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
    found = getattr(module, name, None)
    if not callable(found):
        raise NotFound(f"{place or 'it'} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def _from_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise NotFound(f"{name!r} is neither a module's name nor that of a file that ends in .py")
    _look_in(Path.cwd())
    try:
        with explain_failure(name, besides=ImportError):
            return importlib.import_module(name)
    except (ImportError, ValueError, OSError) as error:
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
        with explain_failure(path.name, besides=ImportError):
            spec.loader.exec_module(module)
    except (ImportError, ValueError, OSError) as error:
        raise NotFound(f"{path} cannot be imported: {error}") from error
    return module


def _look_in(folder: Path) -> None:
    """Put a folder on the path of imports, for good: a function may import when it is called."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
