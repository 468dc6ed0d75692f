"""DP-SRM, STORM and SpiderBoost: the papers' recursions, their bounds and their events."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import dp_accounting as dp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dp_accounting.dp_event import NoOpDpEvent
from hypothesis import given
from hypothesis import strategies as st
from record_by_record import (
    RECORDS,
    Gradient,
    assert_close,
    bound,
    clipped,
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
from torch import nn

import hushgrad as hg
from hushgrad import Refused, Relation, Rng
from hushgrad.accounting import PLD, RDP, MixedDpEvent
from hushgrad.algorithms import (
    Ball,
    LocalGd,
    PerDistance,
    Sgd,
    SpiderBoost,
    Srm,
    average,
    smallest,
    stopped,
    storm,
    unclipped,
    uniform,
)
from hushgrad.algorithms.algorithm import count_stages
from hushgrad.algorithms.output import draw_stop
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.clipping.rules import Adaptive, abadi, automatic
from hushgrad.events import merged
from hushgrad.gradients import loop
from hushgrad.noise import gaussian as gaussian_noise
from hushgrad.run.execution import Execution
from hushgrad.run.metrics import Metrics
from hushgrad.run.step import BatchPass, Part, StepContext, Summand
from hushgrad.sampling import FullBatch, Poisson, Shuffled, TruncatedPoisson, WithoutReplacement

GAMMA, C1, C2, LR = 0.2, 0.8, 0.05, 0.5
NET = model()
LOSS = loss_of(NET)


def gaussian(multiplier: float) -> dp.GaussianDpEvent:
    return dp.GaussianDpEvent(multiplier)


# --- the formula ---


@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize("combined", [False, True])
def test_srm_is_the_papers_recursion(monkeypatch, combined: bool, micro_batch: int | None) -> None:
    clips = {"difference_clip": None, "combined_clip": abadi(0.1)} if combined else {}
    srm = Srm(GAMMA, **({"difference_clip": abadi(C2), "first_batch": 30} | clips))
    seen = watched(plan_of(srm), monkeypatch, execution=Execution(micro_batch=micro_batch))
    points, theta = seen.points, seen.points[0]
    estimate: Gradient = {}
    for t, batch in enumerate(seen.batches):
        new = gradients_at(theta, batch)
        if t == 0:
            summed = total([clipped(g, C1) for g in new], theta)
            estimate = combine((1 / 30, summed), (1 / 30, seen.noise(0)))
        else:
            old = gradients_at(points[t - 1], batch)
            moved = [combine((1.0, g), (-1.0, h)) for g, h in zip(new, old, strict=True)]
            if combined:
                each = [
                    clipped(combine((GAMMA, g), (1 - GAMMA, d)), 0.1)
                    for g, d in zip(new, moved, strict=True)
                ]
            else:
                each = [
                    combine((GAMMA, clipped(g, C1)), (1 - GAMMA, clipped(d, C2)))
                    for g, d in zip(new, moved, strict=True)
                ]
            summed = total(each, theta)
            mean = combine((1 / 12, summed), (1 / 12, seen.noise(t)))
            estimate = combine((1 - GAMMA, estimate), (1.0, mean))
        assert_close(seen.sums[t].sum, summed, 1e-6)
        theta = combine((1.0, theta), (-LR, estimate))
        assert_close(points[t + 1], theta, 1e-6)
        theta = points[t + 1]
    assert len(seen.batches) == 8


def test_gamma_one_is_dp_sgd(monkeypatch) -> None:
    seen = watched(plan_of(Srm(1.0, unclipped())), monkeypatch)
    for t, batch in enumerate(seen.batches):
        each = [clipped(g, C1) for g in gradients_at(seen.points[t], batch)]
        assert_close(seen.sums[t].sum, total(each, seen.points[0]), 1e-6)
        assert seen.sums[t].l2 == bound(C1)
        mean = {name: x / 12 for name, x in seen.released[t].items()}
        assert_close(seen.points[t + 1], combine((1.0, seen.points[t]), (-LR, mean)), 1e-12)


def test_storm_is_the_limit_without_noise_or_clipping(monkeypatch) -> None:
    plan = plan_of(storm(GAMMA), noise_multiplier=0.0, clip=unclipped())
    seen = watched(plan, monkeypatch)
    estimate: Gradient = {}
    for t, batch in enumerate(seen.batches):
        new = total(gradients_at(seen.points[t], batch), seen.points[0])
        estimate = combine((1 / 12, new), *([(1 - GAMMA, estimate)] if t else []))
        if t:
            old = total(gradients_at(seen.points[t - 1], batch), seen.points[0])
            estimate = combine((1.0, estimate), (-(1 - GAMMA) / 12, old))
        step = combine((1.0, seen.points[t]), (-LR, estimate))
        assert_close(seen.points[t + 1], step, 1e-6)
    assert seen.run.guarantee.epsilon == math.inf


def test_spiderboost_is_its_recursion(monkeypatch) -> None:
    smooth = 0.7
    spider = SpiderBoost(3, PerDistance(smooth), anchor_batch=40)
    seen = watched(plan_of(spider), monkeypatch)
    points, estimate = seen.points, dict[str, torch.Tensor]()
    for t, batch in enumerate(seen.batches):
        new = gradients_at(points[t], batch)
        if t % 3 == 0:
            summed, divisor, most = total([clipped(g, C1) for g in new], points[0]), 40, C1
        else:
            apart = size(combine((1.0, points[t]), (-1.0, points[t - 1])))
            most, divisor = min(smooth * apart, 2 * C1), 12
            old = gradients_at(points[t - 1], batch)
            moved = [combine((1.0, g), (-1.0, h)) for g, h in zip(new, old, strict=True)]
            summed = total([clipped(d, most) for d in moved], points[0])
        assert seen.sums[t].l2 == bound(most)
        assert_close(seen.sums[t].sum, summed, 1e-6)
        mean = combine((1 / divisor, summed), (1 / divisor, seen.noise(t)))
        estimate = mean if t % 3 == 0 else combine((1.0, estimate), (1.0, mean))
        assert_close(points[t + 1], combine((1.0, points[t]), (-LR, estimate)), 1e-6)


def test_the_papers_step_size_is_a_bound_on_the_step(monkeypatch) -> None:
    zeta, rate = 0.05, 0.5  # rate = 1/(2 n0 L), so a step is min(rate, 2·zeta·rate/|v|)·v
    srm = Srm(GAMMA, abadi(C2), step_norm=2 * zeta)
    seen = watched(plan_of(srm), monkeypatch, lr=rate, penalty=0.1)
    steps = [
        size(combine((1.0, new), (-1.0, old)))
        for old, new in zip(seen.points, seen.points[1:], strict=False)
    ]
    assert max(steps) <= 2 * zeta * rate * (1 + 1e-9)
    assert max(steps) > 1.9 * zeta * rate


def test_randomness_is_replayed_at_the_second_point(monkeypatch) -> None:
    """Where the points are the same, dropout must leave no difference between their gradients."""
    srm = Srm(1e-12, abadi(5.0))
    plan = plan_of(srm, noise_multiplier=0.0)
    seen = watched(plan, monkeypatch, lr=0.0, dropout=0.5, execution=Execution(micro_batch=5))
    assert size(seen.sums[0].sum) > 0.1
    assert all(size(found.sum) < 1e-9 for found in seen.sums[1:])


def test_without_replay_dropout_would_show() -> None:
    net = model(dropout=0.5)
    params = dict(net.named_parameters())
    part = Part(loss_of(net), params, data(), (net,), Execution())
    first = part.here.weighted_sum({n: torch.ones(RECORDS).double() for n in params})
    again = Part(loss_of(net), params, data(), (net,), Execution()).here
    second = again.weighted_sum({n: torch.ones(RECORDS).double() for n in params})
    assert size(combine((1.0, first), (-1.0, second))) > 0.1


def test_other_points_leave_the_parameters_and_the_generator_alone() -> None:
    net = model(dropout=0.5)
    params = dict(net.named_parameters())
    before, pointers = point_of(net), [p.data_ptr() for p in params.values()]
    elsewhere = {name: x + 1 for name, x in before.items()}
    part = Part(loss_of(net), params, data(), (net,), Execution())
    state = torch.get_rng_state()
    part.at(elsewhere)
    assert torch.equal(state, torch.get_rng_state())
    assert pointers == [p.data_ptr() for p in params.values()]
    assert all(torch.equal(before[n], p) for n, p in params.items())


# --- the bound on one record ---


@given(st.integers(0, 10**6), st.floats(1e-3, 1.0), st.floats(-3, 3), st.booleans())
def test_a_record_keeps_its_bound_at_two_points(
    seed: int, gamma: float, scale: float, combined: bool
) -> None:
    """Each record by itself, in float64, whatever its features and however far the points are."""
    draws = torch.Generator().manual_seed(seed)
    net, loss = NET, LOSS
    params = dict(net.named_parameters())
    before = {
        n: p.detach() + 10**scale * torch.randn(p.shape, generator=draws).double()
        for n, p in params.items()
    }
    x, y = data(2, seed)
    clips = (None, abadi(C2)) if combined else (abadi(C2), None)
    srm = Srm(gamma, *clips)
    batch = (x * 10**scale, y)
    most = C2 if combined else gamma * C1 + (1 - gamma) * C2
    for k in range(2):
        one = (batch[0][k : k + 1], batch[1][k : k + 1])
        work = BatchPass(loss, params, one)
        context = _round(work)
        found = work.sum(srm._query(context, before))
        assert found.l2 == bound(most)
        assert size(found.sum) <= most * (1 + 1e-5)


def test_a_bound_with_c1_and_c2_swapped_would_be_broken() -> None:
    """Trap 5: section 7.1 prints (1 − γ)C1 + γC2, which far-apart points exceed or waste."""
    net = model()
    params = dict(net.named_parameters())
    before = {n: p.detach() + 3.0 for n, p in params.items()}
    x, y = data(1)
    wide = Srm(0.9, abadi(1e-3))
    work = BatchPass(loss_of(net), params, (30 * x, 1 - y))
    found = size(work.sum(wide._query(_round(work), before)).sum)
    assert found > 2 * ((1 - 0.9) * C1 + 0.9 * 1e-3)
    assert found <= (0.9 * C1 + 0.1 * 1e-3) * (1 + 1e-5)


def _round(work: BatchPass) -> StepContext:
    return StepContext(work, abadi(C1), gaussian_noise(1.0), 1.0, step=1, rng=Rng.fixed(0))


# --- noise and events ---


def test_the_event_is_what_was_drawn_and_noised(monkeypatch) -> None:
    srm = Srm(GAMMA, abadi(C2), first_batch=30, first_noise=2.5)
    plan = plan_of(srm)
    seen = watched(plan, monkeypatch)
    assert plan.event(8) == dp.ComposedDpEvent(
        [
            dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.5, gaussian(0.7 * 2.5)), 1),
            dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.2, gaussian(0.7)), 7),
        ]
    )
    own = seen.run._memory.sampling
    for step, batch in enumerate(seen.batches):
        scheme = Poisson(0.5 if step == 0 else 0.2)
        assert torch.equal(batch[0], data()[0][scheme.draw(RECORDS, step=step, rng=own)])
    assert [noise.noise_multiplier for noise in seen.noises] == [0.7 * 2.5] + [0.7] * 7
    assert seen.sums[0].l2 == bound(C1)
    assert all(found.l2 == bound(GAMMA * C1 + (1 - GAMMA) * C2) for found in seen.sums[1:])


def test_the_noise_has_its_scale_and_not_another(monkeypatch) -> None:
    plan = plan_of(Srm(GAMMA, abadi(C2), first_batch=30), epochs=20)
    seen = watched(plan, monkeypatch, lr=0.01)
    drawn = torch.cat([x.flatten() for t in range(1, 100) for x in seen.noise(t).values()])
    expected = 0.7 * (GAMMA * C1 + (1 - GAMMA) * C2) * (1 + SUM_SLACK)
    assert len(drawn) > 3000
    assert abs(float(drawn.std()) / expected - 1) < 0.05
    assert abs(float(drawn.mean())) < 0.07 * expected


def test_spiderboost_composes_its_anchors_and_differences() -> None:
    plan = plan_of(SpiderBoost(3, PerDistance(1.0), anchor_noise=2.0))
    assert plan.event(8) == dp.ComposedDpEvent(
        [
            dp.SelfComposedDpEvent(gaussian(1.4), 3),
            dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.2, gaussian(0.7)), 5),
        ]
    )
    assert plan.divisor_at(0) == RECORDS
    assert plan.divisor_at(1) == 12


def test_two_points_cost_no_more_than_one() -> None:
    assert plan_of(Srm(GAMMA, abadi(C2))).epsilon == plan_of(Sgd()).epsilon
    twice = PLD.epsilon(plan_of(Sgd()).event(16), delta=1e-4)
    assert twice > 1.2 * plan_of(Srm(GAMMA, abadi(C2))).epsilon


def test_noise_is_calibrated_for_the_first_batch_too() -> None:
    plain = plan_of(Srm(GAMMA, abadi(C2)), noise_multiplier=None, epsilon=2.0)
    larger = plan_of(Srm(GAMMA, abadi(C2), first_batch=50), noise_multiplier=None, epsilon=2.0)
    assert 1.99 < larger.epsilon <= 2.0
    assert larger.noise_multiplier > 1.05 * plain.noise_multiplier


def test_batches_without_replacement_as_in_the_paper(monkeypatch) -> None:
    srm = Srm(GAMMA, abadi(C2), first_batch=30)
    options = {"sampling": WithoutReplacement(12), "relation": Relation.REPLACE_ONE}
    plan = plan_of(srm, **options, accountant=RDP, noise_multiplier=4.0)
    seen = watched(plan, monkeypatch)
    assert [len(batch[1]) for batch in seen.batches] == [30] + [12] * 7
    assert math.isfinite(plan.epsilon)


# --- output ---


def test_the_average_is_that_of_the_points(monkeypatch) -> None:
    seen = watched(plan_of(Srm(GAMMA, abadi(C2), output=average(skipped=2))), monkeypatch)
    mean = combine(*((1 / 6, theta) for theta in seen.points[3:]))
    assert_close(point_of(seen.net), mean, 1e-12)


def test_a_drawn_point_is_one_of_them_and_costs_the_whole_run(monkeypatch) -> None:
    srm = Srm(GAMMA, abadi(C2), output=uniform())
    counts = [0] * 9
    for seed in range(8):
        seen = watched(plan_of(srm), monkeypatch, seed=seed)
        given_out = point_of(seen.net)
        same = [all(torch.equal(given_out[n], p[n]) for n in p) for p in seen.points]
        counts[same.index(True)] += 1
    assert counts[0] == 0
    assert sum(count > 0 for count in counts) >= 3
    assert plan_of(srm).epsilon == plan_of(Srm(GAMMA, abadi(C2))).epsilon


def test_a_stopped_run_ends_at_its_draw_and_costs_the_mean_delta(monkeypatch) -> None:
    srm = Srm(GAMMA, abadi(C2), first_batch=30, output=stopped())
    plan = plan_of(srm)
    whole = plan_of(Srm(GAMMA, abadi(C2), first_batch=30))
    event = plan.event(8)
    assert isinstance(event, MixedDpEvent)
    assert event.events == tuple(whole.event(t) for t in range(1, 9))
    epsilon = plan.epsilon
    deltas = [PLD.delta(whole.event(t), epsilon=epsilon) for t in range(1, 9)]
    assert sum(deltas) / 8 == pytest.approx(1e-4, rel=2e-2)
    assert epsilon < whole.epsilon
    lengths = set()
    for seed in range(6):
        seen = watched(plan, monkeypatch, seed=seed)
        assert len(seen.batches) == len(seen.run) == seen.run.steps_taken
        lengths.add(len(seen.batches))
    assert len(lengths) > 2
    assert lengths <= set(range(1, 9))
    assert "nothing else of the run" in str(seen.run.guarantee)


def test_a_stopped_run_shows_nothing_else(tmp_path: Path) -> None:
    plan = plan_of(Srm(GAMMA, abadi(C2), output=stopped()))
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(Refused, match="no folder"):
        hg.train(net, optimizer, data(), plan=plan, rng=Rng.fixed(0), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(Refused, match="no metrics"):
        plan_of(Srm(GAMMA, abadi(C2), output=stopped()), metrics=Metrics())
    run = hg.train(net, optimizer, data(), plan=plan, rng=Rng.fixed(0))
    with pytest.raises(ValueError, match="folder"):
        run.save()


def test_a_stopped_run_is_charged_its_plan_whatever_was_drawn(tmp_path: Path) -> None:
    ledger = hg.Ledger(tmp_path / "ledger.sqlite")
    budget = ledger.set_budget("toy", epsilon=50.0, delta=1e-2)
    plan = plan_of(Srm(GAMMA, abadi(C2), output=stopped()))
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = hg.train(net, optimizer, data(), plan=plan, rng=Rng.from_os(), budget=budget)
    for batch in run:
        run.step(loss_of(net), batch)
    assert run.entry is not None
    assert run.entry.settled
    assert budget.spent["epsilon"] == plan.epsilon


def test_a_draw_cannot_be_tried_again_until_it_suits(tmp_path: Path) -> None:
    """Else one would wait for the longest run, which costs more than the mean of all."""
    ledger = hg.Ledger(tmp_path / "ledger.sqlite")
    plan = plan_of(Srm(GAMMA, abadi(C2), output=stopped()))
    budget = ledger.set_budget("toy", epsilon=2.5 * plan.epsilon, delta=1e-2)

    def begun(plan: hg.Plan) -> hg.Run:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return hg.train(net, optimizer, data(), plan=plan, rng=Rng.from_os(), budget=budget)

    for _ in range(2):
        run = begun(plan)
        assert 1 <= len(run) <= 8
        run.finish()
    with pytest.raises(Refused):
        begun(plan)
    assert budget.spent["epsilon"] == pytest.approx(2 * plan.epsilon)


@pytest.mark.parametrize("steps", [1, 7, 64])
def test_every_number_of_steps_is_drawn_alike(steps: int) -> None:
    """A number that is drawn too often makes the mean of δ too small."""

    class Evenly(Rng):
        def __init__(self, place: float) -> None:
            super().__init__(bytes(32), reproducible=True)
            self.place = place

        def derive(self, *labels: int | str | bytes) -> Rng:
            return self

        def uniforms(self, count: int, *, start: int = 0) -> np.ndarray:
            return np.full(count, self.place)

    places = (np.arange(steps * 100) + 0.5) / (steps * 100)
    counts = Counter(draw_stop(steps, Evenly(float(place))) for place in places)
    assert counts == dict.fromkeys(range(1, steps + 1), 100)


def test_releases_of_one_batch_are_charged_together() -> None:
    plan = plan_of(SpiderBoost(3, PerDistance(1.0), anchor_noise=2.0))
    assert plan.released_again([2, 3, 4], times=4) == dp.ComposedDpEvent(
        [
            dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.2, gaussian(0.35)), 2),
            dp.SelfComposedDpEvent(gaussian(0.7), 1),
        ]
    )


def test_metrics_ride_beside_both_terms(monkeypatch) -> None:
    """Their room is a share of the bound on both, and the noise grows with it."""
    plan = plan_of(Srm(GAMMA, abadi(C2)), metrics=Metrics(share=0.1))
    seen = watched(plan, monkeypatch)
    both = math.hypot(1.0, 0.1) * (GAMMA * C1 + (1 - GAMMA) * C2)
    assert all(found.l2 == bound(both) for found in seen.sums[1:])


# --- through the library ---


@pytest.mark.parametrize(
    "algorithm",
    [
        Srm(GAMMA, abadi(C2), first_batch=30, output=average()),
        Srm(GAMMA, None, automatic(clip_norm=0.1), output=uniform()),
        SpiderBoost(3, PerDistance(1.0), step_norm=0.3),
        Sgd(smallest(), Ball(1.0)),
        LocalGd(),
    ],
    ids=["srm", "one clip", "spiderboost", "gd", "ldp"],
)
@pytest.mark.parametrize("at", [1, 4])
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(
    tmp_path: Path, algorithm, at: int
) -> None:
    full = {"sampling": FullBatch(), "batch": RECORDS, "epochs": 8}
    local = full | {"relation": Relation.REPLACE_ONE}
    options = {LocalGd: local, Sgd: full}.get(type(algorithm), {"metrics": Metrics()})
    plan = plan_of(algorithm, **options)
    whole, halves = model(dropout=0.3), model(dropout=0.3)
    _go(whole, plan, tmp_path / "whole")
    _go(halves, plan, tmp_path / "halves", until=at)
    other = model(dropout=0.3)
    run = _go(other, plan, tmp_path / "halves", resume=True)
    assert run.steps_taken == 8
    for name, p in whole.state_dict().items():
        assert torch.equal(p, other.state_dict()[name])
    assert run.guarantee.charges == ()


def _go(
    net: nn.Module,
    plan: hg.Plan,
    folder: Path,
    *,
    rng: Rng | None = None,
    until: int | None = None,
    save: bool = True,
    resume: bool = False,
) -> hg.Run:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    rng = rng or Rng.fixed(3)
    run = hg.train(net, optimizer, data(), plan=plan, rng=rng, folder=folder, resume=resume)
    for batch in run:
        run.step(loss_of(net), batch)
        if run.steps_taken == until:
            if save:
                run.save()
            break
    return run


def test_a_run_without_its_key_is_charged_the_steps_that_come_again(tmp_path: Path) -> None:
    """The first step of DP-SRM has a batch of its own, and so has its second release."""
    plan = plan_of(Srm(GAMMA, abadi(C2), first_batch=30))
    _go(model(), plan, tmp_path, rng=Rng.from_os(), until=3, save=False)
    (tmp_path / "key").unlink()
    run = _go(model(), plan, tmp_path, rng=Rng.from_os(), resume=True)
    (charge,) = run.guarantee.charges
    again = plan.released_again(range(8), times=1)  # eight were entered ahead
    assert again == plan.event(8)
    assert charge.epsilon == plan.spent(again)
    once, twice = plan.released_again([0, 1], times=1), plan.released_again([0, 1], times=2)
    assert [e.event.sampling_probability for e in once.events] == [0.5, 0.2]
    assert plan.spent(twice) > 1.3 * plan.spent(once)


def test_the_forms_of_gradients_agree(monkeypatch) -> None:
    plan = plan_of(Srm(GAMMA, abadi(C2)), noise_multiplier=0.0)
    fast, slow = (
        watched(plan, monkeypatch, execution=Execution(form=form))
        for form in (hg.gradients.traced, loop)
    )
    assert_close(fast.points[-1], slow.points[-1], 1e-6)


def test_an_adaptive_first_bound_moves_the_sums(monkeypatch) -> None:
    plan = plan_of(Srm(GAMMA, abadi(C2)), clip=Adaptive(clip_norm=0.8))
    seen = watched(plan, monkeypatch)
    assert len({found.l2 for found in seen.sums}) > 3


def test_an_empty_batch_takes_a_step_of_noise(monkeypatch) -> None:
    plan = plan_of(Srm(GAMMA, abadi(C2)), batch=1, epochs=0.2, noise_multiplier=1.0)
    seen = watched(plan, monkeypatch)
    assert min(len(batch[1]) for batch in seen.batches) == 0
    assert all(size(seen.noise(t)) > 0 for t in range(len(seen.batches)))


def test_an_optimizer_that_writes_on_gradients_leaves_the_estimate_alone(monkeypatch) -> None:
    """In float64 no cast makes a copy: the penalty must not get into the recursion."""
    decayed = watched(plan_of(Srm(GAMMA, abadi(C2))), monkeypatch, penalty=0.5, lr=0.0)
    state = decayed.run._remembered["estimate"]
    expected: Gradient = {}
    for t in range(8):
        mean = {n: x / 12 for n, x in decayed.released[t].items()}
        expected = combine((1.0, mean), *([(1 - GAMMA, expected)] if t else []))
    assert_close(state, expected, 1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Srm(0.0), "0 < gamma <= 1"),
        (lambda: Srm(0.1, abadi(1.0), abadi(1.0)), "got both"),
        (lambda: Srm(0.1, None), "got neither"),
        (lambda: Srm(0.1, step_norm=0.0), "step_norm > 0"),
        (lambda: PerDistance(-1.0), "smoothness > 0"),
        (lambda: SpiderBoost(0, abadi(1.0)), "period >= 1"),
        (lambda: plan_of(Srm(0.1, first_batch=61)), "between 1 and 60"),
        (lambda: plan_of(Srm(0.1, output=smallest())), "recursive estimates"),
        (
            lambda: plan_of(
                Srm(0.1, first_batch=30), sampling=Shuffled(12), relation=Relation.REPLACE_ONE
            ),
            "Poisson sampling or batches without",
        ),
    ],
)
def test_what_makes_no_sense_is_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_first_batch_of_all_records_is_a_full_one() -> None:
    plan = plan_of(Srm(GAMMA, abadi(C2), first_batch=RECORDS))
    assert plan.stage(0).sampling == FullBatch()


def test_a_step_asks_once() -> None:
    net = model()
    work = BatchPass(loss_of(net), dict(net.named_parameters()), data())
    context = _round(work)
    context.mean(lambda part: [Summand(part.here, abadi(1.0))])
    with pytest.raises(Refused, match="one query for each step"):
        context.mean(lambda part: [Summand(part.here, abadi(1.0))])


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 8])
@pytest.mark.parametrize(
    "algorithm",
    [
        Srm(GAMMA, abadi(C2)),
        Srm(GAMMA, abadi(C2), first_batch=30),
        SpiderBoost(3, PerDistance(1.0)),
        SpiderBoost(1, PerDistance(1.0), anchor_batch=12),
    ],
    ids=repr,
)
def test_the_event_counts_the_stages_of_the_steps(algorithm, steps: int) -> None:
    plan = plan_of(algorithm)
    parts = [part for part in merged(plan.event(steps)) if part[0] != NoOpDpEvent()]
    stages = count_stages(plan.stage(step) for step in range(steps))
    expected = [
        (stage.sampling.amplify(gaussian(0.7 * stage.noise), num_records=RECORDS), count)
        for stage, count in stages
    ]
    assert parts == expected


class Tied(nn.Module):
    """An embedding that is the output head too, a convolution in between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.mix = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.LayerNorm(4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.table(words).transpose(1, 2)).transpose(1, 2)
        return F.linear(self.norm(torch.tanh(x)), self.table.weight)


@pytest.mark.parametrize("gap", [1.0, 1e-3])
def test_tied_weights_and_convolutions_have_their_differences(gap: float) -> None:
    torch.manual_seed(3)
    net = Tied()
    params = dict(net.named_parameters())
    words = torch.randint(0, 7, (12, 5))
    before = {n: p.detach() + gap * torch.randn_like(p) for n, p in params.items()}

    def loss(batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(batch).transpose(1, 2), batch, reduction="none").mean(1)

    def summed(execution: Execution) -> dict[str, torch.Tensor]:
        work = BatchPass(loss, params, words, modules=(net,), execution=execution)
        found = work.sum(Srm(GAMMA, abadi(C2))._query(_round(work), before))
        assert found.l2 == bound(GAMMA * C1 + (1 - GAMMA) * C2)
        return found.sum

    fast, slow = summed(Execution(form=hg.gradients.traced)), summed(Execution(form=loop))
    assert_close(fast, slow, 2e-4)
    assert_close(summed(Execution(micro_batch=8)), slow, 2e-4)


def test_batches_of_which_a_truncated_sampling_must_know_the_number_are_not_hidden() -> None:
    """A schedule of several samplings would get round the check on the number of records."""
    truncated = {"sampling": TruncatedPoisson(0.2, 20)}
    with pytest.raises(Refused, match="Poisson sampling or batches without"):
        plan_of(SpiderBoost(3, PerDistance(1.0)), **truncated)
    plan = plan_of(Srm(GAMMA, abadi(C2), first_noise=2.0), **truncated)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = hg.train(net, optimizer, data(RECORDS + 5), plan=plan, rng=Rng.fixed(0))
    with pytest.raises(Refused, match="TruncatedPoisson"):
        next(iter(run))


def test_the_guarantee_names_each_way_of_sampling(monkeypatch) -> None:
    seen = watched(plan_of(Srm(GAMMA, abadi(C2), first_batch=30, first_noise=2.0)), monkeypatch)
    said = str(seen.run.guarantee)
    assert "q = 0.5, noise multiplier 1.4, at 1 of 8 steps" in said
    assert "q = 0.2, noise multiplier 0.7, at 7 of 8 steps" in said
    assert "algorithm Srm(gamma=0.2" in said


def test_a_compiled_pass_sees_both_points() -> None:
    """What is recorded at one point must not stand for the other."""
    net = model().float()
    params = dict(net.named_parameters())
    x, y = data(16)
    before = {n: p.detach() + 0.5 for n, p in params.items()}

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(net(batch[0]), batch[1], reduction="none")

    def summed(execution: Execution) -> dict[str, torch.Tensor]:
        work = BatchPass(loss, params, (x.float(), y), modules=(net,), execution=execution)
        return work.sum(Srm(GAMMA, abadi(1.0))._query(_round(work), before)).sum

    slow = summed(Execution(form=loop))
    for _ in range(2):
        assert_close(summed(Execution(compile=True)), slow, 1e-4)


def test_a_term_that_is_subtracted_counts_in_the_bound() -> None:
    """A record moves the sum by both of its terms, whatever their signs are."""
    net = model()
    x, y = data(1)
    work = BatchPass(loss_of(net), dict(net.named_parameters()), (10 * x, y))
    found = work.sum(
        lambda part: [Summand(part.here, abadi(0.1)), Summand((-1.0) * part.here, abadi(0.1), -2.0)]
    )
    assert size(found.sum) > 0.29
    assert found.l2 == bound(0.3)
