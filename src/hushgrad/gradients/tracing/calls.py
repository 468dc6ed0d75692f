"""Intercepted calls: their names, and the tensors among their arguments and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KERNELS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def name_of(function: Any) -> str:
    """An operation's name; reading or setting an attribute is `get shape`, `set data`."""
    if isinstance(function, KERNELS):
        return str(function)  # a kernel of someone's own, with its namespace
    name = str(getattr(function, "__name__", function))
    if name in ("__get__", "__set__"):
        return f"{name.strip('_')} {function.__self__.__name__}"
    return name


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a call's arguments, which nest tuples, lists and one dictionary."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [x for branch in tree for x in tensors_in(branch)]
    if isinstance(tree, dict):
        return [x for branch in tree.values() for x in tensors_in(branch)]
    return []


def map_in(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `function` to each tensor of a call's arguments or results."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, (tuple, list)):  # torch's named results are also made from a sequence
        return type(tree)([map_in(function, x) for x in tree])
    if isinstance(tree, dict):
        return {key: map_in(function, x) for key, x in tree.items()}
    return tree


def first_row(x: Tensor, table: Tensor) -> int | None:
    """The row of `table` that `x` begins at, if `x` is a view of some of its rows."""
    if not x.numel() or x.untyped_storage().data_ptr() != table.untyped_storage().data_ptr():
        return None
    if x.dim() == 0 or x.shape[1:] != table.shape[1:] or x.stride() != table.stride():
        return None
    if x.stride(0) == 0:
        return None
    start, rest = divmod(int(x.storage_offset() - table.storage_offset()), x.stride(0))
    return start if rest == 0 and 0 <= start <= len(table) - len(x) else None


def writes_in_place(name: str) -> bool:
    """Does an operation of this name write its first argument?"""
    return (
        name.startswith("set ")
        or (name.endswith("_") and not name.endswith("__"))
        or name in _IN_PLACE_OPERATORS
    )


_IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "matmul", "mod", "pow", "and", "or")
)
