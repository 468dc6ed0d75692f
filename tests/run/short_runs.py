"""Runs of eight steps with any optimizer, number type and clipping rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import Execution, Rng
from hushgrad.clipping.rules import Clip
from hushgrad.run.metrics import Metrics
from zoo.small import from_seed

RECORDS, BATCH, STEPS = 64, 16, 8


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(RECORDS, 6, generator=torch.Generator().manual_seed(5))
    return x.to(dtype), (x[:, 0] > 0).long()


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return from_seed(6, 8, 2).to(dtype)


def loss_of(net: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none")


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def started(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    sigma: float = 1.0,
    clip: Clip | None = None,
    metrics: Metrics | None = None,
    execution: Execution | None = None,
) -> hg.Run:
    plan = hg.plan(
        records=RECORDS,
        batch=BATCH,
        epochs=STEPS * BATCH / RECORDS,
        delta=1e-3,
        noise_multiplier=sigma,
        clip=clip,
        metrics=metrics,
    )
    return hg.train(
        net,
        optimizer,
        data(next(net.parameters()).dtype),
        plan=plan,
        rng=Rng.fixed(0),
        execution=execution or Execution(),
    )
