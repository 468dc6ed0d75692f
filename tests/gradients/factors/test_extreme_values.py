"""Factors of extreme values: no overflow, no loss of digits, no cost that depends on the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from compare import private
from torch import Tensor, nn

from hushgrad import clipped_sum
from hushgrad.clipping.rules import automatic, normalize
from hushgrad.gradients import per_sample
from hushgrad.gradients.factors.choice import costs
from hushgrad.gradients.factors.kinds import OneHot, Outer


def moved(
    loss: Callable[[Any], Tensor], model: nn.Module, one: Any, other: Any, **options: Any
) -> float:
    """How far apart the clipped sums of two batches are, in multiples of the bound."""
    sums = [
        clipped_sum(loss, private(model), batch, modules=(model,), **options)
        for batch in (one, other)
    ]
    squares = [
        (sums[0].sum[n].double() - sums[1].sum[n].double()).square().sum() for n in sums[0].sum
    ]
    return float(torch.stack(squares).sum().sqrt()) / sums[0].l2


def test_a_batch_of_nothing_but_nan_after_certification() -> None:
    layer = nn.Linear(4, 1)
    batch = torch.randn(16, 4)

    def loss(x: Tensor) -> Tensor:
        return layer(x)[:, 0].square()

    per_sample(loss, private(layer), batch)
    found = per_sample(loss, private(layer), batch * torch.nan)
    assert not found.sq_norms()["weight"].isfinite().any()


@pytest.mark.parametrize(("t", "d"), [(384, 768), (40, 600), (5, 2000), (900, 30)])
def test_the_form_of_a_gradient_does_not_depend_on_the_batch(t: int, d: int) -> None:
    """Else all norms move by their slack when one record comes."""
    forms = set()
    for batch in (1, 8, 100, 448, 449, 5000):
        a = torch.empty(1, 1, 1).expand(batch, t, d)
        cost = costs((Outer(a, a),), (d, d))
        forms.add(min(cost, key=lambda form: cost[form][0]))
    assert len(forms) == 1


def test_a_factor_that_its_weight_would_overflow() -> None:
    layer = nn.Linear(2, 8, bias=False)
    x, scale = torch.randn(8, 2), torch.ones(8, 1)
    x[0], scale[0] = torch.tensor([2e38, 0.0]), 1e-40

    def loss(b: Sequence[Tensor]) -> Tensor:
        return (layer(b[0]) * b[1]).sum(1)

    for clip in (automatic(), normalize()):
        assert moved(loss, layer, (x, scale), (x[1:], scale[1:]), clip=clip) <= 1


def test_a_bound_so_large_that_a_weight_would_overflow() -> None:
    layer = nn.Linear(2, 1, bias=False)
    x = torch.randn(8, 2)
    x[0] *= 1e-30
    assert moved(lambda b: layer(b)[:, 0], layer, x, x[1:], clip=normalize(1e10)) <= 1


def test_padding_that_drew_infinity_is_masked() -> None:
    layer = nn.Linear(4, 1, bias=False)
    for seed in range(20):
        torch.manual_seed(seed)
        bounded = clipped_sum(
            lambda x: layer(x)[:, 0] / (torch.rand(len(x)) > 0.3).float(),
            private(layer),
            torch.randn(3, 4),
            modules=(layer,),
        )
        assert bounded.sum["weight"].isfinite().all(), seed


def test_a_frequent_word_is_added_up_without_loss() -> None:
    index, b = torch.zeros(1024, 50, dtype=torch.long), torch.rand(1024, 50, 3)
    table = OneHot(index, b, rows=7).weighted_sum(torch.ones(1024, dtype=torch.float64), rows=1)
    exact = b.double().sum((0, 1))
    torch.testing.assert_close(table[0].double(), exact, rtol=1e-7, atol=0)
    assert not table[1:].any()
