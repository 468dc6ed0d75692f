"""Activation checkpointing, of both kinds, changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compare import agree, expected, of_one_pass, private
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from uses import loss_of

from hushgrad.gradients import certificate_for, per_sample, traced

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


class Checkpointed(nn.Module):
    """Blocks that are run again, around a parameter that is used inside them and outside."""

    def __init__(self, reentrant: bool, *, on: bool = True, nested: bool = False) -> None:
        super().__init__()
        self.reentrant, self.on, self.nested = reentrant, on, nested
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.shared = nn.Parameter(torch.randn(4, 4))
        self.first, self.dropout = nn.Linear(3, 4), nn.Dropout(0.0)

    def run(self, function: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        return checkpoint(function, h, use_reentrant=self.reentrant) if self.on else function(h)

    def block(self, h: Tensor) -> Tensor:
        h = self.norm(F.linear(self.inner(h).relu_(), self.shared))
        return self.dropout(h) * (1 + self.shared[0])

    def outer(self, h: Tensor) -> Tensor:
        return self.run(self.block, self.inner(h).tanh()) @ self.shared.T

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.run(self.outer if self.nested else self.block, h) @ self.shared
        return self.run(self.block, h) + h


# Of its older kind, checkpointing inside checkpointing warns without us too.
warns = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


@pytest.mark.parametrize(
    ("reentrant", "nested"),
    [(True, False), (False, False), pytest.param(True, True, marks=warns), (False, True)],
)
def test_checkpointing_changes_nothing(reentrant: bool, nested: bool) -> None:
    model = Checkpointed(reentrant, on=False, nested=nested)
    batch, params = torch.randn(5, 3), private(model)
    want = expected(loss_of(model), params, batch)
    model.on = True
    for _ in range(4):
        agree(per_sample(loss_of(model), params, batch, form=traced), want, params)


@REENTRANT
def test_checkpointed_dropout_draws_its_mask_again(reentrant: bool) -> None:
    model = Checkpointed(reentrant, on=False)
    model.dropout.p = 0.4
    batch, params = torch.randn(5, 3), private(model)
    for seed in range(3):
        model.on = False
        want = of_one_pass(loss_of(model), params, batch, seed)
        model.on = True
        torch.manual_seed(seed)
        agree(per_sample(loss_of(model), params, batch, form=traced), want, params)


@REENTRANT
def test_a_checkpointed_block_that_is_frozen_is_exact(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    for p in (*model.inner.parameters(), *model.norm.parameters(), model.shared):
        p.requires_grad_(False)
    batch, params = torch.randn(5, 3), private(model)
    model.on = False
    want = expected(loss_of(model), params, batch)
    model.on = True
    agree(per_sample(loss_of(model), params, batch, form=traced), want, params)
    sites = certificate_for(loss_of(model), params, batch, form=traced).sites
    assert [site.parameters for site in sites] == [("first.bias", "first.weight")]
