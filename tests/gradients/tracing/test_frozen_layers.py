"""Frozen layers: they cost nothing, and what is trained around them stays exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import check, private
from torch import Tensor, nn
from uses import loss_of

from hushgrad.gradients import certificate_for, per_sample, traced


def test_a_frozen_layer_below_costs_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4))
    model[:2].requires_grad_(False)
    needed = []
    model[2].register_forward_hook(lambda m, args, y: needed.append(y.requires_grad))
    batch, params = torch.randn(5, 3), private(model)
    sites = certificate_for(loss_of(model), params, batch, form=traced, modules=(model,)).sites
    assert [(s.operation, s.parameters) for s in sites] == [("linear", ("3.bias", "3.weight"))]
    gradients = check(loss_of(model), model, batch)
    assert not any(needed)
    held = gradients.held()
    assert sum(x.numel() for x in held) == len(held[0]) * (6 + 4 + 4)


def test_a_frozen_layer_in_between_passes_gradients_only() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4))
    model[1:3].requires_grad_(False)
    batch = torch.randn(5, 3)
    sites = certificate_for(loss_of(model), private(model), batch, form=traced).sites
    assert [s.parameters for s in sites] == [("0.bias", "0.weight"), ("3.bias", "3.weight")]
    check(loss_of(model), model, batch)


@pytest.mark.parametrize(
    ("layer", "shape", "kept"),
    [
        (nn.Linear(3, 4), (7, 3), 4),
        (nn.Conv1d(3, 4, 2), (3, 7), 4),
        (nn.LayerNorm(3), (7, 3), 3),
    ],
    ids=["linear", "convolution", "layer norm"],
)
def test_a_bias_alone_keeps_no_activations(
    layer: nn.Module, shape: tuple[int, ...], kept: int
) -> None:
    layer.weight.requires_grad_(False)
    gradients = check(loss_of(layer), layer, torch.randn(8, *shape))
    assert sum(x.numel() for x in gradients.held()) == 8 * kept


def test_nothing_of_a_frozen_layer_is_kept_for_the_backward_pass() -> None:
    """Ordinary autograd does not keep it, and neither may a pass that is watched."""
    # Of these widths, no rows are added to eight records.
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    model[0].requires_grad_(False)
    batch, params = torch.randn(8, 16), private(model)

    def kept(run: Callable[[], Any]) -> int:
        sizes = []
        own = {p.data_ptr() for p in model.parameters()}

        def note(x: Tensor) -> Tensor:
            sizes.append(0 if x.data_ptr() in own else x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            run()
        return sum(sizes)

    def step() -> None:
        per_sample(loss_of(model), params, batch, form=traced)

    for _ in range(3):
        step()
    assert 0 < kept(step) <= kept(lambda: loss_of(model)(batch).sum().backward())
