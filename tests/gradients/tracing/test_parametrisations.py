"""Weights that are made from parameters by torch's parametrisations."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import check, kinds, private
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from uses import Uses, loss_of

from hushgrad.gradients import auto


class LowRank(nn.Module):
    """`w + scale * b a`, the update of a weight by two narrow matrices."""

    def __init__(self, w: Tensor, rank: int = 2, scale: float = 0.5) -> None:
        super().__init__()
        rows = w.flatten(1)
        self.a = nn.Parameter(torch.randn(rank, rows.shape[1]))
        self.b = nn.Parameter(torch.randn(len(rows), rank))
        self.scale = scale

    def forward(self, w: Tensor) -> Tensor:
        return w + (self.b @ self.a).view(w.shape) * self.scale


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


class Twice(nn.Module):
    """A layer used twice, its weight made once or at each use."""

    def __init__(self, layer: nn.Module, *, cached: bool) -> None:
        super().__init__()
        self.layer, self.cached = layer, cached

    def forward(self, x: Tensor) -> Tensor:
        if not self.cached:
            return self.layer(x) + self.layer(x * x)
        with parametrize.cached():
            return self.layer(x) + self.layer(x * x)


def adapted(layer: nn.Module, *, train_base: bool = False) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", LowRank(layer.weight))
    layer.parametrizations.weight.original.requires_grad_(train_base)
    return layer


def made(layer: nn.Module, how: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", how)


def hooked(make: Callable[..., nn.Module], layer: nn.Module) -> nn.Module:
    """By the functions that came before parametrisations, and say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return make(layer)


def check_layer(layer: nn.Module, shape: tuple[int, ...] = (5, 3, 4)) -> Any:
    model = nn.Sequential(Uses(lambda h: h, []), layer)
    return check(loss_of(model), model, torch.randn(shape))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: weight_norm(nn.Linear(4, 3)),
    "weight norm of the whole": lambda: weight_norm(nn.Linear(4, 3), dim=None),
    "weight norm of columns": lambda: weight_norm(nn.Linear(4, 3), dim=1),
    "weight norm of a convolution": lambda: weight_norm(nn.Conv1d(3, 2, 2)),
    "weight norm by hooks": lambda: hooked(nn.utils.weight_norm, nn.Linear(4, 3)),
    "spectral norm": lambda: spectral_norm(nn.Linear(4, 3)),
    "spectral norm of a convolution": lambda: spectral_norm(nn.Conv1d(3, 2, 2)),
    "spectral norm, iterations": lambda: spectral_norm(nn.Linear(4, 3), n_power_iterations=3),
    "spectral norm by hooks": lambda: hooked(nn.utils.spectral_norm, nn.Linear(4, 3)),
    "two in a row": lambda: made(weight_norm(nn.Linear(4, 4)), Symmetric()),
    "symmetric": lambda: made(nn.Linear(4, 4), Symmetric()),
    "low rank": lambda: adapted(nn.Linear(4, 3)),
    "low rank with its base": lambda: adapted(nn.Linear(4, 3), train_base=True),
    "low rank on a norm": lambda: made(weight_norm(nn.Linear(4, 4)), LowRank(torch.eye(4))),
    "low rank convolution": lambda: adapted(nn.Conv1d(3, 2, 2)),
    "twice, spectral": lambda: Twice(spectral_norm(nn.Linear(4, 3)), cached=False),
    "twice, spectral, cached": lambda: Twice(spectral_norm(nn.Linear(4, 3)), cached=True),
    "twice, low rank, cached": lambda: Twice(adapted(nn.Linear(4, 3)), cached=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYERS)
def test_a_parametrised_layer_is_exact(kind: str) -> None:
    check_layer(LAYERS[kind]())


@pytest.mark.parametrize("rows", [3, 4, 6])
@pytest.mark.parametrize(
    ("way", "trivialised"),
    [
        ("matrix_exp", True),
        ("matrix_exp", False),
        ("cayley", True),
        ("cayley", False),
        ("householder", True),
    ],
)
def test_an_orthogonal_weight_is_exact(way: str, rows: int, trivialised: bool) -> None:
    check_layer(orthogonal(nn.Linear(4, rows), "weight", way, use_trivialization=trivialised))


@pytest.mark.parametrize("make", [spectral_norm, adapted, weight_norm])
def test_a_parametrised_table_is_exact(make: Callable[[nn.Module], nn.Module]) -> None:
    table = make(nn.Embedding(7, 4))
    check(loss_of(table), table, torch.randint(7, (5, 3)))


def test_a_spectral_norm_moves_once_a_step_and_sees_no_record() -> None:
    layer = spectral_norm(nn.Linear(4, 3))
    other, x = copy.deepcopy(layer), torch.randn(5, 4)
    for n in range(3):
        check(loss_of(layer), layer, x + n)
        other(torch.zeros(2, 4))
        for mine, its in zip(layer.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(mine, its)


def test_a_module_that_keeps_its_weight_can_be_used_after_the_pass() -> None:
    """The old hooks leave the weight that they made on the module."""
    layer = hooked(nn.utils.weight_norm, nn.Linear(4, 3))
    check(loss_of(layer), layer, torch.randn(5, 4))
    kept = layer.weight + 1
    assert type(kept) is Tensor
    assert not kept.requires_grad
    assert layer(torch.randn(2, 4)).requires_grad


def test_weight_norm_as_the_wave_of_a_convolution_net() -> None:
    net = nn.Sequential(
        weight_norm(nn.Conv1d(3, 4, 3, padding=2, dilation=2)),
        nn.LeakyReLU(0.1),
        weight_norm(nn.ConvTranspose1d(4, 2, 2, stride=2)),
    )
    check(loss_of(net), net, torch.randn(5, 3, 6), form=auto)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_type_of_parameter_is_exact(dtype: torch.dtype) -> None:
    net = nn.Sequential(adapted(nn.Linear(4, 3), train_base=True), weight_norm(nn.Linear(3, 2)))
    check(loss_of(net), net.to(dtype), torch.randn(5, 3, 4).to(dtype))


def test_autocast_is_exact() -> None:
    net = nn.Sequential(adapted(nn.Linear(4, 3), train_base=True), weight_norm(nn.Linear(3, 2)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(loss_of(net), net, torch.randn(5, 3, 4))


# How a narrow update is spelled: from w [9, 8], b [9, 2] and a [2, 8] to a weight.
UPDATES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "w + b @ a": lambda w, b, a: w + b @ a,
    "b @ a + w": lambda w, b, a: b @ a + w,
    "scaled": lambda w, b, a: w + 0.5 * (b @ a) / 3,
    "subtracted": lambda w, b, a: w - torch.mm(b, a),
    "subtracted from": lambda w, b, a: torch.rsub(b @ a, w),
    "alpha": lambda w, b, a: torch.add(w, torch.matmul(b, a), alpha=0.3),
    "subtracted, alpha": lambda w, b, a: torch.sub(w, b.matmul(a), alpha=0.3),
    "transposed": lambda w, b, a: w + (a.T @ b.T).T,
    "reshaped": lambda w, b, a: w + (b @ a).view(9, 2, 4).view(w.shape),
    "cast": lambda w, b, a: (w.double() + b.double() @ a.double()).float(),
    "frozen in the middle": lambda w, b, a: w + b @ torch.eye(2).add(0.5) @ a,
    "w twice": lambda w, b, a: w + w + b @ a,
}


@pytest.mark.parametrize("spelling", UPDATES)
@pytest.mark.parametrize("trained", ["w", "b", "a", "w b a"])
def test_a_narrow_update_stays_factored(spelling: str, trained: str) -> None:
    shapes = {"w": (9, 8), "b": (9, 2), "a": (2, 8)}
    values = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    for name, value in values.items():
        value.requires_grad_(name in trained)

    def loss(x: Tensor) -> Tensor:
        weight = UPDATES[spelling](*values.values())
        return loss_of(lambda x: 0.3 * F.linear(x, weight))(x)

    params = {name: value for name, value in values.items() if name in trained}
    gradients = check(loss, params, torch.randn(5, 3, 8))
    assert kinds(gradients) == dict.fromkeys(params, "Outer")


@pytest.mark.parametrize("fixed", [True, False])
def test_a_narrow_update_of_a_table_stays_factored(fixed: bool) -> None:
    w = torch.randn(7, 4)
    a, b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(7, 2))
    places = torch.tensor([1, 3, 3])

    def model(batch: tuple[Tensor, Tensor]) -> Tensor:
        index, x = batch
        table = w + b @ a
        return x + (table[places] if fixed else F.embedding(index, table, padding_idx=2))

    batch = torch.randint(7, (5, 3)), torch.randn(5, 3, 4)
    gradients = check(loss_of(model), {"a": a, "b": b}, batch)
    assert kinds(gradients) == {"a": "Outer", "b": "OneHot"}


def test_a_wide_update_of_a_layer_is_cheaper_factored() -> None:
    model = nn.Sequential(adapted(nn.Linear(40, 50)), nn.Tanh(), nn.Linear(50, 2))
    gradients = check(loss_of(model), model, torch.randn(5, 3, 40))
    assert kinds(gradients)["0.parametrizations.weight.0.a"] == "Outer"
    assert gradients.held_gradients["0.parametrizations.weight.0.a"].form == "Gram"


def test_a_projected_table_stays_factored() -> None:
    """The layer projects the records too, and meets them with the table's rows only later."""
    layer, table = nn.Linear(4, 3), nn.Parameter(torch.randn(6, 4))

    def loss(x: Tensor) -> Tensor:
        places = layer(F.layer_norm(table, (4,)))
        return (layer(x) @ places.mT).tanh().square().sum((1, 2))

    params = {**private(layer), "table": table}
    gradients = check(loss, params, torch.randn(5, 3, 4))
    assert kinds(gradients) == {"weight": "Outer", "bias": "Dense", "table": "Dense"}


@pytest.mark.parametrize("trained", ["weight", "bias", "table", "weight bias table"])
def test_a_partly_frozen_projection_is_exact(trained: str) -> None:
    values = {"weight": (3, 4), "bias": (3,), "table": (2, 6, 4)}
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in values.items()}
    for name, p in params.items():
        p.requires_grad_(name in trained)

    def loss(x: Tensor) -> Tensor:
        places = F.linear(params["table"], params["weight"], params["bias"])
        return (x @ places.flatten(0, 1).mT).tanh().square().sum((1, 2))

    check(loss, {n: p for n, p in params.items() if p.requires_grad}, torch.randn(5, 2, 3))


def test_a_weight_that_is_used_in_two_ways_is_exact() -> None:
    """Factored where it multiplies and written out where it is added, both at once."""
    a, b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))

    def loss(x: Tensor) -> Tensor:
        weight = b @ a
        return loss_of(lambda x: F.linear(x, weight).unsqueeze(-1) * weight)(x)

    check(loss, {"a": a, "b": b}, torch.randn(5, 2, 4))
