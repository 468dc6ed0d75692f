"""Recipes and reproductions by name, as installed packages offer them.

The library imports neither. They are found through the entry points of two groups, and imported
once they are named. hushgrad's own are in its pyproject.toml; a package of yours adds to them by

    [project.entry-points."hushgrad.recipes"]
    census = "my_package.census"

after which `hushgrad train census:function` runs a recipe of that module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from hushgrad.launch.recipe import Recipe

RECIPES = "hushgrad.recipes"
"""The group of recipes: each entry is a module, of which every function that returns a Recipe is a
recipe."""

REPRODUCTIONS = "hushgrad.reproductions"
"""The group of reproductions: each entry is a function of `StudySettings`."""


def plugin_names(group: str) -> list[str]:
    """The names that installed packages offer in a group, sorted. Imports none of them.

    >>> "mnist" in plugin_names(RECIPES)
    True
    """
    return sorted(entry_points(group=group).names)


def load_plugin(group: str, name: str) -> Any:
    """Import what is offered by this name.

    Raises:
        ValueError: no package offers the name, or several do.
    """
    found = list(entry_points(group=group, name=name))
    if not found:
        known = ", ".join(plugin_names(group)) or "none"
        raise ValueError(f"expected one of {known}, got {name!r}; correct the name")
    if len(found) > 1:
        # Taking either would make a command mean what the order of installation says.
        packages = " and ".join(sorted(entry.dist.name for entry in found if entry.dist))
        raise ValueError(
            f"expected one package that offers {name!r}, got {packages}; uninstall one of them"
        )
    return found[0].load()


def recipes_in(module: ModuleType) -> dict[str, Callable[..., Recipe]]:
    """The recipes that a module defines: its public functions that are said to return a Recipe."""
    return {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_")
        and function.__module__ == module.__name__  # not one that it imports
        # Annotations are text where a module postpones them.
        and inspect.signature(function).return_annotation in (Recipe, Recipe.__name__)
    }


def first_line(thing: object) -> str:
    """The first sentence of a docstring, for a list.

    >>> first_line(first_line)
    'The first sentence of a docstring, for a list.'
    """
    return (inspect.getdoc(thing) or "").partition("\n")[0]
