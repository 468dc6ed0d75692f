"""A private step: plain descent without noise, the noise of its plan, a public divisor."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats
from small_runs import RECORDS, data, loss_of, model, small_plan, started
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import Refused, Rng
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.clipping.rules import abadi
from hushgrad.sampling import FullBatch


def test_without_noise_and_clipping_it_is_plain_gradient_descent() -> None:
    """Full batch, σ = 0, R beyond every norm: the same steps as torch takes."""
    plan = small_plan(sampling=FullBatch(), epochs=0.5, noise_multiplier=0.0, clip=abadi(1e6))
    net, plain = model(), model()
    run = started(net, plan)
    for batch in run:
        run.step(loss_of(net), batch)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(plan.steps):
        optimizer.zero_grad()
        loss_of(plain)(data()).mean().backward()
        optimizer.step()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert run.guarantee.epsilon == math.inf
    assert "not private" in str(run.guarantee)


@pytest.mark.parametrize("micro_batch", [None, 7])
def test_the_update_has_the_noise_of_the_plan(micro_batch: int | None) -> None:
    """Two runs that differ in their noise alone: the gap has √2 times its scale."""
    plan = small_plan(clip=abadi(0.5), noise_multiplier=2.0)
    grads = []
    for seed in (0, 1):
        net = nn.Linear(6, 2000, bias=False)
        nn.init.zeros_(net.weight)
        run = hg.train(
            net,
            torch.optim.SGD(net.parameters(), lr=0.0),
            (torch.zeros(RECORDS, 6),),
            plan=plan,
            rng=Rng.fixed(seed),
            execution=hg.Execution(micro_batch=micro_batch),
        )
        batch = next(iter(run))
        run.step(lambda b, net=net: net(b[0]).sum(1), batch)
        grads.append(net.weight.grad.double().flatten().numpy())
    gap = (grads[0] - grads[1]) * 40
    scale = 2.0 * 0.5 * (1 + SUM_SLACK) * math.sqrt(2)
    assert stats.kstest(gap, stats.norm(scale=scale).cdf).pvalue > 1e-3
    assert stats.kstest(gap, stats.norm(scale=scale * 2 / 3).cdf).pvalue < 1e-3
    assert stats.kstest(gap, stats.norm(scale=scale * 3 / 2).cdf).pvalue < 1e-3


def test_an_empty_batch_takes_a_step_of_noise_without_calling_the_loss() -> None:
    plan = hg.plan(records=100_000, batch=1, epochs=1e-5, delta=1e-6, noise_multiplier=1.0)
    net = model()
    with pytest.warns(UserWarning, match="data of about the 100000 records"):
        run = hg.train(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            tuple(x[:3] for x in data()),
            plan=plan,
            rng=Rng.fixed(0),
        )
    before = [p.detach().clone() for p in net.parameters()]
    batch = next(iter(run))
    assert len(batch[0]) == 0

    def never(batch: object) -> Tensor:
        raise AssertionError("the loss was called")

    run.step(never, batch)
    assert all(not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert run.steps_taken == 1


def test_the_divisor_is_the_plans_and_not_the_batchs() -> None:
    net = nn.Linear(6, 1, bias=False)
    plan = small_plan(noise_multiplier=0.0, clip=abadi(1e6))
    run = hg.train(
        net,
        torch.optim.SGD(net.parameters(), lr=0.0),
        (torch.ones(RECORDS, 6),),
        plan=plan,
        rng=Rng.fixed(0),
    )
    sizes = set()
    for batch in run:
        run.step(lambda b: net(b[0])[:, 0], batch)
        sizes.add(len(batch[0]))
        np.testing.assert_allclose(net.weight.grad.numpy(), len(batch[0]) / 40, rtol=1e-5)
    assert len(sizes) > 3


def test_a_penalty_is_added_after_the_noise() -> None:
    plan = small_plan(noise_multiplier=1.0)
    grads = []
    for factor in (0.0, 3.0):
        net = model()
        run = started(net, plan)
        run.step(
            loss_of(net),
            next(iter(run)),
            penalty=lambda net=net, factor=factor: factor * net[0].weight.square().sum() / 2,
        )
        grads.append(net[0].weight.grad.clone())
        weight = model()[0].weight
    torch.testing.assert_close(grads[1] - grads[0], 3 * weight.detach())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: torch.optim.NAdam(p, lr=0.01),
        lambda p: torch.optim.RAdam(p, lr=0.01),
        lambda p: torch.optim.Adamax(p, lr=0.01),
        lambda p: torch.optim.Adadelta(p),
    ],
)
def test_any_first_order_optimizer_learns(make) -> None:
    net = model()
    plan = small_plan(epochs=3, noise_multiplier=0.5, batch=100)
    run = hg.train(net, make(net.parameters()), data(), plan=plan, rng=Rng.fixed(0))
    before = loss_of(net)(data()).mean().item()
    for batch in run:
        run.step(loss_of(net), batch)
    assert loss_of(net)(data()).mean().item() < before


def test_an_optimizer_that_asks_again_is_refused() -> None:
    net = model()
    with pytest.raises(Refused, match="got LBFGS; use SGD or Adam"):
        hg.train(
            net, torch.optim.LBFGS(net.parameters()), data(), plan=small_plan(), rng=Rng.fixed(0)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_data_of_any_precision_are_trained_on(dtype: torch.dtype) -> None:
    net, (x, y) = model().to(dtype), data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = hg.train(net, optimizer, (x.to(dtype), y), plan=small_plan(), rng=Rng.fixed(0))
    run.step(loss_of(net), next(iter(run)))
    assert run.steps_taken == 1


def test_a_step_that_fails_is_left_out_and_the_run_still_ends(tmp_path) -> None:
    net = model()
    run = hg.train(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        data(),
        plan=small_plan(),
        rng=Rng.from_os(),
        folder=tmp_path,
    )

    def broken(batch: object) -> Tensor:
        raise RuntimeError("no such thing")

    for i, batch in enumerate(run):
        if i == 3:
            with pytest.raises(RuntimeError, match="no such thing"):
                run.step(broken, batch)
        else:
            run.step(loss_of(net), batch)
        if i == 5:
            run.save()
            assert (run.state()["step"], run.state()["taken"]) == (6, 5)
    assert run.steps_taken == 9
    assert not (tmp_path / "key").exists()
    assert run.guarantee.epsilon == run.plan.epsilon


def test_arguments_of_a_wrong_kind_are_named() -> None:
    """In a process of its own: here the tests' own checks of types would come first."""
    program = """
import torch, hushgrad as hg
net = torch.nn.Linear(2, 2)
plan = hg.plan(records=100, batch=10, epochs=1, delta=1e-5, noise_multiplier=1.0)
good = dict(plan=plan, rng=hg.Rng.fixed(0))
for changes in (dict(rng=3), dict(plan={}), dict(budget="people")):
    try:
        hg.train(net, torch.optim.SGD(net.parameters(), lr=1.0), torch.ones(9, 2), **good | changes)
    except ValueError as error:
        print(error)
try:
    hg.plan(records=100, batch=10, epochs=1, delta=1e-5, noise_multiplier=1.0, clip="abadi")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "expected rng to be a Rng, got a int; pass Rng.from_os()",
        "expected plan to be a Plan, got a dict; pass hg.plan(…)",
        'expected budget to be a Budget, got a str; pass hg.Ledger("ledger.sqlite").budget("name")',
        "expected a clipping rule, got 'abadi'; pass one such as hg.automatic() or hg.abadi(1.0)",
    ], done.stderr
