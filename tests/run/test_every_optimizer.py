"""Every first-order optimizer of torch takes private steps; the others are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pytorch_optimizer import LARS, Lamb
from torch import nn
from torch.optim import Optimizer
from trajectories import BATCH, RECORDS, data, flat, model

import hushgrad as hg
from hushgrad.clipping.rules import abadi
from hushgrad.rng import Rng
from hushgrad.types import Refused

REFUSED = (torch.optim.LBFGS, torch.optim.SparseAdam)
ONE_GRADIENT = [
    kind
    for kind in (getattr(torch.optim, name) for name in torch.optim.__all__)
    if isinstance(kind, type) and kind not in REFUSED and kind is not Optimizer
]


def first_step(net: nn.Module, optimizer: Optimizer) -> None:
    plan = hg.plan(
        records=RECORDS, batch=BATCH, epochs=0.25, delta=1e-3, noise_multiplier=1.0, clip=abadi(1.0)
    )
    run = hg.train(net, optimizer, data(), plan=plan, rng=Rng.fixed(0))
    for batch in run:
        run.step(lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none"), batch)


@pytest.mark.parametrize("kind", [*ONE_GRADIENT, LARS, Lamb], ids=lambda k: k.__name__)
def test_every_first_order_optimizer_takes_a_private_step(kind: type[Optimizer]) -> None:
    source, net, plain = model(bias=False), model(bias=False), model(bias=False)
    first_step(source, torch.optim.SGD(source.parameters(), lr=0.0))
    first_step(net, kind(net.parameters(), lr=0.1))
    for p, q in zip(plain.parameters(), source.parameters(), strict=True):
        p.grad = q.grad.clone()
    kind(plain.parameters(), lr=0.1).step()
    assert torch.equal(flat(net), flat(plain))
    assert not torch.equal(flat(net), flat(source))
    assert flat(net).isfinite().all()


@pytest.mark.parametrize("kind", REFUSED)
def test_an_optimizer_that_wants_more_than_a_gradient_is_refused(kind: type[Optimizer]) -> None:
    net = model()
    before = flat(net)
    with pytest.raises(Refused, match=f"one dense gradient for each step, got {kind.__name__}"):
        first_step(net, kind(net.parameters()))
    assert torch.equal(flat(net), before)
