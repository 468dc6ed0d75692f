"""Rows looked up in a table: by the records, or at positions that no record chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hushgrad.gradients.factors.kinds import Factor, OneHot, Use
from hushgrad.gradients.tracing.call import Back, Call, Emitted, Saves
from hushgrad.gradients.tracing.call_sites import Unforeseen
from hushgrad.gradients.tracing.rules.registry import decomposition, torch_rule
from hushgrad.types import Refused


@torch_rule("embedding")
def embedding(
    call: Call,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Saves | None:
    refuse_coupled_embedding(max_norm, scale_grad_by_freq)
    where = call.layout(input)
    assert where is not None
    lift = _lookup_factor(weight, padding_idx)

    def emit(gradient: Tensor, index: Tensor) -> Emitted:
        positions = where.split(index, call.batch).flatten(1)
        yield weight, lift(positions, call.out.rows(gradient, call.batch))

    return (input,), emit


def refuse_coupled_embedding(max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Refuse the options of an embedding that make one record's gradient depend on others."""
    if max_norm is not None:
        raise Refused(
            "an embedding with max_norm rewrites its weight in the forward pass, from the records; "
            "drop max_norm"
        )
    if scale_grad_by_freq:
        raise Refused(
            "an embedding with scale_grad_by_freq divides by counts over the batch, which couples "
            "the records; set scale_grad_by_freq=False"
        )


def _lookup_factor(weight: Tensor, padding_idx: int | None) -> Callable[[Tensor, Tensor], Factor]:
    rows = weight.shape[0]
    skipped = None if padding_idx is None else padding_idx % rows

    def factor(index: Tensor, b: Tensor) -> Factor:
        if skipped is not None:
            b = b * (index != skipped).unsqueeze(-1)
        return OneHot(index, b, rows)

    return factor


@torch_rule("__getitem__")
def getitem(call: Call, input: Tensor, index: Any) -> Saves | None:
    """Rows picked by an index that belongs to the records: a look-up by another name."""
    if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype == torch.bool:
        return None
    where = call.layout(index)
    if where is None or input.dim() != 2:
        return None
    rows = input.shape[0]

    def emit(gradient: Tensor, index: Tensor) -> Emitted:
        positions = where.split(index, call.batch).flatten(1) % rows
        yield input, OneHot(positions, call.out.rows(gradient, call.batch), rows)

    return (index,), emit


@decomposition(F.embedding_bag)
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Rows looked up, then added up, averaged or compared within each bag."""
    refuse_coupled_embedding(max_norm, scale_grad_by_freq)
    bags = input if offsets is None else _even_bags(input, offsets, include_last_offset)
    rows = F.embedding(bags, weight, padding_idx)
    absent = torch.zeros_like(bags, dtype=torch.bool)
    if padding_idx is not None:
        absent = bags == padding_idx % weight.shape[0]
    if mode == "max":
        highest = rows.masked_fill(absent.unsqueeze(-1), -torch.inf).max(1).values
        return highest.masked_fill(absent.all(1, keepdim=True), 0.0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.view_as(bags).unsqueeze(-1)
    total = rows.masked_fill(absent.unsqueeze(-1), 0.0).sum(1)
    return total / (~absent).sum(1, keepdim=True).clamp_min(1) if mode == "mean" else total


def _even_bags(flat: Tensor, offsets: Tensor, include_last: bool) -> Tensor:
    """The bags as rows. Of uneven ones a shape does not tell which record an index belongs to."""
    count = len(offsets) - include_last
    size = len(flat) // count
    even = size * torch.arange(len(offsets), device=offsets.device)
    if size * count != len(flat) or not torch.equal(offsets.long(), even):
        raise Unforeseen(
            "embedding_bag with offsets and bags of different lengths; pass them as the rows of "
            "one tensor, filled up with padding_idx, or use form=loop"
        )
    return flat.view(count, size)


def fixed_lookup(call: Call, args: Any, kwargs: Any) -> tuple[Tensor, Back] | None:
    """A table looked up at positions that no record chooses: its rows, and the way back."""
    if call.function is F.embedding:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
        bound = dict(zip(names, args, strict=False)) | kwargs
        refuse_coupled_embedding(bound.get("max_norm"), bound.get("scale_grad_by_freq", False))
        index, weight = bound["input"], bound["weight"]
        factor = _lookup_factor(weight, bound.get("padding_idx"))
    elif call.function is Tensor.__getitem__ and _picks_rows(*args):
        weight, index = args[0], args[1] % len(args[0])
        factor = _lookup_factor(weight, None)
    else:
        return None
    if call.private(index):
        return None

    def back(reached: Use) -> list[tuple[Tensor, Use]]:
        rows = reached.materialised().reshape(call.batch, -1, weight.shape[1])
        return [(weight, factor(index.flatten().expand(call.batch, -1), rows))]

    return F.embedding(index, call.value(weight)), back


def _picks_rows(input: Tensor, index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.int64 and input.dim() == 2
