"""Autocast and loss scaling: norms and sums stay wide."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from short_runs import data, flat, loss_of, model, started
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import Execution
from hushgrad.clipping.rules import Clip, abadi, automatic, normalize
from hushgrad.gradients import per_sample
from hushgrad.types import Bounded


@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 0.02), (torch.float16, 2e-3)])
@pytest.mark.parametrize("where", ["inside the loss", "around the step"])
def test_autocast_leaves_norms_and_sums_wide(dtype: torch.dtype, close: float, where: str) -> None:
    net = model()
    params = dict(net.named_parameters())

    def half(b: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return loss_of(net)(b)

    loss = half if where == "inside the loss" else loss_of(net)
    plain = hg.clipped_sum(loss_of(net), params, data(), clip=normalize(), modules=(net,))
    with torch.autocast("cpu", dtype=dtype, enabled=where == "around the step"):
        gradients = per_sample(loss, params, data(), modules=(net,))
        narrow = hg.clipped_sum(loss, params, data(), clip=normalize(), modules=(net,))
    for name, square in gradients.sq_norms().items():
        assert square.dtype == torch.float64
        assert narrow.sum[name].dtype == torch.float32
        gap = (narrow.sum[name] - plain.sum[name]).norm() / plain.sum[name].norm()
        assert 1e-6 < gap < close  # autocast was on, and cost no more than its digits
    assert narrow.l2 == plain.l2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_run_under_autocast_goes_the_way_of_float32(dtype: torch.dtype) -> None:
    ends = []
    for enabled in (False, True):
        net = model()
        run = started(net, torch.optim.SGD(net.parameters(), lr=0.5), sigma=0.0)

        def loss(b: tuple[Tensor, Tensor], net: nn.Module = net, on: bool = enabled) -> Tensor:
            with torch.autocast("cpu", dtype=dtype, enabled=on):
                return loss_of(net)(b)

        for batch in run:
            run.step(loss, batch)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in net.parameters())
        ends.append(flat(net) - flat(model()))
    assert 1e-6 < (ends[1] - ends[0]).norm() / ends[0].norm() < 0.02


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-10])
@pytest.mark.parametrize("clip", [abadi(0.5), automatic(), normalize()], ids=str)
def test_in_float32_a_loss_scale_changes_no_bit(clip: Clip, scale: float) -> None:
    ends = []
    for execution in (Execution(), Execution(loss_scale=scale), Execution(loss_scale=scale * 2)):
        net = model()
        run = started(
            net, torch.optim.Adam(net.parameters(), lr=0.05), clip=clip, execution=execution
        )
        for batch in run:
            run.step(loss_of(net), batch)
        ends.append(flat(net))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
    assert not torch.equal(ends[0], flat(model()))


def faint(net: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """A loss whose gradients are below the smallest float16, under autocast."""

    def loss(b: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(b[0])
        return 2.0**-26 * F.cross_entropy(logits.float(), b[1], reduction="none")

    return loss


def bright(net: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda b: 2.0**-26 * F.cross_entropy(net(b[0]), b[1], reduction="none")


def test_a_loss_scale_rescues_gradients_that_float16_rounds_to_zero() -> None:
    net = model()
    params = dict(net.named_parameters())
    execution = Execution(loss_scale=torch.amp.GradScaler("cpu").get_scale())
    assert execution.loss_scale == 2.0**16
    right = hg.clipped_sum(bright(net), params, data(), clip=normalize())
    lost = hg.clipped_sum(faint(net), params, data(), clip=normalize())
    saved = hg.clipped_sum(faint(net), params, data(), clip=normalize(), execution=execution)
    assert all(not total.any() for total in lost.sum.values())
    for name, total in saved.sum.items():
        assert (total - right.sum[name]).norm() < 5e-3 * right.sum[name].norm()
    assert saved.l2 == lost.l2 == right.l2


def test_a_scale_inside_the_loss_is_another_clipping() -> None:
    """What a GradScaler does to an ordinary loss: private all the same, and no longer the same."""
    net = model()
    params = dict(net.named_parameters())
    scaler = torch.amp.GradScaler("cpu")

    def summed(loss: Callable[[Any], Tensor], clip: Clip, **options: Any) -> Bounded:
        torch.manual_seed(0)  # for places that records may draw
        return hg.clipped_sum(loss, params, data(), clip=clip, **options)

    inside = summed(lambda b: scaler.scale(loss_of(net)(b)), abadi(10.0))
    plain = summed(loss_of(net), abadi(10.0))
    execution = Execution(loss_scale=scaler.get_scale())
    outside = summed(loss_of(net), abadi(10.0), execution=execution)
    at_threshold = summed(loss_of(net), normalize(10.0))
    for name, total in plain.sum.items():
        assert torch.equal(outside.sum[name], total)
        torch.testing.assert_close(inside.sum[name], at_threshold.sum[name], rtol=1e-5, atol=1e-5)
        assert (inside.sum[name] - total).norm() > 0.1 * total.norm()
    assert inside.l2 == plain.l2 == outside.l2


@pytest.mark.parametrize("scale", [0.0, -2.0, 3.0, math.inf, math.nan])
def test_a_loss_scale_is_a_power_of_two(scale: float) -> None:
    with pytest.raises(ValueError, match="expected loss_scale to be a power of two"):
        Execution(loss_scale=scale)


def test_under_a_loss_scale_records_that_meet_are_refused_as_ever() -> None:
    net = model()
    params = dict(net.named_parameters())
    execution = Execution(loss_scale=2.0**8)
    hg.clipped_sum(loss_of(net), params, data(), execution=execution)
    with pytest.raises(hg.Refused):
        hg.clipped_sum(
            lambda b: F.cross_entropy(net(b[0] - b[0].mean(0)), b[1], reduction="none"),
            params,
            data(),
            execution=execution,
        )
