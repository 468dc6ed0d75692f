"""An operation of one's own is taught by a rule, and a wrong rule is refused."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import check, kinds
from torch import Tensor, nn

from hushgrad.gradients import Call, Dense, Outer, auto, loop, operation, per_sample, rule, traced
from hushgrad.gradients.tracing.rules import registry
from hushgrad.testing import check_per_sample
from hushgrad.types import Refused


class _Kernel(torch.autograd.Function):
    """Twice a product by a matrix: torch.func cannot take its derivative record by record."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight.mT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * gradients[0] @ weight, 2 * gradients[0].mT @ x


@operation
def twice_linear(x: Tensor, weight: Tensor) -> Tensor:
    return _Kernel.apply(x, weight)


@torch.library.custom_op("hushgrad_tests::shifted", mutates_args=())
def shifted(x: Tensor, p: Tensor) -> Tensor:
    return x + p


shifted.register_autograd(lambda ctx, gradient: (gradient, gradient.sum(0)))


@pytest.fixture(autouse=True)
def no_rules_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "OWN", {})


def teach(scale: float = 2.0) -> None:
    @rule(twice_linear)
    def _(call: Call, x: Tensor, weight: Tensor) -> Any:
        where = call.layout(x)

        def factors(gradient: Tensor, x: Tensor) -> Any:
            a, b = where.rows(x, call.batch), call.out.rows(gradient, call.batch)
            yield weight, Outer(a, scale * b)

        return (x,), factors


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return twice_linear(torch.tanh(self.first(x)), self.second)


def loss_of(model: nn.Module) -> Any:
    return lambda x: model(x).square().sum(1)


def test_an_operation_with_a_rule_is_traced() -> None:
    teach()
    model = TwoLayers()
    gradients = check(loss_of(model), model, torch.randn(9, 4))
    assert kinds(gradients)["second"] == "Outer"
    check_per_sample(loss_of(model), dict(model.named_parameters()), torch.randn(9, 4), form=traced)


@pytest.mark.parametrize("wrong", [1.0, 2.02, -2.0, 0.0])
def test_a_wrong_rule_is_refused(wrong: float) -> None:
    teach(wrong)
    model = TwoLayers()
    with pytest.raises(Refused, match="the gradient of second differs from its one-record run"):
        check(loss_of(model), model, torch.randn(9, 4))
    check(loss_of(model), model, torch.randn(9, 4), form=(traced, loop))  # and another form serves


def test_a_rule_that_leaves_a_use_out_is_refused() -> None:
    @rule(twice_linear)
    def _(call: Call, x: Tensor, weight: Tensor) -> Any:
        return (), lambda gradient: ()

    model = TwoLayers()
    with pytest.raises(Refused, match="second"):
        check(loss_of(model), model, torch.randn(9, 4))


def test_a_rule_that_mixes_records_is_refused() -> None:
    @rule(twice_linear)
    def _(call: Call, x: Tensor, weight: Tensor) -> Any:
        where = call.layout(x)

        def factors(gradient: Tensor, x: Tensor) -> Any:
            each = where.rows(x, call.batch)
            mixed = each + 1e-9 * each.sum(0)
            yield weight, Outer(mixed, 2 * call.out.rows(gradient, call.batch))

        return (x,), factors

    model = TwoLayers()
    with pytest.raises(Refused, match="other records"):
        check(loss_of(model), model, torch.randn(9, 4))


def test_a_rule_for_the_wrong_tensor_is_named() -> None:
    @rule(twice_linear)
    def _(call: Call, x: Tensor, weight: Tensor) -> Any:
        return (), lambda gradient: [(torch.zeros(2, 3), Dense(torch.zeros(call.batch, 2, 3)))]

    model = TwoLayers()
    with pytest.raises(Refused, match="a tensor that is no private parameter"):
        check(loss_of(model), model, torch.randn(9, 4))


def test_a_model_is_certified_anew_after_a_rule_was_added() -> None:
    teach()
    model, batch = TwoLayers(), torch.randn(9, 4)
    for _ in range(4):
        per_sample(loss_of(model), dict(model.named_parameters()), batch, form=traced)
    teach(2.5)
    with pytest.raises(Refused, match="differs"):
        per_sample(loss_of(model), dict(model.named_parameters()), batch, form=traced)


def test_without_a_rule_the_error_names_the_remedy() -> None:
    model = TwoLayers()
    with pytest.raises(Refused, match=r"give it a rule \(hushgrad.gradients.rule\)"):
        check(loss_of(model), model, torch.randn(9, 4))
    bare = nn.Parameter(torch.randn(2, 4))
    with pytest.raises(Refused, match=r"wrap it as hushgrad.gradients.operation with a rule"):
        check(lambda x: _Kernel.apply(x, bare).square().sum(1), {"w": bare}, torch.randn(9, 4))


def test_it_still_runs_in_other_forms_and_where_nothing_is_private() -> None:
    model = TwoLayers()
    check(loss_of(model), model, torch.randn(9, 4), form=loop)
    model.second.requires_grad_(False)
    check(loss_of(model), model, torch.randn(9, 4), form=auto)


def test_a_kernel_of_torch_library_has_a_rule() -> None:
    @rule(shifted)
    def _(call: Call, x: Tensor, p: Tensor) -> Any:
        def factors(gradient: Tensor) -> Any:
            yield p, Dense(call.out.rows(gradient, call.batch).sum(1))

        return (), factors

    p = nn.Parameter(torch.randn(3))
    for spelling in (shifted, torch.ops.hushgrad_tests.shifted):
        check(lambda x, f=spelling: f(x, p).square().sum(1), {"p": p}, torch.randn(9, 3))


def test_a_users_rule_comes_before_the_librarys() -> None:
    seen = []

    @rule(torch.mul)
    def _(call: Call, x: Tensor, p: Tensor) -> Any:
        seen.append(call)

    p = nn.Parameter(torch.randn(3))
    check(lambda x: torch.mul(x, p).square().sum(1), {"p": p}, torch.randn(9, 3))
    assert seen  # it did not cover the case: the derivative served


@pytest.mark.parametrize("draw", [lambda: torch.randn(3).exp() / 2, np.random.rand, random.random])
def test_an_operation_that_draws_is_refused(draw: Any) -> None:
    """At certification draws are their medians, so a rule that overlooks them would look right."""

    @operation
    def noisy(x: Tensor, p: Tensor) -> Tensor:
        return x + p * 2 * draw()

    @rule(noisy)
    def _(call: Call, x: Tensor, p: Tensor) -> Any:
        def factors(gradient: Tensor) -> Any:
            yield p, Dense(call.out.rows(gradient, call.batch).sum(1))

        return (), factors

    p = nn.Parameter(torch.randn(3))
    with pytest.raises(Refused, match="draws random numbers"):
        per_sample(lambda x: noisy(x, p).square().sum(1), {"p": p}, torch.randn(9, 3), form=traced)


def test_the_program_on_the_page_runs() -> None:
    page = Path(__file__).parents[3] / "docs" / "per-sample-gradients.md"
    programs = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    (program,) = [found for found in programs if "gradients.rule" in found]
    exec(compile(program, str(page), "exec"), {"__name__": "__main__"})
    assert registry.own_rules()


def test_only_what_can_be_intercepted_takes_a_rule() -> None:
    for given in (_Kernel.apply, lambda x, p: x + p):
        with pytest.raises(ValueError, match="define it with @hushgrad"):
            rule(given)
    with pytest.raises(ValueError, match="runs as simpler ones"):
        rule(torch.nn.functional.embedding_bag)
