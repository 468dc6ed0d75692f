"""Losses in every spelling: each is certified once, and anew where it becomes another function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import agree, check, expected, private
from torch import Tensor, nn
from uses import weigh

from hushgrad.gradients import loop, per_sample, traced
from zoo.small import perceptron


class Objective(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return weigh(self.model(x)) * self.scale

    def again(self, x: Tensor) -> Tensor:
        return self(x)


class Callables:
    """An object that can be called, and nothing more."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        return weigh(self.model(x))


def scaled_loss(model: nn.Module, x: Tensor, *, scale: float) -> Tensor:
    return scale * weigh(model(x))


def lambda_of(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: weigh(model(x))


def nested_lambda_of(model: Any) -> Callable[[Tensor], Tensor]:
    inner = lambda_of(model)
    return lambda x: 2 * inner(x)


LOSSES: dict[str, Callable[[Any], Callable[[], Callable[[Tensor], Tensor]]]] = {
    "a lambda made anew": lambda m: lambda: lambda_of(m),
    "a lambda in a lambda": lambda m: lambda: nested_lambda_of(m),
    "a bound method": lambda m: lambda: m.again,
    "a partial": lambda m: lambda: functools.partial(scaled_loss, m, scale=2.0),
    "a partial of a method": lambda m: lambda: functools.partial(m.again),
    "a module": lambda m: lambda: m,
    "an object": lambda m: functools.partial(lambda one: one, Callables(m.model)),
}


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_a_loss_is_certified_once(make: Any, certifications: list[Any]) -> None:
    model = Objective(perceptron())
    fresh, batch = make(model), torch.randn(5, 3)
    want = expected(fresh(), private(model), batch)
    for _ in range(5):
        gradients = per_sample(fresh(), private(model), batch, form=traced, idle=("scale",))
        agree(gradients, want, private(model))
    assert len(certifications) == 1


def test_a_step_between_tests_calls_the_loss_once() -> None:
    model, calls = perceptron(), []

    def step() -> int:
        calls.clear()
        per_sample(
            lambda x: (calls.append(len(x)), weigh(model(x)))[1],
            private(model),
            torch.randn(5, 3),
            form=traced,
        )
        return len(calls)

    counts = [step() for _ in range(9)]
    assert [i for i, count in enumerate(counts) if count == 1] == [3, 5, 6, 7]
    assert calls != []
    assert counts[0] > counts[1] > 1


@pytest.mark.parametrize("change", ["model", "number", "code", "default", "partial"])
def test_another_loss_of_the_same_parameters_is_certified_anew(
    change: str, certifications: list[Any]
) -> None:
    model, batch = perceptron(), torch.randn(5, 3)
    other = nn.Sequential(model, nn.Tanh())

    def by_number(scale: int) -> Callable[[Tensor], Tensor]:
        return lambda x: weigh(model(x)) * scale

    def by_default(scale: int) -> Callable[[Tensor], Tensor]:
        return lambda x, scale=scale: weigh(model(x)) * scale

    pairs: dict[str, tuple[Any, Any]] = {
        "model": (lambda_of(model), lambda_of(other)),
        "number": (by_number(1), by_number(2)),
        "code": (lambda x: weigh(model(x)), lambda x: -weigh(model(x))),
        "default": (by_default(1), by_default(2)),
        "partial": tuple(functools.partial(scaled_loss, model, scale=s) for s in (1, 2)),
    }
    for loss in pairs[change]:
        check(loss, private(model), batch)
    assert len(certifications) == 2


def test_a_weight_in_the_loss_that_varies_is_exact() -> None:
    model, batch = perceptron(), torch.randn(5, 3)
    for step in range(6):
        weight = 1 / (1 + step)
        check(lambda x, w=weight: w * weigh(model(x)), model, batch)


def test_a_loss_that_calls_itself_is_exact() -> None:
    model = perceptron()

    def loss(batch: Any) -> Tensor:
        return loss(batch["x"]) if isinstance(batch, dict) else weigh(model(batch))

    check(loss, model, {"x": torch.randn(5, 3)})


def test_a_loss_that_closes_over_a_name_without_a_value_is_exact() -> None:
    model = perceptron()

    def make() -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            return weigh(model(x)) if len(x) else never

        if model is None:
            never = torch.zeros(0)
        return loss

    check(make(), model, torch.randn(5, 3))


def test_a_loss_that_differentiates_is_exact() -> None:
    """An adversarial step inside the loss."""
    layer = nn.Linear(4, 1)

    def loss(x: Tensor) -> Tensor:
        near = x.detach().requires_grad_()
        (step,) = torch.autograd.grad(layer(near).square().sum(), near)
        return layer(x + 0.1 * step.sign())[:, 0].square()

    check(loss, layer, torch.randn(9, 4), form=[traced, loop])


def test_a_scripted_module_is_certified() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.Tanh()))
    found = per_sample(
        lambda x: model(x).square().sum(1), private(model), torch.randn(9, 4), modules=(model,)
    )
    assert found.form in ("traced", "dense", "loop")
