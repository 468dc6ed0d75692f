"""A record keeps its bits in every block of a batch and in every size, or is run by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hushgrad.persample import auto, certificate_for, dense, per_sample, traced
from hushgrad.types import Refused

LAST_BIT = 2.0**-23


class Rounding(torch.autograd.Function):
    """Passes its input on; on the way back each record's gradient is rounded by its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Callable[[int], Tensor]) -> Tensor:
        ctx.up = up
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * (1 + LAST_BIT * ctx.up(len(g)).to(g.dtype)[:, None]), None


class Placed(nn.Module):
    def __init__(self, up: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.up = nn.Linear(64, 32), nn.Linear(32, 16), up

    def forward(self, x: Tensor) -> Tensor:
        hidden = Rounding.apply(torch.relu(self.first(x)), self.up)
        return self.last(hidden).square().sum(1)


def by_place(size: int) -> Tensor:
    return torch.arange(size) // 4 % 3 == 0


def by_size(size: int) -> Tensor:
    return torch.full((size,), size % 16 == 8)


def at_the_end(size: int) -> Tensor:
    """As kernels do, where the last slice of a batch is shorter than the others."""
    return torch.arange(size) >= size // 16 * 16


def test_a_model_whose_last_bits_move_goes_on_record_by_record() -> None:
    model = Placed(by_place)
    params = dict(model.named_parameters())
    gradients = per_sample(model, params, torch.randn(48, 64), form=auto, modules=(model,))
    assert gradients.form == "loop"
    with pytest.raises(Refused, match="other last bits in another part of the batch"):
        per_sample(model, params, torch.randn(48, 64), form=traced, modules=(model,))


@pytest.mark.parametrize("up", [by_size, at_the_end])
def test_a_larger_multiple_keeps_what_a_smaller_one_moves(up: Any) -> None:
    model = Placed(up)
    certificate = certificate_for(
        model, dict(model.named_parameters()), torch.randn(40, 64), form=traced, modules=(model,)
    )
    assert certificate.multiple == 16


@pytest.mark.parametrize("form", [traced, dense])
def test_a_model_that_keeps_its_bits_needs_no_more_room(form: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    certificate = certificate_for(
        lambda x: model(x).square().sum(1),
        dict(model.named_parameters()),
        torch.randn(40, 3, 8, 8),
        form=form,
        modules=(model,),
    )
    assert certificate.form is form
    assert certificate.multiple <= 16
