"""Optimizers that see the clipping norm after all, and by how much: LARS, LAMB, RAdam, Adadelta."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch_optimizer import LARS, Lamb
from torch import nn
from torch.optim import Optimizer
from trajectories import EPS, POWERS, Make, by, gap, trained

from hushgrad.clipping.rules import automatic

LR, DECAY = 0.1, 0.05


def lars(*, decay: float, vectors: float = 0.05) -> Make:
    def make(net: nn.Module) -> Optimizer:
        matrices = [p for p in net.parameters() if p.ndim > 1]
        rest = [p for p in net.parameters() if p.ndim == 1]
        groups = [{"params": matrices}, *([{"params": rest, "lr": vectors}] if rest else [])]
        return LARS(groups, lr=0.05, weight_decay=decay, trust_coefficient=1.0)

    return make


@pytest.mark.parametrize("R", POWERS)
def test_lars_does_not_see_the_clipping_norm_in_matrices(R: float) -> None:
    moved = trained(lars(decay=DECAY), automatic(clip_norm=R), bias=False)
    assert torch.equal(moved, trained(lars(decay=DECAY / R), automatic(), bias=False))
    assert gap(moved, trained(lars(decay=DECAY), automatic(), bias=False)) > 1e-3


def test_lars_sees_it_in_vectors_which_it_does_not_scale() -> None:
    """Biases take ordinary steps, so theirs is Theorem 1: the learning rate goes to lr·R."""
    R = 4.0
    moved = trained(lars(decay=DECAY), automatic(clip_norm=R))
    assert gap(moved, trained(lars(decay=DECAY / R), automatic())) > 0.1
    assert torch.equal(moved, trained(lars(decay=DECAY / R, vectors=0.05 * R), automatic()))


@pytest.mark.parametrize("R", POWERS)
def test_lamb_does_not_see_the_clipping_norm(R: float) -> None:
    """Its decay is decoupled and stays. The eps of its trust ratio does not scale, so it is 0."""
    options = {"lr": 0.02, "eps": 0.0}
    moved = trained(by(Lamb, **options, weight_decay=DECAY), automatic(clip_norm=R))
    assert torch.equal(moved, trained(by(Lamb, **options, weight_decay=DECAY), automatic()))
    forgot = trained(by(Lamb, **options, weight_decay=DECAY / R), automatic())
    assert gap(moved, forgot) > 1e-3


def test_lambs_epsilon_is_off_by_the_trust_ratios_part_of_it() -> None:
    """`|w|/(|u| + eps)`: the update u has no scale of R, so eps/R there is another step."""
    R, eps = 2.0**-4, 0.05
    moves, norms = [], []
    for clip, own in ((automatic(clip_norm=R), eps), (automatic(), eps / R)):
        kept: list[Optimizer] = []

        def make(net: nn.Module, own: float = own, kept: list[Optimizer] = kept) -> Optimizer:
            for p in net.parameters():
                p.requires_grad_(p is net[0].weight)
            kept.append(Lamb([net[0].weight], lr=0.02, eps=own))
            return kept[0]

        moves.append(trained(make, clip, steps=1)[0])
        (state,) = kept[0].state.values()
        norms.append(state["adam_norm"])
    assert torch.equal(norms[0], norms[1])
    assert gap(moves[0], moves[1]) > 0.05
    expected = moves[1] * (norms[0] + eps / R) / (norms[0] + eps)
    torch.testing.assert_close(moves[0], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("R", [2.0**-4, 8.0])
def test_radam_sees_the_clipping_norm_in_its_first_five_steps(R: float) -> None:
    """While ρ_t ≤ 5 it takes lr·m undivided: those steps are R times as long, and no others."""
    lr, steps = 0.02, 12
    moved = trained(
        by(torch.optim.RAdam, lr=lr, eps=EPS, weight_decay=DECAY),
        automatic(clip_norm=R),
        steps=steps,
    )
    as_one = by(torch.optim.RAdam, lr=lr, eps=EPS / R, weight_decay=DECAY / R)
    plain = trained(as_one, automatic(), steps=steps)
    torch.testing.assert_close(moved[0], R * plain[0], rtol=1e-9, atol=0)
    assert gap(moved, plain) > 0.01
    mended = trained(
        as_one, automatic(), steps=steps, rates=lambda step: lr * R if step < 5 else lr
    )
    assert torch.equal(moved, mended)
    for last in (4, 6):
        other = trained(
            as_one,
            automatic(),
            steps=steps,
            rates=lambda step, last=last: lr * R if step < last else lr,
        )
        assert gap(moved, other) > 1e-3


@pytest.mark.parametrize("R", [2.0**-4, 8.0])
def test_adadelta_sees_the_clipping_norm_by_its_two_epsilons(R: float) -> None:
    """`g·√(d + eps)/√(v + eps)`: v scales by R², d does not, and there is one eps for both."""
    eps = 1e-4
    moved = trained(by(torch.optim.Adadelta, eps=eps), automatic(clip_norm=R))
    for power in (0, 1, 2):
        as_one = trained(by(torch.optim.Adadelta, eps=eps / R**power), automatic())
        assert gap(moved, as_one) > 0.01
    # With eps/R² the root below is right, and the one above is short by R at the first step.
    torch.testing.assert_close(moved[0], R * as_one[0], rtol=1e-9, atol=0)


def test_adadelta_does_not_see_it_once_both_epsilons_are_there() -> None:
    """The same optimizer with an eps of its own under each root takes the same way at every R."""

    class TwoEpsilons(Optimizer):
        def __init__(self, params: Any, *, above: float, below: float) -> None:
            super().__init__(params, {"above": above, "below": below})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    v, d = state.get("v", torch.zeros_like(p)), state.get("d", torch.zeros_like(p))
                    state["v"] = v = 0.9 * v + 0.1 * p.grad.square()
                    update = p.grad * (d + group["above"]).sqrt() / (v + group["below"]).sqrt()
                    state["d"] = 0.9 * d + 0.1 * update.square()
                    p -= update

    eps, R = 1e-4, 8.0
    plain = trained(by(torch.optim.Adadelta, eps=eps), automatic(clip_norm=R))
    ours = trained(by(TwoEpsilons, above=eps, below=eps), automatic(clip_norm=R))
    assert gap(ours, plain) < 1e-9
    assert torch.equal(ours, trained(by(TwoEpsilons, above=eps, below=eps / R**2), automatic()))
