"""Nested structures of tensors and arrays: tuples, lists, mappings and dataclasses of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

_LEAF = (Tensor, np.ndarray)
_PLAIN = (tuple, list)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to each tensor or array of a nested structure and keep everything else."""
    if isinstance(tree, _LEAF):
        return function(tree)
    if type(tree) in _PLAIN:
        return type(tree)([map_leaves(function, value) for value in tree])
    if isinstance(tree, Mapping):
        mapped = {key: map_leaves(function, value) for key, value in tree.items()}
        return mapped if type(tree) is dict else type(tree)(mapped)  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(function, value) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        fields = {name: map_leaves(function, getattr(tree, name)) for name in names}
        return dataclasses.replace(tree, **fields)
    return tree


def leaves_of(tree: Any) -> list[Any]:
    """The tensors and arrays of a nested structure, in order."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(note, tree)
    return found
