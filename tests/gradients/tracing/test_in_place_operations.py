"""Operations in place: their gradients are exact, and the batch stays as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compare import check
from torch import Tensor, nn
from uses import loss_of, weigh


def add_to_itself(h: Tensor, layer: nn.Linear) -> Tensor:
    h = h.clone()
    h += layer(h.tanh())
    return h


def write_to_a_part(h: Tensor, layer: nn.Linear) -> Tensor:
    y = layer(h)
    y[:, :2].relu_()
    return y


def twice_in_place(h: Tensor, layer: nn.Linear) -> Tensor:
    return layer(layer(h).mul_(0.5).relu_()).add_(h).sigmoid_()


IN_PLACE: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "relu_": lambda h, layer: layer(h).relu_(),
    "F.relu, inplace": lambda h, layer: F.relu(layer(h), inplace=True),
    "F.leaky_relu_": lambda h, layer: F.leaky_relu_(layer(h), 0.3),
    "F.elu, inplace": lambda h, layer: F.elu(layer(h), inplace=True),
    "sigmoid_": lambda h, layer: layer(h).sigmoid_(),
    "dropout, inplace": lambda h, layer: F.dropout(layer(h), 0.0, inplace=True),
    "residual": lambda h, layer: layer(h).add_(h),
    "residual, written to": add_to_itself,
    "on a part": write_to_a_part,
    "on a view": lambda h, layer: layer(h).view(-1, 2, 2).relu_().flatten(1),
    "masked_fill_": lambda h, layer: layer(h).masked_fill_(h > 0.5, 0.0),
    "twice": twice_in_place,
}


@pytest.mark.parametrize("function", IN_PLACE.values(), ids=IN_PLACE)
def test_operations_in_place_are_exact(function: Callable[[Tensor, nn.Linear], Tensor]) -> None:
    first, second = nn.Linear(3, 4), nn.Linear(4, 4)
    model = nn.ModuleList([first, second])
    check(loss_of(lambda x: function(first(x), second)), model, torch.randn(5, 3))


def test_in_place_modules_after_every_kind_of_layer() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.GroupNorm(2, 4),
        nn.ELU(inplace=True),
        nn.Conv2d(4, 2, 3),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(8, 6),
        nn.Hardswish(inplace=True),
        nn.LayerNorm(6),
        nn.SiLU(inplace=True),
    )
    check(loss_of(model), model, torch.randn(5, 1, 4, 4))


def test_in_place_where_only_a_bias_is_trained() -> None:
    """The frozen weight keeps nothing of its input, so the input may be written over."""
    first, second = nn.Linear(3, 4), nn.Linear(4, 4)
    second.weight.requires_grad_(False)

    def model(x: Tensor) -> Tensor:
        h = first(x)
        h += second(h)
        return h

    check(loss_of(model), nn.ModuleList([first, second]), torch.randn(5, 3))


def test_the_batch_stays_as_it_was() -> None:
    """`x.to(weight)` returns the batch itself, and no tap may be put on that."""
    layer = nn.Linear(3, 4)

    def loss(x: Tensor) -> Tensor:
        return weigh(layer(x.to(layer.weight)))

    batch = torch.randn(8, 3)
    before = batch.clone()
    check(loss, layer, batch)
    assert torch.equal(batch, before)
    assert batch.is_leaf
    assert not batch.requires_grad
    assert batch.grad is None
