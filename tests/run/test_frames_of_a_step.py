"""A reader who stops in the loss finds few of our frames above it."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hushgrad as hg

SOURCE = str(Path(hg.__file__).parent)


def frames_of_ours() -> list[str]:
    """The functions of the library in the stack, the innermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def test_at_most_seven_frames_stand_between_a_step_and_the_loss() -> None:
    model = nn.Linear(3, 2)
    data = (torch.randn(60, 3), torch.randint(2, (60,)))
    plan = hg.plan(records=60, batch=30, epochs=2.5, delta=1e-3, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = hg.train(model, optimizer, data, plan=plan, rng=hg.Rng.fixed(0))
    seen = deque[list[str]]()  # of a list the contents would tell one loss from another

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(frames_of_ours())
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    for batch in run:
        run.step(loss, batch)
    frames = seen[-1]  # tests of the model come before the pass itself
    assert frames[-1] == "Run.step"
    assert len(frames) <= 7, frames
