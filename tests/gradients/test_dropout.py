"""Dropout: each record draws a mask of its own, and gradients are exact for the masks drawn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compare import FORMS, agree, of_one_pass, pick, private
from torch import Tensor, nn
from uses import loss_of

from hushgrad.gradients import Form, certificate_for, per_sample, traced


class Masks(nn.Module):
    """A mask drawn by hand, beside attention that drops some of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h = h * (torch.rand_like(h) > 0.3) * torch.empty_like(h).bernoulli_(0.7)
        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.2)


DROPOUTS: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: nn.Dropout(0.4),
    "Dropout, inplace": lambda: nn.Dropout(0.4, inplace=True),
    "Dropout1d": lambda: nn.Dropout1d(0.4),
    "AlphaDropout": lambda: nn.AlphaDropout(0.4),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.4),
    "by hand": Masks,
    "RReLU": lambda: nn.RReLU(),
}


def noisy(kind: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), DROPOUTS[kind](), nn.Linear(4, 4))


@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_is_exact_for_the_masks_drawn(kind: str) -> None:
    model, batch = noisy(kind), torch.randn(5, 6, 3)
    params = private(model)
    for seed in range(4):
        want = of_one_pass(loss_of(model), params, batch, seed)
        torch.manual_seed(seed)
        agree(per_sample(loss_of(model), params, batch, form=traced), want, params)


@FORMS
def test_each_record_draws_its_own_mask(form: Form) -> None:
    model = noisy("Dropout")
    batch = torch.randn(1, 6, 3).expand(8, 6, 3)
    for _ in range(3):
        losses = per_sample(loss_of(model), private(model), batch, form=form).losses
        assert len(losses.unique()) == 8
    model.eval()
    assert len(per_sample(loss_of(model), private(model), batch, form=form).losses.unique()) == 1


@pytest.mark.parametrize("kind", DROPOUTS)
def test_a_step_draws_what_an_ordinary_pass_draws(kind: str) -> None:
    """Of the padded batch; at steps that certify, that test again and that do neither."""
    model, batch = noisy(kind), torch.randn(5, 6, 3)
    for step in range(5):
        torch.manual_seed(step)
        per_sample(loss_of(model), private(model), batch, form=traced, modules=(model,))
        after = torch.get_rng_state()
        torch.manual_seed(step)
        model(pick(batch, [0, 1, 2, 3, 4, 0, 0, 0]))
        assert torch.equal(after, torch.get_rng_state()), step


@FORMS
def test_certification_draws_nothing(form: Form) -> None:
    model, batch = noisy("Dropout"), torch.randn(5, 6, 3)
    before = torch.get_rng_state()
    certificate_for(loss_of(model), private(model), batch, form=form, modules=(model,))
    assert torch.equal(before, torch.get_rng_state())
