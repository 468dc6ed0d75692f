"""DP-FedAvg: a client is clipped as a record is."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from record_by_record import (
    FEATURES,
    RECORDS,
    assert_close,
    batch_pass,
    bound,
    combine,
    data,
    gradients_at,
    loss_of,
    model,
    plan_of,
    point_of,
    size,
    total,
    watched,
)
from torch import Tensor

import hushgrad as hg
from hushgrad import Refused, Rng
from hushgrad.algorithms import FedAvg, Sgd
from hushgrad.run.metrics import Metrics
from hushgrad.run.query import ClippedSum, Summand
from hushgrad.sampling import FullBatch

FULL = {"sampling": FullBatch(), "batch": RECORDS, "epochs": 4}


def clients() -> tuple[Tensor, Tensor]:
    x, y = data(RECORDS * 3)
    return x.reshape(RECORDS, 3, FEATURES), y.reshape(RECORDS, 3)


@pytest.mark.parametrize("rule", [hg.abadi, hg.normalize])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_a_client_is_clipped_as_a_record_is(monkeypatch, rule, local_steps: int) -> None:
    plan = plan_of(FedAvg(0.4, local_steps), clip=rule(0.1))
    seen = watched(plan, monkeypatch, lr=1.0, records=clients())
    for t, batch in enumerate(seen.batches[:3]):
        each = []
        for k in range(len(batch[1])):
            theta = seen.points[t]
            for _ in range(local_steps):
                grads = gradients_at(theta, (batch[0][k], batch[1][k]))
                theta = combine((1.0, theta), (-0.4 / 3, total(grads, theta)))
            update = combine((1.0, seen.points[t]), (-1.0, theta))
            length = size(update)
            keep = 0.1 / length if rule is hg.normalize else min(1.0, 0.1 / length)
            each.append({n: keep * x for n, x in update.items()})
        assert_close(seen.sums[t].sum, total(each, seen.points[0]), 1e-6)
        assert seen.sums[t].l2 == bound(0.1)
        mean = {n: x / 12 for n, x in seen.released[t].items()}
        assert_close(seen.points[t + 1], combine((1.0, seen.points[t]), (-1.0, mean)), 1e-9)
    assert plan.event(8) == plan_of(Sgd()).event(8)


def test_one_local_step_is_dp_sgd_on_clients_means(monkeypatch) -> None:
    """With one local step an update is the rate times the gradient of the client's mean loss."""
    plan = plan_of(FedAvg(1.0), noise_multiplier=0.0, clip=hg.abadi(1e6), batch=RECORDS, epochs=1)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    run = hg.train(net, optimizer, clients(), plan=plan, rng=Rng.fixed(0))
    for batch in run:
        run.step(loss_of(net), batch)
    other = model()
    x, y = clients()
    F.cross_entropy(other(x.flatten(0, 1)), y.flatten()).backward()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert q.grad is not None
        assert torch.allclose(p, q - q.grad, atol=1e-7)


def test_a_client_that_is_not_finite_is_left_out(monkeypatch) -> None:
    x, y = clients()
    x[0] = math.nan
    plan = plan_of(FedAvg(0.4), **FULL)
    seen = watched(plan, monkeypatch, records=(x, y))
    without = watched(plan, monkeypatch, records=(x[1:], y[1:]))
    assert_close(seen.sums[0].sum, without.sums[0].sum, 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_client_keeps_its_bound_in_half_precision(dtype: torch.dtype) -> None:
    """Trap 12: measured in float64, whatever the model's type; sums are float32 or wider."""
    net = model().to(dtype)
    x, y = clients()
    for k in range(12):
        one = (x[k : k + 1].to(dtype), y[k : k + 1])
        query = ClippedSum(
            lambda own: [Summand(own, hg.normalize(0.1))], vectors=FedAvg(0.4, 2).updates
        )
        found = query.bounded(batch_pass(net, loss_of(net), one))
        assert all(each.dtype != dtype or dtype is torch.float32 for each in found.sum.values())
        assert 0.099 < size({n: each.double() for n, each in found.sum.items()}) <= 0.1 * (1 + 1e-5)


def test_a_hook_that_would_see_a_client_is_refused() -> None:
    net = model()
    next(net.parameters()).register_hook(lambda grad: grad)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    run = hg.train(net, optimizer, clients(), plan=plan_of(FedAvg(0.4)), rng=Rng.fixed(0))
    batch = next(iter(run))
    with pytest.raises(Refused, match="gradient hook"):
        run.step(loss_of(net), batch)


def test_local_training_leaves_the_model_where_it_was(monkeypatch) -> None:
    plan = plan_of(FedAvg(0.4, 2), metrics=Metrics())
    seen = watched(plan, monkeypatch, lr=0.0, records=clients())
    assert_close(seen.points[0], point_of(seen.net), 0.0)
    assert len(seen.run.readings) == 8
    with pytest.raises(ValueError, match="local_rate > 0"):
        FedAvg(0.0)
