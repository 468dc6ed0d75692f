"""A run, and the model and optimizer that others may write to."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import Rng

RECORDS = 200


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(RECORDS, 2, 3, 4, generator=torch.Generator().manual_seed(5))
    return x, (x[:, 0, 0, 0] > 0).long()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(24, 5), nn.Linear(5, 2)
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x.reshape(len(x), 24)).tanh())


def loss_of(net: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none")


class Case:
    def __init__(self, **options) -> None:
        torch.manual_seed(1)
        self.net = Net()
        make = options.pop("make", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        self.optimizer = make(self.net.parameters())
        self.loss = loss_of(self.net)
        self.plan = hg.plan(records=RECORDS, batch=20, epochs=1, delta=1e-4, noise_multiplier=1.0)
        self.run = hg.train(
            self.net,
            self.optimizer,
            data(),
            plan=self.plan,
            rng=options.pop("rng", Rng.from_os()),
            **options,
        )

    def plainly(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).mean().backward()
        self.optimizer.step()


def first(case: Case) -> tuple[Tensor, Tensor]:
    return next(iter(case.run))
