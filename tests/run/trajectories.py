"""The ways that optimizers go under clipping norms of different size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import hushgrad as hg
from hushgrad.clipping.groups import Grouping, whole
from hushgrad.clipping.rules import Clip, automatic, normalize
from hushgrad.rng import Label, Rng
from zoo.small import from_seed

RECORDS, BATCH, STEPS = 64, 16, 8
AUTO = {"AUTO-V": normalize, "AUTO-S": lambda clip_norm: automatic(clip_norm=clip_norm)}
POWERS = (2.0**-4, 32.0)
OTHERS = (0.1, 3.0)
Make = Callable[[nn.Module], Optimizer]


class SharedDraws(Rng):
    """Draws that depend neither on the sums nor on the plan, so that two runs can share them.

    The library draws other batches for every other plan and fresh noise for every other sum, as it
    must. The theorems are about the same batches, and one noise that is scaled.
    """

    def derive(self, *labels: Label) -> Rng:
        purpose, *rest = labels
        kept = [] if purpose == "sampling" else [x for x in rest if isinstance(x, int)]
        return SharedDraws(super().derive(purpose, *kept)._key, reproducible=True)


def shared(seed: int = 0) -> Rng:
    return SharedDraws(bytes([seed]) * 32, reproducible=True)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(RECORDS, 6, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def model(*, bias: bool = True) -> nn.Module:
    return from_seed(6, 8, 3, bias=bias).double()


# Each is certified once: a run starts by putting the first values back.
NETS = {bias: model(bias=bias) for bias in (True, False)}


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def trained(
    make: Make,
    clip: Clip,
    *,
    sigma: float = 1.0,
    groups: Grouping = whole,
    bias: bool = True,
    steps: int = STEPS,
    rates: Callable[[int], float] | None = None,
) -> Tensor:
    """The parameters after each step, less where they started."""
    net = NETS[bias].requires_grad_(True)
    net.load_state_dict(model(bias=bias).state_dict())
    plan = hg.plan(
        records=RECORDS,
        batch=BATCH,
        epochs=steps * BATCH / RECORDS,
        delta=1e-3,
        noise_multiplier=sigma,
        clip=clip,
        groups=groups,
    )
    optimizer = make(net)
    run = hg.train(net, optimizer, data(), plan=plan, rng=shared())
    start, passed = flat(net), []
    for step, batch in enumerate(run):
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates(step)
        run.step(lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none"), batch)
        passed.append(flat(net) - start)
    return torch.stack(passed)


def by(kind: type[Optimizer], **options: Any) -> Make:
    return lambda net: kind(net.parameters(), **options)


def gap(one: Tensor, other: Tensor) -> float:
    """How far apart two trajectories are, as a part of how far they went."""
    return float((one - other).norm() / other.norm())


EPS = 0.01  # of the size of a gradient, so that it matters
