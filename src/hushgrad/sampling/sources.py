"""Data sets as sources of batches: records by their positions, whatever holds them."""

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
    """Records by position, one by one or put together."""

    def __len__(self) -> int: ...

    @property
    def fetches_together(self) -> bool:
        """Whether several records are made at once, and could be mixed."""

    def records(self, positions: list[int]) -> list[Any]:
        """The records at these positions, in this order."""

    def batch(self, positions: list[int]) -> Batch:
        """The records at these positions as tensors with the records in front."""


@dataclass(frozen=True)
class Columns:
    """A tensor or an array, or a tuple or mapping of them, with the records in front."""

    columns: Any

    def __len__(self) -> int:
        return len(leaves_of(self.columns)[0])

    @property
    def fetches_together(self) -> bool:
        """No: each record is a row of its own."""
        return False

    def fingerprint(self, key: bytes) -> str:
        """A keyed digest of every entry, and of shapes and types."""
        digest = hashlib.blake2b(key=key, digest_size=16)
        for leaf in leaves_of(self.columns):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
            if isinstance(leaf, Tensor):  # by its bytes: NumPy has no bfloat16
                digest.update(
                    leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
                )
            else:
                digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def records(self, positions: list[int]) -> list[Any]:
        """The records at these positions, in this order."""
        return [map_leaves(itemgetter(i), self.columns) for i in positions]

    def batch(self, positions: list[int]) -> Batch:
        """The records at these positions as tensors with the records in front."""
        index = np.asarray(positions, dtype=np.int64)
        return map_leaves(lambda x: _pick(x, index), self.columns)


@dataclass(frozen=True)
class Records:
    """A map-style data set: `len(data)`, and `data[i]` is a record.

    All are fetched at once where the data set has `__getitems__`, as torch's own loader does it.
    """

    data: Any

    def __len__(self) -> int:
        return len(self.data)

    @property
    def fetches_together(self) -> bool:
        """Whether the data set makes several records at once, and could mix them."""
        return hasattr(self.data, "__getitems__")

    def records(self, positions: list[int]) -> list[Any]:
        """The records at these positions, in this order."""
        fetch_all = getattr(self.data, "__getitems__", None)
        return list(fetch_all(positions)) if fetch_all else [self.data[i] for i in positions]

    def batch(self, positions: list[int]) -> Batch:
        """The records at these positions as tensors with the records in front."""
        return stack_records(self.records(positions))


def source_of(data: Any) -> Source:
    """Tell what kind of data set this is; refuse one whose records have no positions."""
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
            f"expected a data set, got a {kind}, which has already cut its batches; pass its "
            ".dataset, or say what it samples with Stated(loader, scheme)"
        )
    unplaced = isinstance(data, IterableDataset | Tensor | np.ndarray)  # of no dimension, here
    if unplaced or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise Refused(
            f"expected data with a length and records by position, got {kind}; no record of a "
            "stream can be sampled at a known rate: collect it first, list(stream), or load the "
            "file as a map-style data set, or say what it samples with Stated(loader, scheme)"
        )
    return Records(data)


def stack_records(records: Sequence[Any]) -> Batch:
    """Put records together leaf by leaf and keep their structure.

    As torch's `default_collate`, but a tuple stays a tuple, and a list of numbers is a row and
    not one batch for each of its places.
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
            "expected records of one shape and dtype, got others among them; pad them to a public "
            "length in the data set, or pass collate=. Features and labels that are columns go "
            "into a tuple: (X, y)"
        ) from error


def _pick(column: Any, index: Any) -> Tensor:
    if isinstance(column, Tensor):
        return column[torch.from_numpy(index).to(column.device)]
    return torch.from_numpy(column[index])


def _numeric(value: Any) -> bool:
    """Whether this is a number, or nested lists of them."""
    if isinstance(value, list):
        return all(map(_numeric, value))
    return isinstance(value, int | float | np.number | np.bool_)
