"""Between the inner function of the room and the user's loss there are few frames of ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hushgrad
from hushgrad.gradients import Form, Objective, gradients_of, recomputed, traced

SOURCE = str(Path(hushgrad.__file__).parent)


def own_frames() -> list[str]:
    """The functions of the package on the stack, the outermost first."""
    found, frame = [], sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found[::-1]


@pytest.mark.parametrize("form", [traced, recomputed])
def test_at_most_three_frames_lie_between_a_step_and_the_loss(form: Form) -> None:
    layer = nn.Linear(3, 2)
    params, stacks = dict(layer.named_parameters()), list[list[str]]()

    def loss(x: Tensor) -> Tensor:
        stacks.append(own_frames())
        return layer(x).square().sum(1)

    objective = Objective(loss, params, (layer,))
    gradients_of(objective, torch.randn(8, 3), forms=(form,))  # certifies
    for step in (1, 2, 3):
        stacks.clear()
        gradients_of(objective, torch.randn(8, 3), forms=(form,))
        tested_again = len(stacks) > 1
        assert tested_again is (step in (1, 2))
        assert stacks[-1][:2] == ["gradients_of", "use_certificate"]
        assert len(stacks[-1]) <= 3, stacks[-1]
