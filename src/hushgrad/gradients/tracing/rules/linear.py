"""Linear maps: linear, addmm, matrix products on either side, convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hushgrad import numerics
from hushgrad.gradients.factors.kinds import Dense, Factor, Outer
from hushgrad.gradients.factors.patches import convolution_factor, each, geometry
from hushgrad.gradients.tracing.call import Call, Emitted, Saves
from hushgrad.gradients.tracing.rules.arithmetic import sum_to
from hushgrad.gradients.tracing.rules.registry import torch_rule


class _Linear(torch.autograd.Function):
    """`F.linear` with a weight that is not trained here, by oneDNN where that is quicker."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return numerics.linear_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return numerics.linear_product(gradient, weight.mT), None, None


def _quick_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, both ways. Under autocast torch's own chooses the types."""
    if torch.is_autocast_enabled(input.device.type) or not numerics.is_for_onednn(weight):
        return F.linear(input, weight, bias)
    result: Tensor = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return result


def _is_own(call: Call, bias: Tensor | None) -> bool:
    """Does a bias come without a graph of its own?"""
    return bias is None or call.private(bias)


@torch_rule("linear")
def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Saves | None:
    if call.private(input):
        return None
    where = call.layout(input)
    assert where is not None
    if call.function is F.linear and call.private(weight) and _is_own(call, bias):
        call.function = _quick_linear

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        rows = call.out.rows(gradient, call.batch)
        for x in kept:
            yield weight, Outer(where.rows(x, call.batch), rows)
        if call.private(bias):
            assert bias is not None
            # One position needs no sum, and a sum of one term would be a copy.
            yield bias, Dense(rows.sum(1) if rows.shape[1] > 1 else rows[:, 0])

    return ((input,) if call.private(weight) else ()), emit


@torch_rule("addmm")
def addmm(
    call: Call, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Saves | None:
    product = matmul(call, mat1, mat2) if call.private(mat1) or call.private(mat2) else None
    if (product is None and not call.private(input)) or (not call.private(input) and beta != 1):
        return None
    kept, inner = product if product is not None else ((), None)
    plain = beta == alpha == 1 and input.dim() == 1 and call.private(input)
    if plain and call.private(mat2) and not call.private(mat1):
        call.function = lambda input, mat1, mat2, **_: _quick_linear(mat1, mat2.mT, input)

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        if inner is not None:
            yield from inner(gradient * alpha if alpha != 1 else gradient, *kept)
        if call.private(input):
            each = call.out.split(gradient, call.batch)
            yield input, Dense(sum_to(each * beta if beta != 1 else each, input))

    return kept, emit


_PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)


@torch_rule("matmul", "mm", "mv", "__matmul__")
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
    if call.function in _PRODUCTS and operand.dim() == 2 and not on_left:
        call.function = lambda input, other: _quick_linear(input, other.mT)

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


@torch_rule("__rmatmul__")
def reflected_matmul(call: Call, input: Tensor, other: Tensor) -> Saves | None:
    return matmul(call, other, input)


@torch_rule("conv1d", "conv2d", "conv3d")
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
    return _convolve(
        call, input, weight, bias, pads, lambda x, g: convolution_factor(x, g, settings)
    )


@torch_rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
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
    return _convolve(
        call, input, weight, bias, pads, lambda x, g: convolution_factor(g, x, settings)
    )


def _convolve(
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
