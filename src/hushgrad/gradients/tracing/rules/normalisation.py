"""Normalisation and PReLU: the scale meets a function of the input, the shift meets ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hushgrad.gradients.factors.kinds import Dense, Factor
from hushgrad.gradients.tracing.call import Call, Emitted, Saves
from hushgrad.gradients.tracing.layout import Layout
from hushgrad.gradients.tracing.rules.arithmetic import sum_to
from hushgrad.gradients.tracing.rules.registry import torch_rule
from hushgrad.types import Refused


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
        return Dense(sum_to(x, operand))

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        g = call.out.split(gradient, call.batch)
        for x in kept:
            assert weight is not None
            yield weight, reduce(g * where.split(normalise(x), call.batch), weight)
        if call.private(bias):
            assert bias is not None
            yield bias, reduce(g, bias)

    return ((input,) if call.private(weight) else ()), emit


@torch_rule("layer_norm")
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


@torch_rule("rms_norm")
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


@torch_rule("group_norm")
def group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Saves | None:
    if call.private(weight) and not call.private(input) and _is_plain(input, weight, bias):
        where = call.layout(input)
        if where is not None and where.dim == 0:
            return _as_one_record(call, where, input, num_groups, weight, bias, eps)

    def normalise(x: Tensor) -> Tensor:
        return F.group_norm(x, num_groups, None, None, eps)

    return _affine(call, input, weight, bias, normalise, channel=1)


def _is_plain(input: Tensor, *affine: Tensor | None) -> bool:
    """Would `group_norm` hand these over to its kernel as they are?"""
    return (
        input.is_contiguous()
        and input[:1, :1].numel() > 1
        and input.dtype in (torch.float32, torch.float64)
        and all(x is None or (x.dtype == input.dtype and x.is_contiguous()) for x in affine)
        and not torch.is_autocast_enabled(input.device.type)
    )


def _as_one_record(
    call: Call,
    where: Layout,
    input: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Saves:
    """The kernel's own derivative, which adds records up, told that all channels are of one record.

    It needs the means and deviations of the way forward, and normalises nothing again.
    """
    rows, channels, places = *input.shape[:2], input[0, 0].numel()
    statistics: list[Tensor] = []

    def forward(
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        y, *found = torch.native_group_norm(
            input, weight, bias, rows, channels, places, groups, eps
        )
        statistics.extend(x.detach().view(1, -1) for x in found)
        return y

    def emit(gradient: Tensor, x: Tensor) -> Emitted:
        one = (1, rows * channels, places)
        _, *found = torch.ops.aten.native_group_norm_backward(
            gradient.reshape(one),
            x.reshape(one),
            *statistics,
            x.new_ones(rows * channels),  # the scale, which only the input's gradient would need
            *one,
            rows * groups,
            [False, True, call.private(bias)],
        )
        for operand, each in zip((weight, bias), found, strict=True):
            if call.private(operand):
                assert operand is not None
                yield operand, Dense(where.split(each.view(rows, channels), call.batch).sum(1))

    call.function = forward
    return (input,), emit


@torch_rule("instance_norm")
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


@torch_rule("batch_norm")
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
            "batch_norm in training mode normalises each record by the others, so no bound on one "
            "record exists; call hushgrad.replace_batchnorm(model), or model.eval() that layer"
        )

    def normalise(x: Tensor) -> Tensor:
        return F.batch_norm(x, running_mean, running_var, None, None, False, momentum, eps)

    return _affine(call, input, weight, bias, normalise, channel=1)


@torch_rule("prelu")
def prelu(call: Call, input: Tensor, weight: Tensor) -> Saves | None:
    """One slope, or one for each channel, on the negative part."""
    channel = 1 if weight.numel() > 1 else None
    return _affine(call, input, weight, None, lambda x: x.clamp_max(0), channel)
