"""Products with large weights, which oneDNN computes: right, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compare import check, private
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hushgrad import Execution, clipped_sum, numerics
from hushgrad.gradients import Form, compiled, per_sample, recomputed, traced
from hushgrad.types import Refused

IN, OUT = 130, 200


class Model(nn.Module):
    """Two layers, of which the first has its products as `product` spells them."""

    def __init__(self, product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product = product
        self.weight = nn.Parameter(0.1 * torch.randn(OUT, IN))
        self.bias = nn.Parameter(0.1 * torch.randn(OUT))
        self.before, self.after = nn.Linear(IN, IN), nn.Linear(OUT, OUT)

    def forward(self, x: Tensor) -> Tensor:
        h = self.product(torch.tanh(self.before(x)), self.weight, self.bias)
        return self.after(torch.tanh(h)).square().flatten(1).mean(1)


def addmm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x.flatten(0, -2), w.mT).view(*x.shape[:-1], OUT)


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "without a bias": lambda x, w, b: F.linear(x, w) + b,
    "addmm": addmm,
    "scaled addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, -2), w.mT, beta=2, alpha=0.5).view(
        *x.shape[:-1], OUT
    ),
    "matmul": lambda x, w, b: torch.matmul(x, w.mT) + b,
    "operator": lambda x, w, b: x @ w.mT + b,
    "reflected": lambda x, w, b: (w @ x.mT).mT + b,
}


def test_the_weights_are_large_enough() -> None:
    assert numerics.is_for_onednn(torch.zeros(OUT, IN))
    assert not numerics.is_for_onednn(torch.zeros(OUT, IN, dtype=torch.float64))
    assert not numerics.is_for_onednn(torch.zeros(1, 123))


@pytest.mark.parametrize("shape", [(6, IN), (6, 4, IN)], ids=["rows", "sequences"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_large_weights_are_exact(name: str, shape: tuple[int, ...]) -> None:
    model = Model(PRODUCTS[name])
    check(model, model, torch.randn(*shape))


@pytest.mark.parametrize("form", [recomputed, compiled], ids=str)
def test_other_forms_are_exact(form: Form) -> None:
    model, x = Model(F.linear), torch.randn(6, IN)
    sums = [
        clipped_sum(
            lambda x: model(x), private(model), x, modules=(model,), execution=Execution(of)
        ).sum
        for of in (traced, form)
    ]
    for name, total in sums[0].items():
        torch.testing.assert_close(sums[1][name], total, rtol=1e-4, atol=1e-6)


def test_checkpointing_is_exact() -> None:
    model = Model(F.linear)
    check(lambda x: checkpoint(model, x, use_reentrant=False), model, torch.randn(6, IN))


def test_autocast_is_exact() -> None:
    model = Model(F.linear)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(lambda x: model(x).float(), model, torch.randn(6, IN))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_exact(kind: type[nn.RNNBase]) -> None:
    layer = kind(64, 96, num_layers=2, bidirectional=True, batch_first=True)
    check(lambda x: layer(x)[0].square().flatten(1).mean(1), layer, torch.randn(6, 5, 64))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_a_projected_lstm_is_exact() -> None:
    layer = nn.LSTM(96, 160, proj_size=112, batch_first=True)  # of which torch warns
    check(lambda x: layer(x)[0].square().flatten(1).mean(1), layer, torch.randn(6, 5, 96))


def test_a_bias_with_a_graph_of_its_own_keeps_its_gradient() -> None:
    """It is made of another parameter: a product that knows of none would cut it off."""
    model = nn.ModuleDict({"weight": nn.Linear(IN, OUT, bias=False), "bias": nn.Linear(OUT, OUT)})

    def loss(x: Tensor) -> Tensor:
        bias = torch.tanh(model["bias"].weight[0] * model["bias"].bias)
        return F.linear(x, model["weight"].weight, bias).square().mean(1)

    check(loss, model, torch.randn(6, IN))


def test_a_gradient_within_the_loss_is_never_silently_wrong() -> None:
    model = Model(F.linear)

    def loss(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        value = model(x)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return value + slope.square().sum(1)

    with pytest.raises(Refused):
        per_sample(loss, private(model), torch.randn(6, IN), form=traced)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_keeps_its_bits_beside_any_number_of_others(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for columns, n in [(OUT, IN), (512, 128), (301, 77), (64, 784), (1024, 1024)]:
            few, w, b = torch.randn(8, n), torch.randn(columns, n), torch.randn(columns)
            expected = numerics.linear_product(few, w, b)
            for copies in (2, 3, 5, 8, 13, 40):
                found = numerics.linear_product(few.repeat(copies, 1), w, b).view(
                    copies, 8, columns
                )
                assert bool((found == expected).all()), (columns, n, copies)
    finally:
        torch.set_num_threads(before)


def test_rows_with_gaps_and_transposed_weights() -> None:
    x, w = torch.randn(8, 3, IN)[:, 1], torch.randn(IN, OUT)
    torch.testing.assert_close(numerics.linear_product(x, w.mT), x @ w)
    gapped = torch.randn(OUT, 2 * IN)[:, :IN]
    torch.testing.assert_close(numerics.linear_product(x, gapped), x @ gapped.mT)
