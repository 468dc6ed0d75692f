"""The batch that a run has drawn: its step accepts nothing else.

A batch that was changed on the way could be anything, such as one record many times over. A
transformation inside the loss is tested to treat each record by itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hushgrad.batches.records import count, tensors
from hushgrad.bits import digests
from hushgrad.numerics import same_bits
from hushgrad.types import Batch, Refused


class DrawnBatch:
    """The tensors of a batch as they were drawn, to recognise them by."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self._size, self._tensors = batch, count(batch), tensors(batch)
        self._digests = self._now()

    def _now(self) -> dict[str, int]:
        return digests({str(i): x for i, x in enumerate(self._tensors)})

    def require(self, batch: Batch) -> None:
        """Refuse a batch with any tensor that is not one of these, record by record.

        A tensor may be on another device or of another dtype. It may be a view that has each
        record's entries in the record's own place: in another shape or order, or some of them.
        """
        # Written to in place: the batch would pass as the one drawn, with other values.
        if self._now() != self._digests:
            raise Refused(
                "expected the batch as it was drawn, got one that was written to; change a copy of "
                f"each record {_WHERE}"
            )
        handed = tensors(batch)
        # An empty batch has no rows to compare, and no record to protect.
        if self._size == 0 and all(x.dim() and len(x) == 0 for x in handed):
            return
        if not handed or not all(any(_is_of(x, own) for own in self._tensors) for x in handed):
            raise Refused(
                "expected the batch that was drawn, all its records in their order, on any device "
                "and of any dtype, got other values; change records, or draw what belongs to them, "
                f"{_WHERE}"
            )


_WHERE = (
    "inside the loss, run.step(lambda b: loss(prepare(b)), batch), where it is tested that no "
    "record depends on the others, or where records are read, in the data set or in "
    "hg.sampling.Loader(data, collate=…)"
)


def _is_of(x: Tensor, own: Tensor) -> bool:
    if x is own:
        return True
    if x.dim() == 0 or own.dim() == 0 or len(x) != len(own):
        return False
    if x.device == own.device and _address(x) == _address(own) and _is_view_by_record(x, own):
        return True
    # A view of a converted copy: compare the whole copy, then its rows.
    whole = x if x._base is None else x._base
    if not _has_same_rows(whole, own):
        return _has_same_rows(x, own)
    return whole is x or _is_view_by_record(x, whole)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_view_by_record(x: Tensor, whole: Tensor) -> bool:
    """Return whether all entries of each record of x are in the memory of the same record of
    `whole`.
    """
    if x.dtype != whole.dtype or len(x) != len(whole):
        return False
    first, extent = x.storage_offset() - whole.storage_offset(), _extent(whole)
    if not 0 <= first <= extent - _extent(x):
        return False
    return len(x) == 1 or (x.stride(0) == whole.stride(0) and extent <= whole.stride(0))


def _extent(x: Tensor) -> int:
    """Return the distance in memory from a record's first entry to its last, both counted."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape[1:], x.stride()[1:], strict=True))


def _has_same_rows(x: Tensor, own: Tensor) -> bool:
    """Return whether each record of x has the entries of the same record, rounded to its dtype."""
    if x.dim() == 0 or len(x) != len(own) or x.numel() != own.numel():
        return False
    moved = own.to(x.device, x.dtype)
    width = math.prod(x.shape[1:])
    if same_bits(x.reshape(len(x), width), moved.reshape(len(x), width)):
        return True
    # The order in memory is the same where axes were permuted before the dtype changed.
    return (
        _is_row_by_row(x)
        and _is_row_by_row(moved)
        and same_bits(x.as_strided((x.numel(),), (1,)), moved.as_strided((x.numel(),), (1,)))
    )


def _is_row_by_row(x: Tensor) -> bool:
    """Return whether records follow one another in memory, without gaps."""
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense(x)
    return dense and x.stride(0) == math.prod(x.shape[1:])
