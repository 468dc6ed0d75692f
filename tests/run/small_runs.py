"""Small private runs: two classes, a perceptron, a plan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import Rng
from hushgrad.run.plan import Plan
from zoo.small import from_seed

RECORDS = 400


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(RECORDS, 6, generator=torch.Generator().manual_seed(5))
    return x, (x[:, 0] + 0.3 * x[:, 1] > 0).long()


def model() -> nn.Module:
    return from_seed(6, 8, 2)


def loss_of(net: nn.Module):
    return lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none")


def small_plan(**changes) -> Plan:
    options = {"records": RECORDS, "batch": 40, "epochs": 1, "delta": 1e-4, "noise_multiplier": 1.0}
    return hg.plan(**(options | changes))


def started(net: nn.Module, plan: Plan, seed: int = 0, lr: float = 0.1) -> hg.Run:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    return hg.train(net, optimizer, data(), plan=plan, rng=Rng.fixed(seed))
