"""Parameters that are used several times, also in two types."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compare import check
from torch import Tensor, nn
from uses import away_from_zero, loss_of, run

from hushgrad.gradients import traced


def test_one_table_in_two_types_is_exact() -> None:
    table = nn.Embedding(6, 4)

    def loss(index: Tensor) -> Tensor:
        h = F.embedding(index, table.weight) @ table.weight.T
        return h.square().sum((1, 2)) + F.embedding(index, table.weight.double()).pow(3).sum((1, 2))

    check(loss, table, torch.randint(6, (5, 3)), form=traced)


def thrice(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    for _ in range(3):
        h = torch.tanh(F.linear(h, w, b))
    return h


REUSES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "one layer three times": (thrice, [(4, 4), (4,)]),
    "weight and its transpose": (lambda h, w: F.linear(torch.tanh(F.linear(h, w)), w.T), [(3, 4)]),
    "weight, product and transpose": (
        lambda h, w: torch.tanh(h @ w.T) @ w + F.linear(h, w.T @ w), [(3, 4)]
    ),
    "weight and elementwise": (lambda h, w: F.linear(h, w) * w[:2], [(4, 4)]),
    "elementwise, shift and scale": (lambda h, p: (h + p) * p - p / (1 + p.square()), [(4,)]),
    "bias as scale": (lambda h, w, b: F.linear(h, w, b) * b, [(4, 4), (4,)]),
    "norm weights shared": (
        lambda h, w: F.layer_norm(F.layer_norm(h, (4,), w, w).tanh(), (4,), w), [(4,)]
    ),
    "halves of one weight": (
        lambda h, w: F.linear(h, w[:3]) * torch.sigmoid(F.linear(h, w[3:])), [(6, 4)]
    ),
    "rows that meet": (
        lambda h, w: F.linear(h, w[:4]) * torch.sigmoid(F.linear(h, w[2:])), [(6, 4)]
    ),
    "rows of made heads that meet": (
        lambda h, w: made_heads(h, w[:2]) * made_heads(h, w[1:]).tanh(), [(3, 3, 4)]
    ),
    "rows of a product that meet": (
        lambda h, w: h @ w[:4] + h.tanh() @ w[1:], [(5, 3)]
    ),
    "rows of a convolution": (
        lambda h, w: F.conv1d(h.mT, w[:2]) * F.conv1d(h.mT, w[2:]), [(4, 4, 2)]
    ),
    "halves of a bias": (lambda h, b: (h[..., :2] + b[:2]) * (h[..., 2:] * b[2:]), [(4,)]),
    "columns": (lambda h, w: F.linear(h[..., :2], w[:, :2]) * F.linear(h, w), [(3, 4)]),
    "every second row": (lambda h, w: F.linear(h, w[::2]) * F.linear(h, w[1::2]), [(6, 4)]),
    "heads of one weight": (
        lambda h, w: sum(F.linear(h, part) * k for k, part in enumerate(w.chunk(3), 1)), [(6, 4)]
    ),
    "qkv": (lambda h, w: attend(*F.linear(h, w).chunk(3, -1)), [(12, 4)]),
    "qkv by unbind of the weight": (
        lambda h, w: attend(*(F.linear(h, part) for part in w.unbind(0))), [(3, 4, 4)]
    ),
    "convolution and linear": (
        lambda h, w: F.conv1d(h.mT, w.unsqueeze(2)).mT + F.linear(h, w), [(4, 4)]
    ),
    "regulariser of each record": (
        lambda h, w: F.linear(h, w) + 0.1 * w.square().sum() * h.mean((1, 2), keepdim=True),
        [(4, 4)],
    ),
}  # fmt: skip


def made_heads(h: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("btd,hkd->bthk", h, w)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("kind", REUSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_parameter_used_several_times_is_exact(kind: str, dtype: torch.dtype) -> None:
    function, shapes = REUSES[kind]
    run(function, shapes, away_from_zero(3, 2, 4, dtype=dtype), dtype=dtype)


def test_reused_layers_can_stay_factored() -> None:
    """Factors of several uses join; the cross terms belong to the norm."""
    wide, head = nn.Linear(40, 40), nn.Linear(40, 40)
    model = nn.Sequential(wide, nn.Tanh(), wide, nn.Tanh(), head, nn.Tanh(), wide)
    gradients = check(loss_of(model), model, torch.randn(5, 40))
    assert gradients.held_gradients["0.weight"].form == "Gram"


def test_tied_table_and_head_can_stay_factored() -> None:
    """A look-up and a product of one table have a cross term of their own."""
    table, middle = nn.Embedding(90, 24), nn.Linear(24, 24)

    def model(index: Tensor) -> Tensor:
        return F.linear(torch.tanh(middle(table(index))), table.weight)

    modules = nn.ModuleList([table, middle])
    gradients = check(loss_of(model), modules, torch.randint(90, (5, 3)))
    assert gradients.held_gradients["0.weight"].form == "Gram"
