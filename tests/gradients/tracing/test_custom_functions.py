"""Kernels and functions with derivatives of their own are exact in another form, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import agree, check, expected
from torch import Tensor, library, nn

from hushgrad import Refused
from hushgrad.gradients import loop, per_sample, traced


class Product(torch.autograd.Function):
    """`x @ w` with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradients[0] @ w.mT, x.mT @ gradients[0]


CUSTOM: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the parameter": lambda x, w: Product.apply(x, w),
    "a view of it": lambda x, w: Product.apply(x, w.mT).tanh() @ w,
    "a function of it": lambda x, w: Product.apply(x, w.exp()),
    "beside an operation": lambda x, w: Product.apply(x, w) + (x @ w).tanh(),
}


@pytest.mark.parametrize("use", CUSTOM.values(), ids=CUSTOM)
def test_a_custom_function_is_never_silently_wrong(use: Callable[..., Tensor]) -> None:
    weight = nn.Parameter(torch.randn(3, 3))

    def loss(x: Tensor) -> Tensor:
        return use(x, weight).square().sum(1)

    params, batch = {"weight": weight}, torch.randn(8, 3)
    want = expected(loss, params, batch)
    with pytest.raises(Refused, match="weight"):
        per_sample(loss, params, batch, form=traced)
    assert weight.grad is None
    try:
        found = per_sample(loss, params, batch)
    except Refused as refusal:
        assert "weight" in str(refusal)  # noqa: PT017
        assert "form=loop" in str(refusal)  # noqa: PT017
    else:
        agree(found, want, params)
    agree(per_sample(loss, params, batch, form=loop), want, params)
    assert weight.grad is None
    assert type(weight) is nn.Parameter


class Round(torch.autograd.Function):
    """Rounded on the way in, and passed straight through on the way back."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.round(decimals=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@library.custom_op("hushgrad_tests::product", mutates_args=())
def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _product_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return gradient @ w.mT, x.mT @ gradient


product.register_autograd(_product_back, setup_context=_keep)

KERNELS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "function of a parameter": (lambda x, w: x @ Round.apply(w), "Round used .*weight"),
    "function of a made weight": (lambda x, w: x @ Round.apply(w.exp()), "Round used .*weight"),
    "function beside an operation": (
        lambda x, w: x @ Round.apply(2 * w) + x @ w, "Round used .*weight"
    ),
    "operator": (lambda x, w: product(x, w), "hushgrad_tests.product.*custom kernel"),
    "operator on a made weight": (
        lambda x, w: product(x, w.exp()), "hushgrad_tests.product.*custom kernel"
    ),
    "packet": (
        lambda x, w: torch.ops.hushgrad_tests.product(x, w), "hushgrad_tests.product.*custom"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KERNELS)
def test_a_kernel_is_named_and_exact_in_another_form(kind: str) -> None:
    use, message = KERNELS[kind]
    params, batch = {"weight": nn.Parameter(torch.randn(3, 3))}, torch.randn(8, 3)

    def loss(x: Tensor) -> Tensor:
        return use(x, params["weight"]).square().sum(1)

    want = expected(loss, params, batch)
    with pytest.raises(Refused, match=f"{message}.*form=loop"):
        per_sample(loss, params, batch, form=traced)
    agree(per_sample(loss, params, batch), want, params)
    agree(per_sample(loss, params, batch, form=loop), want, params)


def test_an_operator_on_parameters_alone_is_exact() -> None:
    w = nn.Parameter(torch.randn(3, 3))
    check(lambda x: (x @ product(w, w)).square().sum(1), {"w": w}, torch.randn(8, 3))
