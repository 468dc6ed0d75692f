"""Data sets as sources of batches: records by position, in memory or fetched one by one."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from hushgrad.batches.nested import leaves_of, map_leaves
from hushgrad.types import Batch, Refused


@runtime_checkable
class Source(Protocol):
    """A data set that returns records by position, one by one or as a batch."""

    def __len__(self) -> int: ...

    @property
    def fetches_together(self) -> bool:
        """True if several records are made in one call, which could mix them."""

    def records(self, positions: list[int]) -> list[Any]:
        """Return the records at these positions, in this order."""

    def batch(self, positions: list[int]) -> Batch:
        """Return the records at these positions as tensors, with the records in dimension 0."""


@dataclass(frozen=True)
class Columns:
    """A tensor or an array, or a tuple or mapping of them, with the records in dimension 0."""

    columns: Any

    def __len__(self) -> int:
        return len(leaves_of(self.columns)[0])

    @property
    def fetches_together(self) -> bool:
        """False: each record is a row."""
        return False

    def fingerprint(self, key: bytes) -> str:
        """Return a keyed digest of every entry, and of shapes and types."""
        digest = hashlib.blake2b(key=key, digest_size=16)
        for leaf in leaves_of(self.columns):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
            if isinstance(leaf, Tensor):  # as bytes, because NumPy has no bfloat16
                digest.update(
                    leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
                )
            else:
                digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def records(self, positions: list[int]) -> list[Any]:
        """Return the records at these positions, in this order."""
        return [map_leaves(itemgetter(i), self.columns) for i in positions]

    def batch(self, positions: list[int]) -> Batch:
        """Return the records at these positions as tensors, with the records in dimension 0."""
        index = np.asarray(positions, dtype=np.int64)
        return map_leaves(lambda x: _pick(x, index), self.columns)


@dataclass(frozen=True)
class Records:
    """A map-style data set: it has `len(data)`, and `data[i]` is a record.

    Like torch's loader, it fetches a batch by one call of `__getitems__` if the data set has that.
    """

    data: Any

    def __len__(self) -> int:
        return len(self.data)

    @property
    def fetches_together(self) -> bool:
        """True if the data set makes several records in one call, which could mix them."""
        return hasattr(self.data, "__getitems__")

    def records(self, positions: list[int]) -> list[Any]:
        """Return the records at these positions, in this order."""
        fetch_all = getattr(self.data, "__getitems__", None)
        return list(fetch_all(positions)) if fetch_all else [self.data[i] for i in positions]

    def batch(self, positions: list[int]) -> Batch:
        """Return the records at these positions as tensors, with the records in dimension 0."""
        return stack_records(self.records(positions))


def source_of(data: Any) -> Source:
    """Return the source for this kind of data; refuse one whose records have no positions."""
    if isinstance(data, TensorDataset):
        return Columns(data.tensors)
    if isinstance(data, Tensor | np.ndarray) and data.ndim:
        return Columns(data)
    if isinstance(data, tuple | dict) and (leaves := leaves_of(data)):
        lengths = {len(x) if x.ndim else None for x in leaves}
        if len(lengths) == 1 and None not in lengths:
            return Columns(data)
        raise Refused(
            f"expected a {type(data).__name__} of tensors or arrays with one length, got shapes "
            f"{[tuple(x.shape) for x in leaves]}; pass a list if its items are the records"
        )
    kind = type(data).__name__
    if isinstance(data, DataLoader):
        raise Refused(
            f"expected a data set, got a {kind}, which makes its own batches; pass its .dataset, "
            "or state how it samples with Stated(loader, scheme)"
        )
    unplaced = isinstance(data, IterableDataset | Tensor | np.ndarray)  # tensors: without dimension
    if unplaced or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise Refused(
            f"expected data with a length and records by position, got {kind}; the records of a "
            "stream cannot be sampled at a known rate: collect it first, list(stream), or load the "
            "file as a map-style data set, or state how it samples with Stated(loader, scheme)"
        )
    return Records(data)


def stack_records(records: Sequence[Any]) -> Batch:
    """Stack records leaf by leaf and keep their structure.

    It differs from torch's `default_collate` in two ways: a tuple stays a tuple, and a list of
    numbers becomes a row instead of one batch for each index.
    """
    first = records[0]
    if isinstance(first, Mapping):
        return {key: stack_records([record[key] for record in records]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(stack_records, zip(*records, strict=True)))
    if isinstance(first, tuple) or (isinstance(first, list) and not _numeric(first)):
        return type(first)(map(stack_records, zip(*records, strict=True)))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        columns = {
            name: stack_records([getattr(record, name) for record in records]) for name in names
        }
        return dataclasses.replace(first, **columns)
    if not isinstance(first, Tensor | np.ndarray | np.number | np.bool_ | int | float | list):
        raise Refused(
            f"expected records made of tensors, arrays and numbers, got {type(first).__name__}; "
            "turn it into tensors in the data set, or pass collate="
        )
    try:
        rows = [np.asarray(record) for record in records] if isinstance(first, list) else records
        return default_collate(list(rows))
    except (RuntimeError, ValueError, TypeError) as error:
        raise Refused(
            "expected records of one shape and dtype, got different ones; pad them to a public "
            "length in the data set, or pass collate=. Pass separate arrays of features and labels "
            "as a tuple: (X, y)"
        ) from error


def _pick(column: Any, index: Any) -> Tensor:
    if isinstance(column, Tensor):
        return column[torch.from_numpy(index).to(column.device)]
    return torch.from_numpy(column[index])


def _numeric(value: Any) -> bool:
    """Return whether this is a number, or nested lists of numbers."""
    if isinstance(value, list):
        return all(map(_numeric, value))
    return isinstance(value, int | float | np.number | np.bool_)
