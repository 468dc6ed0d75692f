"""Sequences in front of the records, and as long as the batch."""

from __future__ import annotations

import pytest
import torch
from compare import check
from torch import Tensor, nn
from uses import squared

from hushgrad.gradients import Form, dense, loop, traced


class SequenceFirst(nn.Module):
    """Time comes first inside; a recurrent step, a bare parameter and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.shift = nn.Parameter(torch.randn(4))
        self.recurrent = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.inner(x.transpose(0, 1))) + self.shift
        state = torch.zeros_like(h[0])
        for step in h:
            state = torch.tanh(step + self.recurrent(state))
        return state + h.flatten(0, 1).unflatten(0, h.shape[:2]).mean(0)


@pytest.mark.parametrize("length", [3, 8, 16])
@pytest.mark.parametrize("form", [traced, dense, loop], ids=str)
def test_a_sequence_as_long_as_the_batch_is_exact(form: Form, length: int) -> None:
    model = SequenceFirst()
    for size in (5, 3, 8, 16):
        check(squared(model), model, torch.randn(size, length, 3), form=form)
