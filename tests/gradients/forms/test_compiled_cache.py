"""Compiled programs are kept as long as they are right: hooks, interruptions, many sizes."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compare import private
from torch import nn
from uses import squared

from hushgrad.gradients import Gradients, auto, compiled, per_sample, traced
from zoo.small import mlp

MODULE = importlib.import_module("hushgrad.gradients.forms.compiled")
FORMS = (compiled, *auto)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the C++ compiler, which takes seconds."""
    monkeypatch.setattr(MODULE, "_machine_code", lambda recorded, inputs: recorded)


def forward_hook(layer: nn.Module) -> Any:
    return layer.register_forward_hook(lambda module, inputs, output: 2 * output)


def backward_hook(layer: nn.Module) -> Any:
    return layer.register_full_backward_hook(lambda module, ins, outs: (2 * ins[0],))


def hook_of_all(layer: nn.Module) -> Any:
    return nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: 2 * output if module is layer else None
    )


@pytest.mark.parametrize("hook", [forward_hook, backward_hook, hook_of_all])
def test_a_hook_that_comes_later_is_not_missed(
    hook: Callable[[nn.Module], Any], replayed: None
) -> None:
    """Also where the modules are not named; `torch.compile` by itself looks at hooks once."""
    model, batch = mlp(5, 7, 3), torch.randn(16, 5)

    def norms(form: Any) -> Gradients:
        return per_sample(squared(model), private(model), batch, form=form)

    for _ in range(2):
        assert norms(FORMS).form == "compiled"
    handle = hook(model[1])
    try:
        found, plain = norms(FORMS).squares, norms(traced).squares
    finally:
        handle.remove()
    for name, square in plain.items():
        torch.testing.assert_close(found[name].estimate, square.estimate, rtol=1e-4, atol=1e-9)


def test_a_proof_that_was_interrupted_is_made_again(
    replayed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp(5, 7, 3)
    loss, params = squared(model), private(model)
    assert per_sample(loss, params, torch.randn(32, 5), form=FORMS).form == "compiled"
    larger, asked = torch.randn(64, 5), []

    def interrupted(*_: Any) -> None:
        asked.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(MODULE.Compiled, "_prove", interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            per_sample(loss, params, larger, form=FORMS)
    assert len(asked) == 3


def test_more_sizes_than_torch_compiles_by_default(replayed: None) -> None:
    model = mlp(5, 7, 3)
    loss, params = squared(model), private(model)
    sizes = [767, *range(480, 770, 32)]
    forms = {per_sample(loss, params, torch.randn(n, 5), form=FORMS).form for n in sizes}
    assert forms == {"compiled"}


def models(form: Any) -> Iterator[weakref.ref[nn.Module]]:
    for _ in range(2):
        model = mlp(5, 7, 3)
        yield weakref.ref(model)
        loss = squared(model)
        per_sample(loss, private(model), torch.randn(16, 5), form=form, modules=(model,))


def test_programs_keep_no_model_alive(replayed: None) -> None:
    kept = list(models(FORMS))
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
