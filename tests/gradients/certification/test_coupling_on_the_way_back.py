"""Records that meet on the way back are refused: hooks and functions that mix gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import private
from torch import Tensor, nn

from hushgrad import Refused
from hushgrad.gradients import per_sample, traced

MEETING = "depends on other records"


def clipped(g: Tensor, limit: float) -> Tensor:
    return g * (limit / g.norm()).clamp(max=1)


HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "clips at what few records reach": lambda g: clipped(g, 3.0),
    "clips at what loud records reach": lambda g: clipped(g, 1e4),
    "turns the sign": lambda g: g * g.sum().sign(),
    "drops the batch if one is nan": lambda g: torch.where(g.isnan().any(), 0 * g, g),
    "averages a little": lambda g: g + 1e-9 * g.mean(0),
    "first and last": lambda g: torch.cat([g[:1] + 1e-2 * g[-1:], g[1:]]),
    "halves of an even batch": lambda g: (
        g if len(g) % 2 else 0.5 * g + 0.5 * g.roll(len(g) // 2, 0)
    ),
    "at a rare draw": lambda g: clipped(g, 0.1) if torch.rand(()) < 0.005 else g,
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("bounded", [True, False], ids=["cross entropy", "squares"])
def test_a_hook_that_mixes_gradients_is_refused(
    hook: Callable[[Tensor], Tensor], bounded: bool
) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        h = model[:2](batch[0])
        if h.requires_grad:
            h.register_hook(hook)
        out = model[2](h)
        if bounded:
            return nn.functional.cross_entropy(out, batch[1], reduction="none")
        return out.square().sum(1)

    batch = (torch.randn(16, 6), torch.randint(3, (16,)))
    with pytest.raises(Refused, match=rf"{MEETING}|differs from its one-record run"):
        per_sample(loss, private(model), batch, form=traced)


def test_a_function_that_clips_the_batch_on_the_way_back_is_refused() -> None:
    layer = nn.Linear(3, 5)

    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return clipped(gradients[0], 100.0)

    def loss(x: Tensor) -> Tensor:
        return Clip.apply(layer(x)).square().sum(1)

    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), torch.randn(8, 3), form=traced)
    assert per_sample(loss, private(layer), torch.randn(8, 3)).form == "loop"
