"""Which parameters may be private: every one that is trained, each once and without hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import check, private
from torch import Tensor, nn
from uses import squared, untouched

from hushgrad import Refused
from hushgrad.gradients import auto, check_optimizer, dense, loop, per_sample

FORMS = pytest.mark.parametrize("form", [auto, dense, loop], ids=["auto", "dense", "loop"])


def test_an_optimizer_with_a_tensor_neither_private_nor_frozen_is_refused() -> None:
    layer, other = nn.Linear(3, 5), nn.Parameter(torch.zeros(2, 7))
    groups = [{"params": [layer.weight]}, {"params": [layer.bias, other]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(
        Refused, match=r"tensor 1 of group 1, shape \(2, 7\).*requires_grad_\(False"
    ):
        check_optimizer(optimizer, private(layer))
    check_optimizer(optimizer, {**private(layer), "other": other})
    other.requires_grad_(False)
    check_optimizer(optimizer, private(layer))


@FORMS
def test_a_parameter_on_no_path_is_refused_unless_named_idle(form: Any) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 5), "spare": nn.Linear(2, 2, bias=False)})
    loss = squared(model["used"])
    batch = torch.randn(8, 3)
    with pytest.raises(Refused, match=r"spare\.weight is trainable but on no path.*idle"):
        per_sample(loss, private(model), batch, form=form, modules=(model,))
    found = check(loss, model, batch, form=form, idle=("spare.weight",))
    assert not found.sq_norms()["spare.weight"].any()
    ones = dict.fromkeys(private(model), torch.ones(8, dtype=torch.float64))
    assert found.weighted_sum(ones)["spare.weight"].tolist() == [[0.0, 0.0], [0.0, 0.0]]


@FORMS
@pytest.mark.parametrize("watched", [True, False], ids=["modules", "closure"])
def test_a_trained_parameter_outside_the_set_is_refused(watched: bool, form: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    modules = (model,) if watched else ()
    with pytest.raises(Refused, match="not among the private parameters; add it to params"):
        per_sample(squared(model), private(model[0]), torch.randn(8, 3), form=form, modules=modules)
    assert untouched(model), "a gradient without noise was left where an optimizer finds it"


@pytest.mark.parametrize("watched", [True, False], ids=["modules", "closure"])
def test_a_parameter_that_is_unfrozen_later_is_refused(watched: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5).requires_grad_(False))
    params, modules = private(model[0]), (model,) if watched else ()
    for _ in range(4):
        per_sample(squared(model), params, torch.randn(8, 3), modules=modules)
    model[1].requires_grad_(True)
    with pytest.raises(Refused, match="not among the private parameters"):
        per_sample(squared(model), params, torch.randn(8, 3), modules=modules)


class Special(nn.Parameter):
    """Some library's own kind of parameter."""


def _no_parameters() -> dict[str, nn.Parameter]:
    return {}


def _subclass() -> dict[str, nn.Parameter]:
    return {"w": Special(torch.zeros(3))}


def _frozen() -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.zeros(3), requires_grad=False)}


def _twice() -> dict[str, nn.Parameter]:
    w = nn.Parameter(torch.zeros(3))
    return {"w": w, "v": w}


def _hooked() -> dict[str, nn.Parameter]:
    w = nn.Parameter(torch.zeros(3))
    w.register_hook(lambda g: None)
    return {"w": w}


def _hooked_after() -> dict[str, nn.Parameter]:
    w = nn.Parameter(torch.zeros(3))
    w.register_post_accumulate_grad_hook(lambda p: None)
    return {"w": w}


@FORMS
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_no_parameters, "at least one private parameter, got none"),
        (_subclass, "parameter w is a Special, and only plain nn.Parameter.*leave it frozen"),
        (_frozen, "parameter w is frozen; leave it out"),
        (_twice, "parameters w and v are one tensor; name it once"),
        (_hooked, "parameter w has a gradient hook.*remove the hook"),
        (_hooked_after, "parameter w has a gradient hook.*remove the hook"),
    ],
)
def test_parameters_that_cannot_be_private_are_refused(
    make: Callable[[], dict[str, nn.Parameter]], message: str, form: Any
) -> None:
    params = make()

    def loss(x: Tensor) -> Tensor:
        return sum(((x * p).sum(1) for p in params.values()), x.sum(1))

    with pytest.raises(ValueError, match=message):
        per_sample(loss, params, torch.randn(8, 3), form=form)


def test_a_hook_that_comes_later_sees_no_record() -> None:
    layer, seen = nn.Linear(3, 5), []
    per_sample(squared(layer), private(layer), torch.randn(8, 3), form=loop)
    layer.weight.register_hook(lambda g: seen.append(g))
    with pytest.raises(Refused, match="parameter weight has a gradient hook"):
        per_sample(squared(layer), private(layer), torch.randn(8, 3), form=loop)
    assert seen == []


def test_a_complex_parameter_is_refused() -> None:
    weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    with pytest.raises(Refused, match=r"complex64, and only real .* torch\.complex"):
        per_sample(lambda x: (x * weight.abs()).sum(1), {"weight": weight}, torch.randn(8, 3))
