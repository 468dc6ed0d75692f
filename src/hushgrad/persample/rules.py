"""The rules: for each operation, how its inputs and output gradient become factors.

A rule has the signature of its operation, after the call. It returns the tensors it needs on the
way back and a function that turns the output's gradient and those tensors into factors, or None
where it does not cover the case; the operation's own derivative then serves, record by record.
Inside `emit` every tensor has its records in front: [batch, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hushgrad.persample.convolution import convolution_factor, geometry
from hushgrad.persample.factors import Dense, Factor, OneHot, Outer
from hushgrad.persample.tape import (
    Call,
    Emitted,
    Rule,
    Rules,
    Saves,
    map_in,
    tensors_in,
    writes_in_place,
)
from hushgrad.types import NotCovered, Refused

_RULES: dict[Any, Rule] = {}
_NAMESPACES = (torch, torch.Tensor, F)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for every spelling of an operation: function, method and operator."""

    def register(function: Rule) -> Rule:
        spellings = [getattr(space, name, None) for space in _NAMESPACES for name in names]
        for spelling in spellings:
            if spelling is not None:
                _RULES[spelling] = function
        return function

    return register


# --- linear maps --------------------------------------------------------------------------------


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
            yield bias, Dense(rows.sum(1))

    return ((input,) if call.private(weight) else ()), emit


@rule("addmm")
def addmm(
    call: Call, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Saves | None:
    product = matmul(call, mat1, mat2) if call.private(mat1) or call.private(mat2) else None
    if (product is None and not call.private(input)) or not call.private(input) and beta != 1:
        return None
    kept, inner = product if product is not None else ((), None)

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        if inner is not None:
            yield from inner(gradient * alpha if alpha != 1 else gradient, *kept)
        if call.private(input):
            each = call.out.split(gradient, call.batch)
            yield input, Dense(_sum_to(each * beta if beta != 1 else each, input))

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
    if call.private(input):
        return None
    where = call.layout(input)
    if where is None or where.dim != 0 or input.dim() != weight.dim():
        return None
    settings, before = geometry(weight, stride, padding, dilation, groups)

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        g = call.out.split(gradient, call.batch)
        for x in kept:
            x = F.pad(x, before) if before else x
            yield weight, convolution_factor(where.split(x, call.batch), g, settings)
        if call.private(bias):
            assert bias is not None
            yield bias, Dense(g.flatten(3).sum((1, 3)))

    return ((input,) if call.private(weight) else ()), emit


# --- look-ups -----------------------------------------------------------------------------------


@rule("embedding")
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
    _refuse_coupled_embedding(max_norm, scale_grad_by_freq)
    where = call.layout(input)
    assert where is not None
    lift = _lookup_factor(weight, padding_idx)

    def emit(gradient: Tensor, index: Tensor) -> Emitted:
        positions = where.split(index, call.batch).flatten(1)
        yield weight, lift(positions, call.out.rows(gradient, call.batch))

    return (input,), emit


def _refuse_coupled_embedding(max_norm: float | None, scale_grad_by_freq: bool) -> None:
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


@rule("__getitem__")
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


def lookup(call: Call, args: Any, kwargs: Any) -> tuple[Tensor, Callable[[Tensor], Factor]] | None:
    """A table looked up at positions that no record chooses: its rows, and the way back."""
    if call.function is not F.embedding:
        return None
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    bound = dict(zip(names, args, strict=False)) | kwargs
    _refuse_coupled_embedding(bound.get("max_norm"), bound.get("scale_grad_by_freq", False))
    index, weight = bound["input"], bound["weight"]
    if call.private(index) or type(weight) is not call.tape.operands[0]:
        return None
    factor = _lookup_factor(weight, bound.get("padding_idx"))

    def lift(gradient: Tensor) -> Factor:
        positions = index.flatten().expand(call.batch, -1)
        return factor(positions, gradient.reshape(call.batch, -1, gradient.shape[-1]))

    return F.embedding(index, call.tape.value(weight)), lift


# --- normalisation: the scale meets the normalised input, the shift meets ones -------------------


def _affine(
    call: Call,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalise: Callable[[Tensor], Tensor],
    channel: int | None,
) -> Saves | None:
    """`y = weight * normalise(input) + bias`, along one channel dimension or the trailing ones."""
    if call.private(input):
        return None
    where = call.layout(input)
    assert where is not None

    def reduce(x: Tensor, operand: Tensor) -> Factor:
        if channel is not None:
            kept = channel + 1 if channel >= 0 else x.dim() + channel
            return Dense(x.sum([d for d in range(1, x.dim()) if d != kept]))
        return Dense(_sum_to(x, operand))

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        g = call.out.split(gradient, call.batch)
        for x in kept:
            assert weight is not None
            yield weight, reduce(g * where.split(normalise(x), call.batch), weight)
        if call.private(bias):
            assert bias is not None
            yield bias, reduce(g, bias)

    return ((input,) if call.private(weight) else ()), emit


@rule("layer_norm")
def layer_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Saves | None:
    def normalise(x: Tensor) -> Tensor:
        return F.layer_norm(x, normalized_shape, None, None, eps)

    return _affine(call, input, weight, bias, normalise, channel=None)


@rule("rms_norm")
def rms_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Saves | None:
    # The default eps is that of the input's own type, which `wide` may have changed.
    small = torch.finfo(input.dtype).eps if eps is None else eps
    return _affine(
        call, input, weight, None, lambda x: F.rms_norm(x, normalized_shape, None, small), None
    )


@rule("group_norm")
def group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Saves | None:
    def normalise(x: Tensor) -> Tensor:
        return F.group_norm(x, num_groups, None, None, eps)

    return _affine(call, input, weight, bias, normalise, channel=1)


@rule("instance_norm")
def instance_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Saves | None:
    def normalise(x: Tensor) -> Tensor:
        stats = (None, None) if use_input_stats else (running_mean, running_var)
        return F.instance_norm(x, *stats, None, None, use_input_stats, momentum, eps)

    return _affine(call, input, weight, bias, normalise, channel=1)


@rule("batch_norm")
def batch_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Saves | None:
    if training:
        raise Refused(
            "batch_norm in training mode normalises each record by its mates, so no bound on one "
            "record exists; call hushgrad.replace_batchnorm(model), or model.eval() that layer"
        )

    def normalise(x: Tensor) -> Tensor:
        return F.batch_norm(x, running_mean, running_var, None, None, False, momentum, eps)

    return _affine(call, input, weight, bias, normalise, channel=1)


# --- broadcasting arithmetic --------------------------------------------------------------------

_Local = Callable[[Tensor, Tensor | None, Tensor], Tensor]
"""(gradient, other input, operand's value), records in front, to the operand's local gradient."""


def _arithmetic(
    call: Call, operand: Tensor, other: Tensor, local: _Local, reads_other: bool
) -> Saves | None:
    where = None if call.private(other) else call.layout(other)
    if where is None:
        return None
    value = call.tape.value(operand)

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        g = call.out.split(gradient, call.batch)
        each = where.split(kept[0], call.batch) if kept else None
        if each is not None:  # align on the right, as broadcasting does
            lead = [1] * (g.dim() - each.dim())
            each = each.reshape(call.batch, *lead, *each.shape[1:])
        yield operand, Dense(_sum_to(local(g, each, value), operand))

    in_place = writes_in_place(getattr(call.function, "__name__", ""))
    keep = other.clone() if reads_other and in_place else other
    return ((keep,) if reads_other else ()), emit


def _sum_to(each: Tensor, operand: Tensor) -> Tensor:
    """Sum [batch, ...] over what was broadcast, down to [batch, *operand.shape]."""
    lead = each.dim() - 1 - operand.dim()
    if lead > 0:
        each = each.flatten(1, lead).sum(1)
    over = [d + 1 for d, size in enumerate(operand.shape) if size == 1 and each.shape[d + 1] != 1]
    summed = each.sum(over, keepdim=True) if over else each
    return summed.reshape(each.shape[0], *operand.shape)


@rule("add", "add_", "__add__", "__radd__", "__iadd__")
def add(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Saves | None:
    if call.private(input):
        return _arithmetic(call, input, other, lambda g, x, p: g, reads_other=False)
    return _arithmetic(call, other, input, lambda g, x, p: alpha * g, reads_other=False)


@rule("sub", "subtract", "sub_", "__sub__", "__isub__")
def sub(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Saves | None:
    return add(call, input, other, alpha=-alpha)


@rule("rsub", "__rsub__")
def rsub(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Saves | None:
    if call.private(input):
        return _arithmetic(call, input, other, lambda g, x, p: -alpha * g, reads_other=False)
    return _arithmetic(call, other, input, lambda g, x, p: g, reads_other=False)


@rule("mul", "multiply", "mul_", "__mul__", "__rmul__", "__imul__")
def mul(call: Call, input: Any, other: Any) -> Saves | None:
    operand, x = (input, other) if call.private(input) else (other, input)
    return _arithmetic(call, operand, x, lambda g, x, p: g * _given(x), reads_other=True)


@rule("div", "divide", "true_divide", "div_", "__truediv__", "__itruediv__")
def div(call: Call, input: Any, other: Any, *, rounding_mode: str | None = None) -> Saves | None:
    if rounding_mode is not None:
        return None
    if call.private(input):
        return _arithmetic(call, input, other, lambda g, x, p: g / _given(x), reads_other=True)
    return _arithmetic(
        call, other, input, lambda g, x, p: -g * _given(x) / p.to(g.dtype).square(), True
    )


@rule("__rtruediv__", "__rdiv__")
def reflected_div(call: Call, input: Any, other: Any) -> Saves | None:
    return div(call, other, input)


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


# --- a parameter spread over the batch ----------------------------------------------------------


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
        yield operand, Dense(_sum_to(each, operand))

    return (), emit


# --- everything else ----------------------------------------------------------------------------


def on_records(call: Call, name: str, args: Any, kwargs: Any) -> Saves:
    """The operation's own rule, or its derivative taken record by record."""
    known = _RULES.get(call.function)
    saves = known(call, *args, **kwargs) if known is not None else None
    return saves if saves is not None else _by_derivative(call, name, args, kwargs)


def _by_derivative(call: Call, name: str, args: Any, kwargs: Any) -> Saves:
    """Any operation that treats each record alone, through `torch.func`; exact, materialised."""
    if writes_in_place(name):
        raise NotCovered(f"no rule for {name} with a parameter; use the form that is not in place")
    call.deterministic = True  # it will be run again on the way back
    leaves = tensors_in(call.arguments)
    operands = [x for x in leaves if call.private(x)]
    rest = [x for x in leaves if not call.private(x)]
    layouts = [call.layout(x) for x in rest]
    values = [call.tape.value(x) for x in operands]

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        g = call.out.split(gradient, call.batch)
        each = [
            x if where is None else where.split(x, call.batch)
            for x, where in zip(kept, layouts, strict=True)
        ]

        def one(g: Tensor, *inputs: Tensor) -> Any:
            def forward(*ws: Tensor) -> Any:
                ours, theirs = iter(ws), iter(inputs)
                args, kwargs = map_in(
                    lambda x: next(ours) if call.private(x) else next(theirs), call.arguments
                )
                return call.function(*args, **kwargs)

            _, pull = torch.func.vjp(forward, *(value.to(g.dtype) for value in values))
            return pull(g)

        in_dims = (0, *(None if where is None else 0 for where in layouts))
        pulled = torch.func.vmap(one, in_dims=in_dims)(g, *each)
        for operand, dense in zip(operands, pulled, strict=True):
            yield operand, Dense(dense)

    return tuple(rest), emit


RULES = Rules(on_records, on_spread, lookup)
