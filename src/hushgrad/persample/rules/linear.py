"""Linear maps: linear, addmm, matrix products on either side, convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hushgrad.persample.call import Call, Emitted, Saves
from hushgrad.persample.convolution import convolution_factor, each, geometry
from hushgrad.persample.factors import Dense, Factor, Outer
from hushgrad.persample.rules.arithmetic import sum_to
from hushgrad.persample.rules.registry import rule


@rule("linear")
def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Saves | None:
    if call.private(input):
        return None
    where = call.layout(input)
    assert where is not None

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        rows = call.out.rows(gradient, call.batch)
        for x in kept:
            yield weight, Outer(where.rows(x, call.batch), rows)
        if call.private(bias):
            assert bias is not None
            yield bias, Dense(rows.sum(1) if rows.shape[1] > 1 else rows[:, 0])

    return ((input,) if call.private(weight) else ()), emit


@rule("addmm")
def addmm(
    call: Call, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Saves | None:
    product = matmul(call, mat1, mat2) if call.private(mat1) or call.private(mat2) else None
    if (product is None and not call.private(input)) or (not call.private(input) and beta != 1):
        return None
    kept, inner = product if product is not None else ((), None)

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        if inner is not None:
            yield from inner(gradient * alpha if alpha != 1 else gradient, *kept)
        if call.private(input):
            each = call.out.split(gradient, call.batch)
            yield input, Dense(sum_to(each * beta if beta != 1 else each, input))

    return kept, emit


@rule("matmul", "mm", "mv", "__matmul__")
def matmul(call: Call, input: Tensor, other: Tensor) -> Saves | None:
    if call.private(input) and call.private(other):
        return None
    operand, x = (input, other) if call.private(input) else (other, input)
    where = call.layout(x)
    if where is None or operand.dim() > 2 or x.dim() < 2:
        return None
    on_left = operand is input
    if operand.dim() == 1 and on_left:
        return None

    def emit(gradient: Tensor, x: Tensor) -> Emitted:
        each, g = where.split(x, call.batch), call.out.split(gradient, call.batch)
        if operand.dim() == 1:
            rows = each.flatten(1, -2)
            yield operand, Dense(torch.bmm(g.reshape(call.batch, 1, -1), rows)[:, 0])
        elif on_left:  # y = W x: columns of x and y are the positions
            yield operand, Outer(each.mT.flatten(1, -2), g.mT.flatten(1, -2))
        else:  # y = x W
            yield operand, Outer(g.flatten(1, -2), each.flatten(1, -2))

    return (x,), emit


@rule("__rmatmul__")
def reflected_matmul(call: Call, input: Tensor, other: Tensor) -> Saves | None:
    return matmul(call, other, input)


@rule("conv1d", "conv2d", "conv3d")
def convolution(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Saves | None:
    settings, pads = geometry(weight, stride, padding, dilation, groups)
    return _convolved(
        call, input, weight, bias, pads, lambda x, g: convolution_factor(x, g, settings)
    )


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Saves | None:
    """A convolution that runs backwards, from what it returns to what it takes."""
    settings, _ = geometry(weight, stride, padding, dilation, groups)
    # Output that is padded by a stride or more has room for positions that no input has.
    room = zip(each(output_padding, weight.dim() - 2), settings.stride, strict=True)
    pads = [n for extra, step in reversed([*room]) for n in (0, extra // step)]
    return _convolved(
        call, input, weight, bias, pads, lambda x, g: convolution_factor(g, x, settings)
    )


def _convolved(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pads: list[int],
    factor: Callable[[Tensor, Tensor], Factor],
) -> Saves | None:
    if call.private(input):
        return None
    where = call.layout(input)
    if where is None or where.dim != 0 or input.dim() != weight.dim():
        return None

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        g = call.out.split(gradient, call.batch)
        for x in kept:
            x = F.pad(x, pads) if any(pads) else x
            yield weight, factor(where.split(x, call.batch), g)
        if call.private(bias):
            assert bias is not None
            yield bias, Dense(g.flatten(3).sum((1, 3)))

    return ((input,) if call.private(weight) else ()), emit
