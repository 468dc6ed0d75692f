"""Small models around one operation, so that what fails is that operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from compare import check
from torch import Tensor, nn

from hushgrad.gradients import traced

Shape = tuple[int, ...]


def away_from_zero(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values of both signs between 0.5 and 1.5, so that dividing by them is harmless."""
    return ((torch.rand(shape) + 0.5) * torch.randn(shape).sign()).to(dtype)


class Uses(nn.Module):
    """`function(h, *parameters)`, where `h` hangs on a private parameter of its own.

    The scale ahead has a wrong gradient whenever the operation passes back a wrong one.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        shapes: Sequence[Shape],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.function = function
        self.ahead = nn.Parameter(torch.tensor(0.8, dtype=dtype))
        self.operands = nn.ParameterList(
            nn.Parameter(away_from_zero(*shape, dtype=dtype)) for shape in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.ahead if x.is_floating_point() else x
        return self.function(h, *self.operands)


def weigh(y: Tensor) -> Tensor:
    """One loss for each record, in which every entry of the output has a part of its own."""
    flat = torch.tanh(0.3 * y.reshape(len(y), -1))
    return (flat * torch.arange(1, flat.shape[1] + 1).cos().to(flat.dtype)).sum(1)


def loss_of(model: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    return lambda batch: weigh(model(batch))


def scaled(model: nn.Module) -> nn.Module:
    """Shrink a model's weights where a wide layer would otherwise saturate the loss."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.div_(math.sqrt(p[0].numel()))
    return model


def untouched(model: nn.Module) -> bool:
    """No gradient was left behind, and no class."""
    return all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())


def squared(model: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    return lambda x: model(x).flatten(1).square().sum(1)


def run(
    function: Callable[..., Tensor],
    shapes: list[tuple[int, ...]],
    x: Tensor,
    form: Any = traced,
    dtype: torch.dtype = torch.float32,
) -> Any:
    model = Uses(function, shapes, dtype)
    if not x.is_floating_point():
        model.ahead.requires_grad_(False)
    return check(loss_of(model), model, x, form=form)


def train_only(layer: nn.Module, trained: str) -> nn.Module:
    """Freeze every parameter but those of this name; `both` freezes nothing."""
    for name, p in layer.named_parameters():
        p.requires_grad_(trained in ("both", name))
    return layer


def twofold(h: Tensor) -> Tensor:
    return torch.stack([h, h.tanh()], -2)
