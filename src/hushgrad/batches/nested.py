"""Nested structures of tensors and arrays: tuples, lists, mappings and dataclasses of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

_LEAF = (Tensor, np.ndarray)
_PLAIN = (tuple, list)


def is_leaf(x: Any) -> bool:
    """Return whether `x` is a tensor or an array."""
    return isinstance(x, _LEAF)


def parts_of(tree: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a container, each with its accessor (`[0]`, `.x`); None for others."""
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", getattr(tree, name)) for name in tree._fields]
    if isinstance(tree, list | tuple):
        return [(f"[{i}]", value) for i, value in enumerate(tree)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        return [(f".{name}", getattr(tree, name)) for name in names]
    return None


def rebuild(tree: Any, values: list[Any]) -> Any:
    """Return a container of the same type with other values as its parts."""
    if type(tree) in _PLAIN:
        return type(tree)(values)
    if isinstance(tree, Mapping):
        mapped = dict(zip(tree, values, strict=True))
        return mapped if type(tree) is dict else type(tree)(mapped)  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*values)
    if isinstance(tree, list | tuple):
        return type(tree)(values)
    names = [field.name for field in dataclasses.fields(tree) if field.init]
    return dataclasses.replace(tree, **dict(zip(names, values, strict=True)))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to each tensor or array of a nested structure and keep everything else."""
    if is_leaf(tree):
        return function(tree)
    if type(tree) in _PLAIN:
        return type(tree)([map_leaves(function, value) for value in tree])
    parts = parts_of(tree)
    if parts is None:
        return tree
    return rebuild(tree, [map_leaves(function, value) for _, value in parts])


def leaves_of(tree: Any) -> list[Any]:
    """Return the tensors and arrays of a nested structure, in order."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(note, tree)
    return found
