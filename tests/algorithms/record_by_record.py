"""Runs that are watched, and the papers' formulas written out record by record."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import Rng
from hushgrad.algorithms import Algorithm
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.noise import Noise, release
from hushgrad.run import step
from hushgrad.run.execution import Execution
from hushgrad.run.plan import Plan
from hushgrad.run.query import BatchPass
from hushgrad.types import Bounded, Released
from zoo.small import from_seed

RECORDS, FEATURES = 60, 5
Gradient = dict[str, Tensor]


def data(records: int = RECORDS, seed: int = 5) -> tuple[Tensor, Tensor]:
    x = torch.randn(records, FEATURES, generator=torch.Generator().manual_seed(seed)).double()
    return x, (x[:, 0] - 0.5 * x[:, 1] > 0).long()


def model(dropout: float = 0.0) -> nn.Module:
    return from_seed(FEATURES, 4, 2, dropout=dropout).double()


def loss_of(net: nn.Module) -> Any:
    return lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none")


def plan_of(algorithm: Algorithm, **changes: Any) -> Plan:
    options: dict[str, Any] = {
        "records": RECORDS,
        "batch": 12,
        "epochs": 1.6,  # 8 steps
        "delta": 1e-4,
        "noise_multiplier": 0.7,
        "clip": hg.abadi(0.8),
        "algorithm": algorithm,
    }
    return hg.plan(**(options | changes))


@dataclass
class Watched:
    """A finished run: what was drawn, summed and released at each step, and each point."""

    run: hg.Run
    net: nn.Module
    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    sums: list[Bounded] = field(default_factory=list)
    noises: list[Noise] = field(default_factory=list)
    released: list[Gradient] = field(default_factory=list)
    points: list[Gradient] = field(default_factory=list)

    def noise(self, step: int) -> Gradient:
        """What was added to the sum of a step."""
        sums = self.sums[step].sum
        return {name: self.released[step][name] - x for name, x in sums.items()}


def watched(
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    *,
    lr: float = 0.5,
    dropout: float = 0.0,
    penalty: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> Watched:
    net = model(dropout)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    records = options.pop("records", data())
    run = hg.train(net, optimizer, records, plan=plan, rng=Rng.fixed(seed), **options)
    seen = Watched(run, net)

    inner = step.release  # another spy may be there

    def spy(bounded: Bounded, noise: Noise, *, rng: Rng, step: int, **past: Any) -> Released:
        released = inner(bounded, noise, rng=rng, step=step, **past)
        if not dict(net.named_parameters()).keys() <= bounded.sum.keys():
            return released  # scores or reports
        seen.sums.append(bounded)
        seen.noises.append(noise)
        seen.released.append({n: x.clone() for n, x in released.values.items()})
        return released

    def decay() -> Tensor:
        return penalty * sum(p.square().sum() for p in net.parameters())

    with monkeypatch.context() as patch:
        patch.setattr("hushgrad.run.step.release", spy)
        seen.points.append(point_of(net))
        for batch in run:
            seen.batches.append(batch)
            run.step(loss_of(net), batch, penalty=decay if penalty else None)
            seen.points.append(point_of(net))
    return seen


def batch_pass(
    net: nn.Module, loss: Any, batch: Any, execution: Execution | None = None, **options: Any
) -> BatchPass:
    run = execution or Execution()
    params = dict(net.named_parameters())
    return BatchPass(run.objective(loss, params, (net,)), batch, execution=run, **options)


def point_of(net: nn.Module) -> Gradient:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def gradients_at(point: Gradient, batch: tuple[Tensor, Tensor]) -> list[Gradient]:
    """One gradient for each record, one record at a time."""
    net = model()
    net.load_state_dict(point)
    found = []
    for k in range(len(batch[1])):
        one = (batch[0][k : k + 1], batch[1][k : k + 1])
        grads = torch.autograd.grad(loss_of(net)(one).sum(), list(net.parameters()))
        found.append({n: g for (n, _), g in zip(net.named_parameters(), grads, strict=True)})
    return found


def size(gradient: Gradient) -> float:
    return math.sqrt(sum(float(x.square().sum()) for x in gradient.values()))


def clipped(gradient: Gradient, clip_norm: float) -> Gradient:
    scale = min(1.0, clip_norm / max(size(gradient), 1e-300))
    return {name: scale * x for name, x in gradient.items()}


def combine(*terms: tuple[float, Gradient]) -> Gradient:
    return {n: sum(c * g[n] for c, g in terms) for n in terms[0][1]}  # type: ignore[misc]


def total(gradients: list[Gradient], like: Gradient) -> Gradient:
    zero = {name: torch.zeros_like(x) for name, x in like.items()}
    return combine((1.0, zero), *((1.0, g) for g in gradients))


def assert_close(one: Gradient, other: Gradient, within: float = 1e-9) -> None:
    apart = size({name: one[name] - other[name] for name in one})
    assert apart <= within * (1 + size(one)), apart


def bound(expected: float) -> Any:
    return pytest.approx(expected * (1 + SUM_SLACK), rel=1e-12)


class Spy:
    """Notes each release of an algorithm's own."""

    def __init__(self, monkeypatch) -> None:
        self.bounded: list[Bounded] = []
        self.noises: list[Noise] = []
        self.values: list[dict[str, Tensor]] = []
        monkeypatch.setattr("hushgrad.run.step.release", self)

    def __call__(self, bounded: Bounded, noise: Noise, *, rng: Rng, step: int, **past):
        found = release(bounded, noise, rng=rng, step=step, **past)
        self.bounded.append(bounded)
        self.noises.append(noise)
        self.values.append({n: x.clone() for n, x in found.values.items()})
        return found
