"""Private metrics: bounded beside the gradient, one noise for both, and right on average."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from small_runs import RECORDS, data, loss_of
from torch import nn

import hushgrad as hg
from hushgrad import Refused, Rng
from hushgrad.clipping.rules import Adaptive, abadi
from hushgrad.run.metrics import NAME, Metrics, Reading, smoothed
from hushgrad.run.step import clipped_sum
from hushgrad.types import Bounded

SHOWN = Metrics(watched=("accuracy",))


def run_of(plan, net, seed=0):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    return hg.train(net, optimizer, data(), plan=plan, rng=Rng.fixed(seed))


def small_plan(**changes):
    options = {"records": RECORDS, "batch": 100, "epochs": 5, "delta": 1e-4}
    return hg.plan(**(options | {"noise_multiplier": 1.0, "metrics": SHOWN} | changes))


def right(net):
    return {"accuracy": lambda b: net(b[0]).argmax(1) == b[1]}


values = st.one_of(st.floats(), st.floats(-2, 2))


@given(
    losses=st.lists(values, min_size=3, max_size=3),
    norms=st.lists(st.floats(0, math.inf), min_size=3, max_size=3),
    weights=st.lists(st.floats(0, 1e6), min_size=3, max_size=3),
    seen=st.lists(values, min_size=3, max_size=3),
)
def test_no_record_has_metrics_above_its_share(losses, norms, weights, seen) -> None:
    column = [torch.tensor(x, dtype=torch.float64) for x in (losses, norms, weights, seen)]
    rows = SHOWN.rows(column[0], column[1][:, None], column[2][:, None], {"accuracy": column[3]})
    assert bool((rows.norm(dim=1) <= 1).all())
    bounded = Bounded({"w": torch.zeros(2)}, l2=2.0)
    both = SHOWN.beside(bounded, rows[:1])
    assert float(both.sum[NAME].norm()) <= 0.1 * 2.0
    assert both.l2 == math.hypot(2.0, 0.2)


def test_sums_of_metrics_are_exact_in_any_order() -> None:
    """Or rounding would move a sum by more than a record's share."""
    n = 5000
    column = [torch.rand(n, dtype=torch.float64) for _ in range(4)]
    rows = SHOWN.rows(column[0], column[1][:, None], column[2][:, None], {"accuracy": column[3]})
    total = rows.sum(0)
    assert torch.equal(total, rows[torch.randperm(n)].sum(0))
    assert torch.equal(total - rows[7], torch.cat([rows[:7], rows[8:]]).sum(0))


def test_without_noise_the_readings_are_the_means() -> None:
    net = nn.Linear(6, 2)
    plan = small_plan(noise_multiplier=0.0, sampling=hg.sampling.FullBatch(), clip=abadi(0.4))
    run = run_of(plan, net)
    losses = loss_of(net)(data()).detach()
    accuracy = float((net(data()[0]).argmax(1) == data()[1]).float().mean())
    norms = hg.per_sample(loss_of(net), dict(net.named_parameters()), data()).sq_norms()
    size = sum(norms.values()).sqrt()
    run.step(loss_of(net), next(iter(run)), watch=right(net))
    found = run.readings[0].values
    assert found["loss"] == pytest.approx(float(losses.mean()), rel=1e-4)
    assert found["accuracy"] == pytest.approx(accuracy, rel=1e-4)
    assert found["clipped"] == pytest.approx(float((size > 0.4).double().mean()), rel=1e-4)
    bins = [found[name] for name in SHOWN.bins]
    assert sum(bins) == pytest.approx(1, rel=1e-4)
    edges = [2.0**k for k in range(-8, 9, 2)]
    shares = torch.histc(torch.bucketize(size, torch.tensor(edges)).double(), 10, 0, 9) / RECORDS
    torch.testing.assert_close(torch.tensor(bins).double(), shares, rtol=0, atol=1e-4)


def test_the_gradient_is_the_same_but_for_half_a_percent_of_noise() -> None:
    nets = [nn.Linear(6, 2) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    batch = data()
    bare, beside = (
        clipped_sum(loss_of(net), dict(net.named_parameters()), batch, metrics=metrics)
        for net, metrics in zip(nets, (None, Metrics()), strict=True)
    )
    assert all(torch.equal(bare.sum[name], beside.sum[name]) for name in bare.sum)
    assert beside.l2 / bare.l2 == pytest.approx(math.sqrt(1.01), rel=1e-12)
    assert beside.l2 / bare.l2 < 1.005


def test_one_record_moves_the_sum_by_its_bound_at_most() -> None:
    """Gradient and metrics together, for a record that is as large as it can be."""
    net = nn.Linear(6, 2)
    params, (x, y) = dict(net.named_parameters()), data()
    metrics, x = Metrics(), x.clone()
    x[0] *= 1e4
    sums = [
        clipped_sum(loss_of(net), params, (x[start:], y[start:]), metrics=metrics)
        for start in (0, 1)
    ]
    gap = [(sums[0].sum[name] - sums[1].sum[name]).double().norm() for name in sums[0].sum]
    moved = float(torch.stack(gap).norm())
    assert 0.99 * sums[0].l2 < moved <= sums[0].l2


def test_readings_have_the_noise_that_is_stated() -> None:
    """Of one noise for gradient and metrics: two-sided, by many readings of nothing."""
    plan = small_plan(metrics=Metrics(), noise_multiplier=2.0, epochs=60)
    net = nn.Linear(6, 1, bias=False)
    run = hg.train(
        net,
        torch.optim.SGD(net.parameters(), lr=0.0),
        (torch.zeros(400, 6),),
        plan=plan,
        rng=Rng.fixed(0),
    )
    for batch in run:
        run.step(lambda b: net(b[0])[:, 0], batch)
    found = [r.values[name] for r in run.readings for name in Metrics().bins[1:]]
    scale = Metrics().noise(2.0, expected=100)
    assert stats.kstest(found, stats.norm(scale=scale).cdf).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(found, stats.norm(scale=wrong * scale).cdf).pvalue < 1e-3


def test_metrics_follow_the_training() -> None:
    net = nn.Linear(6, 2)
    run = run_of(small_plan(epochs=30, noise_multiplier=0.5), net)
    for batch in run:
        run.step(loss_of(net), batch, watch=right(net))
    real = float((net(data()[0]).argmax(1) == data()[1]).float().mean())
    noise = SHOWN.noise(0.5, expected=100) / math.sqrt(50)
    assert run.metrics["accuracy"] == pytest.approx(real, abs=0.05 + 4 * noise)
    assert len(run.readings) == run.plan.steps
    assert run.readings[-1].step == run.plan.steps - 1


def test_metrics_change_no_event() -> None:
    assert small_plan().event(7) == small_plan(metrics=None).event(7)
    assert small_plan().epsilon == small_plan(metrics=None).epsilon


def test_micro_batches_change_no_reading() -> None:
    found = []
    for micro_batch in (None, 7):
        torch.manual_seed(3)
        net = nn.Linear(6, 2)
        run = hg.train(
            net,
            torch.optim.SGD(net.parameters(), lr=0.2),
            data(),
            plan=small_plan(noise_multiplier=0.0),
            rng=Rng.fixed(0),
            execution=hg.Execution(micro_batch=micro_batch),
        )
        run.step(loss_of(net), next(iter(run)), watch=right(net))
        found.append(run.readings[0].values)
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.parametrize(
    ("watch", "error", "message"),
    [
        ({}, ValueError, r"for each of \['accuracy'\], got \[\]"),
        ({"f1": lambda b: b[1]}, ValueError, r"got \['f1'\]"),
        ({"accuracy": lambda b: b[1].float().mean()}, Refused, "one value for each record"),
        ({"accuracy": lambda b: b[0][:, 0] - b[0][:, 0].mean()}, Refused, "its own record alone"),
        # A weak coupling behind a yes or no: only a loud record shows it.
        (
            {"accuracy": lambda b: b[0][:, 0] > 1e-5 * b[0].abs().mean()},
            Refused,
            "its own record alone",
        ),
    ],
)
def test_a_watched_value_that_has_no_bound_is_refused(watch, error, message: str) -> None:
    net = nn.Linear(6, 2)
    run = run_of(small_plan(), net)
    with pytest.raises(error, match=message):
        run.step(loss_of(net), next(iter(run)), watch=watch)
    assert run.readings == []


def test_a_function_that_is_not_passed_is_asked_for() -> None:
    run = run_of(small_plan(), nn.Linear(6, 2))
    with pytest.raises(ValueError, match=r"\['accuracy'\], got \[\]; pass them: run.step"):
        run.step(loss_of(nn.Linear(6, 2)), next(iter(run)))


def test_watching_leaves_no_trace_in_the_model() -> None:
    """Neither its gradients, nor its buffers, nor the random numbers of its dropout."""
    states = []
    for metrics, watch in ((Metrics(), {}), (SHOWN, None)):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 2), nn.Dropout(0.5))
        sampling = hg.sampling.FullBatch()  # random batches are bound to the plan, metrics included
        plan = small_plan(metrics=metrics, noise_multiplier=0.0, sampling=sampling)
        run = run_of(plan, net)
        for batch in run:
            run.step(loss_of(net), batch, watch=right(net) if watch is None else watch)
        states.append(net.state_dict()["0.weight"])
    assert torch.equal(*states)


def test_no_two_records_share_the_random_numbers_of_a_loss_and_a_watched_value() -> None:
    """One record's dropout would then follow another's, and both from the record between them."""
    net, plan = nn.Linear(6, 2), small_plan()
    optimizer, execution = torch.optim.SGD(net.parameters(), lr=0.2), hg.Execution(micro_batch=32)
    run = hg.train(net, optimizer, data(), plan=plan, rng=Rng.fixed(0), execution=execution)
    drawn: dict[str, list[float]] = {"loss": [], "watched": []}

    def noisy(kind: str, value):
        u = torch.rand(len(value))
        drawn[kind] += u.tolist()
        return value + 0 * u

    for batch in run:
        for kind in drawn:
            drawn[kind].clear()
        run.step(
            lambda b: noisy("loss", loss_of(net)(b)),
            batch,
            watch={"accuracy": lambda b: noisy("watched", right(net)["accuracy"](b).float())},
        )
        if run.steps_taken == 4:  # no step at which anything is tested
            break
    assert len(drawn["loss"]) > 64
    assert not set(drawn["loss"]) & set(drawn["watched"])


def test_names_and_shares_are_checked() -> None:
    with pytest.raises(ValueError, match="names of their own"):
        Metrics(watched=("loss",))
    with pytest.raises(ValueError, match="names of their own"):
        Metrics(watched=("a", "a"))
    with pytest.raises(ValueError, match="share > 0"):
        Metrics(share=0.0)


def test_smoothing_is_the_mean_of_the_last_readings() -> None:
    readings = [Reading(i, {"loss": float(i)}) for i in range(100)]
    assert smoothed(readings, span=10) == {"loss": pytest.approx(94.5)}
    assert smoothed([]) == {}


# --- clipping that follows a quantile ---


@pytest.mark.parametrize("quantile", [0.2, 0.8])
@pytest.mark.parametrize("start", [0.05, 20.0])
def test_adaptive_clipping_finds_its_quantile(quantile: float, start: float) -> None:
    """Of norms that are known: the records are features, and the loss is linear in them."""
    norms = torch.linspace(0.5, 2.0, RECORDS)
    net = nn.Linear(1, 1, bias=False)
    clip = Adaptive(quantile=quantile, clip_norm=start)
    plan = small_plan(clip=clip, metrics=None, noise_multiplier=0.3, epochs=40)
    run = hg.train(
        net,
        torch.optim.SGD(net.parameters(), lr=0.0),
        (norms[:, None],),
        plan=plan,
        rng=Rng.fixed(0),
    )
    for batch in run:
        run.step(lambda b: net(b[0])[:, 0], batch)
    assert run._clip.clip_norm == pytest.approx(0.5 + 1.5 * quantile, rel=0.12)


def test_adaptive_noise_follows_the_norm() -> None:
    """σ is noise ÷ the bound of the step's own norm: the event of every step is the same."""
    clip = Adaptive(clip_norm=4.0)
    net = nn.Linear(6, 2)
    run = run_of(small_plan(clip=clip, metrics=None), net)
    assert run.plan.metrics == Metrics()
    bounds = []
    for batch in run:
        bounds.append(run._clip.bound(1))
        run.step(loss_of(net), batch)
    assert bounds[0] == 4.0 and bounds[-1] < 2.0
    assert run.plan.event(3) == small_plan(metrics=None).event(3)


def test_adaptive_clipping_needs_its_count() -> None:
    with pytest.raises(ValueError, match="metrics with adaptive clipping"):
        hg.Plan(RECORDS, hg.sampling.Poisson(0.1), 5, 1.0, 1e-5, clip=Adaptive())
    with pytest.raises(ValueError, match="0 < quantile < 1"):
        Adaptive(quantile=1.0)


def test_the_norm_moves_as_the_paper_says() -> None:
    """C·exp(−η(b̄ − γ)), Andrew et al. 2021, and never out of reach."""
    clip = Adaptive(quantile=0.5, clip_norm=2.0, rate=0.2)
    moved = clip.next_rule(clip.at(2.0), clipped=0.9)
    assert moved.clip_norm == pytest.approx(2.0 * math.exp(-0.2 * (0.1 - 0.5)))
    far = clip.at(2.0)
    for _ in range(1000):
        far = clip.next_rule(far, clipped=50.0)
    assert far.clip_norm == 2.0 * 2.0**20
