"""A batch that is not contiguous is computed as its padded copy is."""

from __future__ import annotations

import pytest
import torch
from compare import private
from torch import Tensor, nn
from uses import squared

from hushgrad.gradients import per_sample, traced


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
        per_sample(squared(model), private(model), x, form=traced, modules=(model,))
        for x in (batch, batch[:-1])
    )
    assert torch.equal(whole.losses[:-1], fewer.losses)
    for name, square in fewer.squares.items():
        assert torch.equal(square.estimate, whole.squares[name].estimate[:-1])
