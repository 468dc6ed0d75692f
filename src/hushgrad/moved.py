"""Modules that have moved: importing an old name raises an error that names the new one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

_RUN = (
    "augmentation",
    "checkpoint",
    "evaluation",
    "execution",
    "guarantee",
    "metrics",
    "step",
    "training",
)
MOVED = {
    "aggregate": "hushgrad.clipping.aggregate",
    "grouping": "hushgrad.clipping.groups",
    "persample": "hushgrad.gradients",
    "points": "hushgrad.iterates",
    "recipe": "hushgrad.launch.recipe",
    "reproductions": "hushgrad_reproductions",
    "words": "hushgrad.launch.words",
    **{name: f"hushgrad.run.{name}" for name in _RUN},
}
"""Modules of version 0.1 and their new names."""


class Moved(MetaPathFinder):
    """An import hook that Python asks last, when no module of this name was found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Raise `ModuleNotFoundError` with the new name, if the module has one."""
        package, _, name = fullname.partition(".")
        new = MOVED.get(name) if package == __package__ else None
        if new is not None:
            raise ModuleNotFoundError(f"{fullname} is now called {new}", name=fullname)


def name_what_moved() -> None:
    """Install the import hook that names the new modules."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.append(Moved())
