"""Values in a batch that are no tensors: declared the same for every batch, or refused.

Certification varies the tensors of a batch and can see what they do. A number, a string or a list
cannot be varied, and may have been computed from the other records of the batch.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hushgrad.batches.nested import is_leaf, parts_of, rebuild
from hushgrad.types import Batch, Refused

Value = TypeVar("Value")
BatchStructure = Hashable
"""A batch's structure, with its constants: all of it that is in no tensor."""

_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)


class Constant:
    """A value that was declared the same for every batch; the loss gets the value itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"constant({self.value!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and _form(self.value) == _form(other.value)

    def __hash__(self) -> int:
        return hash(_form(self.value))


def constant(value: Value) -> Value:
    """Declare a value in a batch that is no tensor the same for every batch of a run.

    The loss gets the value itself. It must be public: known before any record is read, such as a
    fixed length or the name of a task, and never computed from the records of a batch (their
    number, a number of tokens, the longest length).

    Guarantees: a run refuses a batch in which the value is another than in the batches before.

    Args:
        value: a number, a string, bytes, an enum's member, a dtype, a device, or a tuple of these.

    Returns:
        A marker to put into the batch, typed as the value that the loss will get.

    Raises:
        Refused: if the value is anything else. A tensor that all batches share belongs into the
            loss, which may close over it.

    >>> batch = {"tokens": torch.zeros(4, 16), "task": constant("sentiment")}
    >>> batch["task"]
    constant('sentiment')
    """
    if not _is_plain(value) or value != value:
        raise Refused(
            "expected a number, a string, an enum's member, a dtype, a device or a tuple of these "
            f"as a constant, got a {type(value).__name__}; let the loss close over what all "
            "batches share"
        )
    return cast(Value, Constant(value))


def unwrap_constants(batch: Batch) -> tuple[Batch, BatchStructure]:
    """Return the batch with its constants' values, as the loss gets it, and its structure.

    Args:
        batch: nested tensors and constants.

    Raises:
        Refused: if it contains anything but tensors, `None`, constants and containers of them.

    Example:
        >>> unwrap_constants({"x": torch.zeros(1), "task": constant("sentiment")})[0]
        {'x': tensor([0.]), 'task': 'sentiment'}
    """
    return _open(batch, "batch")


def _open(tree: Any, name: str) -> tuple[Any, BatchStructure]:
    if isinstance(tree, Constant):
        return tree.value, _form(tree.value)
    if tree is None or is_leaf(tree):
        return tree, Tensor if is_leaf(tree) else None
    parts = parts_of(tree)
    if parts is None:
        raise Refused(
            f"expected tensors, got a {type(tree).__name__} at {name}, which certification cannot "
            "vary: it may depend on the other records of the batch (their number, their lengths), "
            "and one record would then move all the others; give each record its own in a tensor, "
            "compute it in the loss from one record alone, or, where it is the same for every "
            "batch, declare it so: hushgrad.constant(...)"
        )
    values, forms = [], []
    for label, part in parts:
        value, form = _open(part, name + label)
        values.append(value)
        forms.append((label, form))
    return rebuild(tree, values), (type(tree), *forms)


def _form(value: Any) -> BatchStructure:
    """Of equal values of different types, as of 1 and True, two forms."""
    if isinstance(value, tuple):
        return (tuple, *map(_form, value))
    return (type(value), value)


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
