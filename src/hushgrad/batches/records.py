"""Batches as nested structures: counting, picking and padding their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor

from hushgrad.batches.nested import leaves_of, map_leaves
from hushgrad.types import Batch, Refused

MULTIPLE = 8
"""Batches are padded to a multiple of this many records, or to a larger one if a model needs it.

Kernels choose the order of their sums by the number of rows (1, 2-3, at least 4). Without padding,
a record's rounding errors, and past a ReLU its gradient, would depend on how many other records
are in the batch.
"""


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Apply `function` to each tensor of a nested structure and keep everything else."""

    def apply(leaf: Any) -> Tensor:
        if not isinstance(leaf, Tensor):
            raise Refused(
                "expected a batch of tensors, got a NumPy array in it, which cannot be traced; "
                "convert it with torch.from_numpy"
            )
        return function(leaf)

    return map_leaves(apply, batch)


def tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a nested structure, in order."""
    if type(batch) is tuple and all(isinstance(x, Tensor) for x in batch):
        return list(batch)
    return leaves_of(map_tensors(lambda x: x, batch))


def count(batch: Batch) -> int:
    """Return the number of records: the first dimension of every tensor in the batch."""
    found = tensors(batch)
    sizes = {x.shape[0] if x.dim() else None for x in found}
    if len(sizes) != 1 or None in sizes:
        raise Refused(
            "expected a batch of tensors that all have the records in their first dimension, got "
            f"{_describe(batch, sizes)}; "
            "move the records to the front and let the loss close over what they share"
        )
    return int(sizes.pop() or 0)


def _describe(batch: Batch, sizes: set[int | None]) -> str:
    """Describe what is wrong with a batch, without the number of records, which is private."""
    if not sizes:
        return f"no tensor in a {type(batch).__name__}"
    return "a tensor without dimensions" if None in sizes else "tensors of different lengths"


def take(batch: Batch, index: Sequence[int] | ndarray) -> Batch:
    """Return the records at these positions, in this order; positions may repeat."""
    places = torch.as_tensor(index, dtype=torch.long)
    return map_tensors(lambda x: x[places.to(x.device)], batch)


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Return the records from `start` up to `stop`, without copying them."""
    return map_tensors(lambda x: x[start:stop], batch)


def lay_out(batch: Batch) -> Batch:
    """Return the batch detached and contiguous, as a padded copy would be.

    Kernels round differently for different memory layouts, and only some batches are padded (and
    so copied). Images may keep their channels last, because padding keeps that layout.
    """
    return map_tensors(_lay_out, batch)


def _lay_out(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
    return x.detach() if last else x.detach().contiguous()


def zeros_like(batch: Batch) -> Batch:
    """Return a batch of the same structure whose records are all zero."""
    return map_tensors(lambda x: x.new_zeros(MULTIPLE, *x.shape[1:]), batch)


def padded_size(size: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def pad(batch: Batch, size: int, padded: int) -> Batch:
    """Append copies of the first record, up to `padded` records; callers ignore the copies."""
    extra = padded - size
    if not extra:
        return batch
    return map_tensors(lambda x: torch.cat([x, x[:1].expand(extra, *x.shape[1:])]), batch)


def shapes(batch: Batch) -> tuple[tuple[Any, ...], ...]:
    """Return each tensor's dtype and its shape without the record dimension."""
    return tuple((x.dtype, *x.shape[1:]) for x in tensors(batch))
