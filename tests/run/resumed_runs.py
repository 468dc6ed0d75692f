"""A script that is started again: all that it would make anew."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from small_runs import data
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import Rng

STEPS = 10


class Trainer:
    """Everything that a script would make anew when it is started again."""

    def __init__(self, folder: Path, plan: hg.Plan, rng: Rng, *, records=None, **options) -> None:
        torch.manual_seed(1)
        self.factor = 1.0  # of the loss: another one gives other sums
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.run = hg.train(
            self.net,
            self.optimizer,
            records or data(),
            plan=plan,
            rng=rng,
            folder=folder,
            keep={"schedule": self.schedule},
            **options,
        )

    def go(self, *, until: int = STEPS, save_at: int | None = None) -> Trainer:
        for batch in self.run:
            self.run.step(self.loss, batch)
            self.schedule.step()
            if self.run.steps_taken == save_at:
                self.run.save()
            if self.run.steps_taken == until < STEPS:
                break
        return self

    def loss(self, b: tuple[Tensor, Tensor]) -> Tensor:
        return self.factor * F.cross_entropy(self.net(b[0]), b[1], reduction="none")

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])
