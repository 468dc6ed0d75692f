"""Every clipping rule costs what Abadi's does: its noise is σ times its own bound."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn
from trajectories import BATCH, RECORDS

import hushgrad as hg
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.clipping.groups import Grouping, per_layer, whole
from hushgrad.clipping.rules import Clip, abadi, automatic, discard, normalize, reparameterized
from hushgrad.rng import Rng

RULES = [
    (abadi(0.25), 0.25),
    (automatic(clip_norm=0.25), 0.25),
    (automatic(clip_norm=4.0), 4.0),
    (normalize(0.25), 0.25),
    (normalize(4.0), 4.0),
    (discard(4.0), 4.0),
    (reparameterized(0.25), 1.0),
    (reparameterized(4.0), 1.0),
]


@pytest.mark.parametrize(("clip", "bound"), RULES, ids=str)
def test_every_rule_costs_what_abadis_costs(clip: Clip, bound: float) -> None:
    options = {"records": 1000, "batch": 50, "epochs": 3, "delta": 1e-5, "noise_multiplier": 0.8}
    options["accountant"] = hg.accounting.RDP
    own, abadis = hg.plan(**options, clip=clip), hg.plan(**options, clip=abadi(1.0))
    assert own.event(own.steps) == abadis.event(abadis.steps)
    assert own.epsilon == abadis.epsilon < math.inf


@pytest.mark.parametrize("groups", [whole, per_layer], ids=lambda g: g.__name__)
@pytest.mark.parametrize(("clip", "bound"), RULES, ids=str)
def test_the_noise_is_sigma_times_the_rules_own_bound(
    clip: Clip, bound: float, groups: Grouping
) -> None:
    """Records without a gradient: what is released is the noise, in every group of parameters."""
    sigma = 1.5
    net = nn.Sequential(nn.Linear(4, 500, bias=False), nn.Linear(500, 6, bias=False)).double()
    plan = hg.plan(
        records=RECORDS,
        batch=BATCH,
        epochs=0.25,
        delta=1e-3,
        noise_multiplier=sigma,
        clip=clip,
        groups=groups,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    nothing = (torch.zeros(RECORDS, 4, dtype=torch.float64),)
    run = hg.train(net, optimizer, nothing, plan=plan, rng=Rng.fixed(2))
    for batch in run:
        run.step(lambda b: net(b[0]).square().sum(1), batch)
    scale = sigma * bound * (1 + SUM_SLACK) / BATCH
    for p in net.parameters():
        drawn = p.grad.flatten().numpy()
        assert stats.kstest(drawn, stats.norm(scale=scale).cdf).pvalue > 1e-3
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(drawn, stats.norm(scale=wrong * scale).cdf).pvalue < 1e-6


@pytest.mark.parametrize(("clip", "bound"), RULES, ids=str)
def test_no_record_exceeds_the_bound_that_the_noise_is_scaled_by(clip: Clip, bound: float) -> None:
    """And the bound is reached: noise that is scaled by it is not larger than it must be."""
    net = nn.Linear(6, 1, bias=False).double()
    params = dict(net.named_parameters())
    sizes = []
    for length in (1e-3, 0.1, 0.2499, 0.5, 2.0, 3.999, 30.0, 1e6):
        record = torch.full((1, 6), length / math.sqrt(6), dtype=torch.float64)
        total = hg.clipped_sum(lambda b: net(b[0])[:, 0], params, (record,), clip=clip)
        assert total.l2 == pytest.approx(bound * (1 + SUM_SLACK), rel=1e-12)
        sizes.append(float(total.sum["weight"].norm()))
    assert 0.999 * bound < max(sizes) <= bound * (1 + 1e-9)
