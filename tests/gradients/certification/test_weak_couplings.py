"""Attacks on certification and on compiled programs, each of which once came through."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compare import check, private
from torch import Tensor, nn

from hushgrad.gradients import Gradients, auto, compiled, per_sample, traced
from hushgrad.gradients.probes import beside_variations, variations
from hushgrad.types import Refused

MODULE = importlib.import_module("hushgrad.gradients.forms.compiled")
FORMS = (compiled, *auto)
MEETING = "depends on other records"


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).flatten(1).square().sum(1)


# --- records that meet --------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_branch_on_the_sign_of_a_sum_over_the_batch(sign: float) -> None:
    """Where all records have one sign, only a loud record of the other turns it."""
    model = mlp()

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum(1) * (2.0 if x.sum() > 0 else 1.0)

    for _ in range(4):  # the records that are tried are drawn anew
        with pytest.raises(Refused, match=MEETING):
            per_sample(loss, private(model), sign * torch.rand(16, 5), modules=(model,))


@pytest.mark.parametrize("strength", [1e-14, 0.0])
def test_a_coupling_too_weak_for_any_loud_record(strength: float) -> None:
    """A record of 1e30 would still move the others, and one that is nan would, at no strength."""
    model = mlp()

    def loss(x: Tensor) -> Tensor:
        h = model[0](x)
        return model[2](model[1](h + strength * h.mean(0).detach())).square().sum(1)

    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(model), torch.randn(16, 5), modules=(model,))


def test_a_mask_that_is_dropped_where_no_record_needs_it() -> None:
    """All records of the first batch are full; the first that is not would move all others."""
    model = mlp()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = batch
        if not bool(mask.all()):
            x = x * mask * (1 + 1e-6)
        return model(x).square().sum(1)

    batch = (torch.randn(16, 5), torch.ones(16, 5, dtype=torch.long))
    with pytest.raises(Refused, match="runs other operations beside other records"):
        per_sample(loss, private(model), batch, modules=(model,), form=traced)
    assert per_sample(loss, private(model), batch, modules=(model,)).form == "loop"


def test_mates_that_move_only_the_last_bits_leave_each_record_to_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where a record stands in a sorted batch moves its rounding, which no bound covers."""
    model = mlp().double()

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum(1) + 1e-13 * (x > 0).double().sum()

    x = torch.randn(16, 5, dtype=torch.float64)
    with pytest.raises(Refused, match=r"if only by rounding|other last bits"):
        per_sample(loss, private(model), x, modules=(model,), form=traced)
    assert check(loss, model, x, form=auto).form == "loop"
    assert "other last bits" in caplog.text


def test_varied_labels_are_labels() -> None:
    """-100 says that there is none; what lies between it and a class is neither."""
    labels = torch.tensor([[-100, 3], [7, 3], [3, -100], [7, 7]])
    for batch in (variations(labels, seed=1), beside_variations(labels)):
        assert set(batch.flatten().tolist()) <= {-100, 3, 7}


@pytest.mark.parametrize(
    "batch",
    [
        torch.randn(300, 32).T,
        torch.randn(32, 600)[:, ::2],
        torch.randn(32, 300, 6).mT,
        torch.randn(6, 32, 300).transpose(0, 1),
    ],
    ids=["columns", "every second", "rows", "sequence first"],
)
def test_a_batch_that_is_not_contiguous_is_laid_out_as_its_padded_copy(batch: Tensor) -> None:
    """Removing one record made the others' layout, and with it their bits, another."""
    model = nn.Sequential(nn.Linear(300, 64), nn.ReLU(), nn.Linear(64, 3))
    whole, fewer = (
        per_sample(loss_of(model), private(model), x, form=traced, modules=(model,))
        for x in (batch, batch[:-1])
    )
    assert torch.equal(whole.losses[:-1], fewer.losses)
    for name, square in fewer.squares.items():
        assert torch.equal(square.estimate, whole.squares[name].estimate[:-1])


# --- compiled programs --------------------------------------------------------------------------


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
    model, batch = mlp(), torch.randn(16, 5)

    def norms(form: Any) -> Gradients:
        return per_sample(loss_of(model), private(model), batch, form=form)

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
    model = mlp()
    loss, params = loss_of(model), private(model)
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
    model = mlp()
    loss, params = loss_of(model), private(model)
    sizes = [767, *range(480, 770, 32)]
    forms = {per_sample(loss, params, torch.randn(n, 5), form=FORMS).form for n in sizes}
    assert forms == {"compiled"}


def models(form: Any) -> Iterator[weakref.ref[nn.Module]]:
    for _ in range(2):
        model = mlp()
        yield weakref.ref(model)
        loss = loss_of(model)
        per_sample(loss, private(model), torch.randn(16, 5), form=form, modules=(model,))


def test_programs_keep_no_model_alive(replayed: None) -> None:
    kept = list(models(FORMS))
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
