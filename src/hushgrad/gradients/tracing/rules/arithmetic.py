"""Broadcasting arithmetic, and parameters spread over the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hushgrad.gradients.factors.kinds import Dense
from hushgrad.gradients.tracing.call import Call, Emitted, Saves
from hushgrad.gradients.tracing.calls import writes_in_place
from hushgrad.gradients.tracing.rules.registry import torch_rule
from hushgrad.types import NotCovered

_Local = Callable[[Tensor, Tensor | None, Tensor], Tensor]
"""(gradient, other input, operand's value), records in front, to the operand's local gradient."""


def _arithmetic(
    call: Call, operand: Tensor, other: Tensor, local: _Local, reads_other: bool
) -> Saves | None:
    where = None if call.private(other) else call.layout(other)
    if where is None:
        return None
    value = call.value(operand)

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        g = call.out.split(gradient, call.batch)
        each = where.split(kept[0], call.batch) if kept else None
        if each is not None:  # align on the right, as broadcasting does
            lead = [1] * (g.dim() - each.dim())
            each = each.reshape(call.batch, *lead, *each.shape[1:])
        yield operand, Dense(sum_to(local(g, each, value), operand))

    in_place = writes_in_place(getattr(call.function, "__name__", ""))
    # In place: `x *= p` writes over the x that the gradient of p needs.
    keep = other.clone() if reads_other and in_place else other
    return ((keep,) if reads_other else ()), emit


def sum_to(each: Tensor, operand: Tensor) -> Tensor:
    """Sum [batch, ...] over what was broadcast, down to [batch, *operand.shape]."""
    lead = each.dim() - 1 - operand.dim()
    if lead > 0:
        each = each.flatten(1, lead).sum(1)
    over = [d + 1 for d, size in enumerate(operand.shape) if size == 1 and each.shape[d + 1] != 1]
    summed = each.sum(over, keepdim=True) if over else each
    return summed.reshape(each.shape[0], *operand.shape)


@torch_rule("add", "add_", "__add__", "__radd__", "__iadd__")
def add(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Saves | None:
    if call.private(input):
        return _arithmetic(call, input, other, lambda g, x, p: g, reads_other=False)
    return _arithmetic(call, other, input, lambda g, x, p: alpha * g, reads_other=False)


@torch_rule("sub", "subtract", "sub_", "__sub__", "__isub__")
def sub(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Saves | None:
    return add(call, input, other, alpha=-alpha)


@torch_rule("rsub", "__rsub__")
def rsub(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Saves | None:
    if call.private(input):
        return _arithmetic(call, input, other, lambda g, x, p: -alpha * g, reads_other=False)
    return _arithmetic(call, other, input, lambda g, x, p: g, reads_other=False)


@torch_rule("mul", "multiply", "mul_", "__mul__", "__rmul__", "__imul__")
def mul(call: Call, input: Any, other: Any) -> Saves | None:
    operand, x = (input, other) if call.private(input) else (other, input)
    return _arithmetic(call, operand, x, lambda g, x, p: g * _there(x), reads_other=True)


@torch_rule("div", "divide", "true_divide", "div_", "__truediv__", "__itruediv__")
def div(call: Call, input: Any, other: Any, *, rounding_mode: str | None = None) -> Saves | None:
    if rounding_mode is not None:
        return None
    if call.private(input):
        return _arithmetic(call, input, other, lambda g, x, p: g / _there(x), reads_other=True)
    return _arithmetic(
        call, other, input, lambda g, x, p: -g * _there(x) / p.to(g.dtype).square(), True
    )


@torch_rule("__rtruediv__", "__rdiv__")
def reflected_div(call: Call, input: Any, other: Any) -> Saves | None:
    return div(call, other, input)


def _there(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def on_spread(call: Call, name: str, args: Any, kwargs: Any) -> Saves:
    """`expand` and `repeat` along the batch: each record's share, summed over its copies."""
    operand = args[0]
    if name not in ("expand", "expand_as", "broadcast_to", "repeat"):
        raise NotCovered(
            f"{name} spreads a parameter over the records in a way that no rule covers; use "
            "expand or repeat, or form=dense"
        )

    def emit(gradient: Tensor) -> Emitted:
        each = call.out.split(gradient, call.batch)
        if name == "repeat":
            for dim, size in enumerate(reversed(operand.shape)):
                at = each.dim() - 1 - dim
                each = each.unflatten(at, (-1, size)).sum(at)
        yield operand, Dense(sum_to(each, operand))

    return (), emit
