"""Operations with a rule are not repeated, and those without one are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import check, private
from torch import Tensor, nn
from uses import Uses, away_from_zero, loss_of, run, twofold

from hushgrad.gradients import auto
from hushgrad.gradients.tracing import rules
from hushgrad.types import NotCovered, Refused

RULED: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "prelu": (F.prelu, [(1,)]),
    "prelu by channel": (F.prelu, [(3,)]),
    "bilinear": (lambda h, w, b: F.bilinear(h, h.tanh(), w, b), [(2, 4, 4), (2,)]),
    "einsum": (lambda h, w: torch.einsum("btd,od->bto", h, w), [(3, 4)]),
    "einsum by each head": (
        lambda h, w: torch.einsum("bthd,hdk->bthk", twofold(h), w), [(2, 4, 3)]
    ),
    "conv_transpose": (lambda h, w: F.conv_transpose1d(h, w, padding=1), [(3, 2, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", RULED)
def test_operations_with_a_rule_are_not_repeated(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradient is not left to the operation's own derivative, record by record."""

    def refuse(call: Any, name: str) -> Any:
        raise NotCovered(f"no rule for {name}")

    monkeypatch.setattr(rules, "by_derivative", refuse)
    function, shapes = RULED[kind]
    run(function, shapes, away_from_zero(5, 3, 4))
    with pytest.raises(Refused, match="no rule for cosine_similarity"):
        run(lambda h, v: F.cosine_similarity(h, v, dim=-1), [(4,)], away_from_zero(5, 3, 4))


GENERAL: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "einsum of three": (lambda h, a, b: torch.einsum("btd,de,ef->btf", h, a, b), [(4, 2), (2, 3)]),
    "scaled_dot_product_attention": (
        lambda h, k: F.scaled_dot_product_attention(h, k.expand_as(h), h), [(3, 4)]
    ),
    "cosine_similarity": (lambda h, v: F.cosine_similarity(h, v, dim=-1), [(4,)]),
    "mse_loss": (lambda h, v: F.mse_loss(h, v.expand_as(h), reduction="none"), [(3, 4)]),
    "interpolation": (lambda h, p: h * F.interpolate(p, size=4), [(1, 3, 2)]),
    "kron": (lambda h, p: torch.kron(h, p), [(1, 2, 2)]),
    "clamp by a parameter": (lambda h, p: torch.clamp(h, max=p), [(4,)]),
    "linalg.solve": (lambda h, a: torch.linalg.solve(a + 4 * torch.eye(4), h.mT), [(4, 4)]),
    "cumulative": (lambda h, p: (h + p).cumsum(1), [(3, 4)]),
    "unfold and product": (lambda h, w: h.unfold(2, 2, 1) @ w, [(2, 3)]),
    "comparison": (lambda h, p: h * (h > p), [(4,)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", GENERAL)
def test_operations_without_a_rule_are_exact(kind: str) -> None:
    function, shapes = GENERAL[kind]
    model = Uses(function, shapes)
    idle = ("operands.0",) if kind == "comparison" else ()
    check(
        loss_of(model),
        private(model),
        away_from_zero(5, 3, 4),
        form=auto,
        modules=(model,),
        idle=idle,
    )


class First(nn.Module):
    """The output alone of a layer that also returns states or weights."""

    def __init__(self, layer: nn.Module, *, copies: int = 1) -> None:
        super().__init__()
        self.layer, self.copies = layer, copies

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*[x] * self.copies)[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "PReLU": lambda: nn.PReLU(3),
    "RNN": lambda: First(nn.RNN(4, 3, batch_first=True)),
    "LSTM": lambda: First(nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)),
    "GRU": lambda: First(nn.GRU(4, 3, batch_first=True)),
    "attention": lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), copies=3),
    "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
    "encoder layer, norm first": lambda: nn.TransformerEncoderLayer(
        4, 2, 6, dropout=0.0, batch_first=True, norm_first=True
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_without_a_rule_of_their_own_are_exact(kind: str) -> None:
    model = nn.Sequential(Uses(lambda h: h, []), LAYERS[kind]())
    check(loss_of(model), model, torch.randn(5, 3, 4), form=auto)


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_recurrent_cells_in_a_loop_are_exact(kind: str) -> None:
    cell = getattr(nn, kind)(4, 3)

    def model(x: Tensor) -> Tensor:
        state: Any = None
        for t in range(x.shape[1]):
            state = cell(x[:, t], state)
        return state[0] if isinstance(state, tuple) else state

    check(loss_of(model), cell, torch.randn(5, 3, 4), form=auto)
