"""Parts of a loss that run without gradients, or behind `detach`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compare import FORMS, agree, check, expected, private
from torch import Tensor, nn
from uses import loss_of, weigh

from hushgrad.gradients import Form, per_sample
from zoo.small import perceptron


def teacher(model: nn.Sequential, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x + 0.1).softmax(1)
    return (model(x).softmax(1) - target).square().sum(1)


def lower_part(model: nn.Sequential, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = model[:2](x)
    return weigh(model[2](h)) * model[0](x).sum(1)


def by_hand(model: nn.Sequential, x: Tensor) -> Tensor:
    y = model(x)
    with torch.no_grad():
        scale = 1 / y.norm(dim=1, keepdim=True)
        with torch.enable_grad():
            z = model(x.flip(1))
    return weigh(y * scale + z)


def stopped(model: nn.Sequential, x: Tensor) -> Tensor:
    h = model[:2](x)
    return weigh(model[2](h.detach()) + h.sum(1, keepdim=True))


def straight_through(model: nn.Sequential, x: Tensor) -> Tensor:
    h = model[:2](x)
    return weigh(model[2](h + (h.sign() - h).detach()))


def detached_weight(model: nn.Sequential, x: Tensor) -> Tensor:
    h = model[:2](x)
    return weigh(F.linear(h, model[2].weight.detach()) + model[2](h.square()))


def decorated(model: nn.Sequential, x: Tensor) -> Tensor:
    statistics = torch.no_grad()(lambda: model[0].weight.norm() + model[2](model[:2](x)).amax(1))
    return weigh(model(x)) / statistics()


STOPPED: dict[str, Callable[[nn.Sequential, Tensor], Tensor]] = {
    "a target without gradient": teacher,
    "a lower part without gradient": lower_part,
    "gradients on again": by_hand,
    "detached activations": stopped,
    "straight through": straight_through,
    "a detached weight": detached_weight,
    "a decorator": decorated,
}


@FORMS
@pytest.mark.parametrize("function", STOPPED.values(), ids=STOPPED)
def test_parts_without_gradients_are_exact(function: Callable[..., Tensor], form: Form) -> None:
    model = perceptron()
    check(functools.partial(function, model), model, torch.randn(5, 3), form=form)


@FORMS
def test_gradients_may_be_off_outside(form: Form) -> None:
    model, batch = perceptron(), torch.randn(5, 3)
    want = expected(loss_of(model), private(model), batch)
    with torch.no_grad():
        for _ in range(4):
            gradients = per_sample(loss_of(model), private(model), batch, form=form)
            agree(gradients, want, private(model))
            assert not torch.is_grad_enabled()
