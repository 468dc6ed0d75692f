"""DP-SRM, STORM and SpiderBoost: the papers' recursions, and their bounds."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from record_by_record import (
    RECORDS,
    Gradient,
    assert_close,
    batch_pass,
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
from hushgrad.algorithms import PerDistance, SpiderBoost, Srm, average, smallest, storm, unclipped
from hushgrad.clipping.rules import Adaptive, abadi
from hushgrad.gradients import loop
from hushgrad.noise import gaussian as gaussian_noise
from hushgrad.run.execution import Execution
from hushgrad.run.metrics import Metrics
from hushgrad.run.permit import Allowance, Permit
from hushgrad.run.query import BatchPass, ClippedSum, Part, Summand
from hushgrad.run.step import StepContext
from hushgrad.sampling import FullBatch, Shuffled

GAMMA, C1, C2, LR = 0.2, 0.8, 0.05, 0.5
NET = model()
LOSS = loss_of(NET)


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


def only_part(net: nn.Module) -> Part:
    (part,) = batch_pass(net, loss_of(net), data()).parts()
    return part


def test_without_replay_dropout_would_show() -> None:
    net = model(dropout=0.5)
    params = dict(net.named_parameters())
    first, again = (only_part(net).gradients() for _ in range(2))
    first = first.weighted_sum({n: torch.ones(RECORDS).double() for n in params})
    second = again.weighted_sum({n: torch.ones(RECORDS).double() for n in params})
    assert size(combine((1.0, first), (-1.0, second))) > 0.1


def test_other_points_leave_the_parameters_and_the_generator_alone() -> None:
    net = model(dropout=0.5)
    params = dict(net.named_parameters())
    before, pointers = point_of(net), [p.data_ptr() for p in params.values()]
    elsewhere = {name: x + 1 for name, x in before.items()}
    part = only_part(net)
    state = torch.get_rng_state()
    part.at(elsewhere)
    assert torch.equal(state, torch.get_rng_state())
    assert pointers == [p.data_ptr() for p in params.values()]
    assert all(torch.equal(before[n], p) for n, p in params.items())


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
        work = batch_pass(net, loss, one)
        found = srm._query(_round(work), before).bounded(work)
        assert found.l2 == bound(most)
        assert size(found.sum) <= most * (1 + 1e-5)


def test_a_bound_with_c1_and_c2_swapped_would_be_broken() -> None:
    """Trap 5: section 7.1 prints (1 − γ)C1 + γC2, which far-apart points exceed or waste."""
    net = model()
    before = {n: p.detach() + 3.0 for n, p in net.named_parameters()}
    x, y = data(1)
    wide = Srm(0.9, abadi(1e-3))
    work = batch_pass(net, loss_of(net), (30 * x, 1 - y))
    found = size(wide._query(_round(work), before).bounded(work).sum)
    assert found > 2 * ((1 - 0.9) * C1 + 0.9 * 1e-3)
    assert found <= (0.9 * C1 + 0.1 * 1e-3) * (1 + 1e-5)


def _round(work: BatchPass) -> StepContext:
    permit = Permit(1, (Allowance(ClippedSum, gaussian_noise(1.0)),), work.batch)
    return StepContext(Rng.fixed(0), permit, work, abadi(C1))


def test_the_average_is_that_of_the_points(monkeypatch) -> None:
    seen = watched(plan_of(Srm(GAMMA, abadi(C2), output=average(skipped=2))), monkeypatch)
    mean = combine(*((1 / 6, theta) for theta in seen.points[3:]))
    assert_close(point_of(seen.net), mean, 1e-12)


def test_metrics_ride_beside_both_terms(monkeypatch) -> None:
    """Their room is a share of the bound on both, and the noise grows with it."""
    plan = plan_of(Srm(GAMMA, abadi(C2)), metrics=Metrics(share=0.1))
    seen = watched(plan, monkeypatch)
    both = math.hypot(1.0, 0.1) * (GAMMA * C1 + (1 - GAMMA) * C2)
    assert all(found.l2 == bound(both) for found in seen.sums[1:])


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
        (lambda: plan_of(Srm(0.1, output=smallest())), "does not read a step's sum"),
        (
            lambda: plan_of(
                Srm(0.1, first_batch=30), sampling=Shuffled(12), relation=Relation.REPLACE_ONE
            ),
            "Poisson sampling or sampling without",
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
    context = _round(batch_pass(net, loss_of(net), data()))
    query = ClippedSum(lambda here: [Summand(here, abadi(1.0))])
    context.release(query)
    with pytest.raises(Refused, match="at most 1 release at step 1"):
        context.release(query)


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
        work = batch_pass(net, loss, words, execution)
        found = Srm(GAMMA, abadi(C2))._query(_round(work), before).bounded(work)
        assert found.l2 == bound(GAMMA * C1 + (1 - GAMMA) * C2)
        return found.sum

    fast, slow = summed(Execution(form=hg.gradients.traced)), summed(Execution(form=loop))
    assert_close(fast, slow, 2e-4)
    assert_close(summed(Execution(micro_batch=8)), slow, 2e-4)


def test_a_compiled_pass_sees_both_points() -> None:
    """What is recorded at one point must not stand for the other."""
    net = model().float()
    params = dict(net.named_parameters())
    x, y = data(16)
    before = {n: p.detach() + 0.5 for n, p in params.items()}

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(net(batch[0]), batch[1], reduction="none")

    def summed(execution: Execution) -> dict[str, torch.Tensor]:
        work = batch_pass(net, loss, (x.float(), y), execution)
        return Srm(GAMMA, abadi(1.0))._query(_round(work), before).bounded(work).sum

    slow = summed(Execution(form=loop))
    for _ in range(2):
        assert_close(summed(Execution(compile=True)), slow, 1e-4)


def test_a_term_that_is_subtracted_counts_in_the_bound() -> None:
    """A record moves the sum by both of its terms, whatever their signs are."""
    net = model()
    x, y = data(1)
    query = ClippedSum(
        lambda here: [Summand(here, abadi(0.1)), Summand((-1.0) * here, abadi(0.1), -2.0)]
    )
    found = query.bounded(batch_pass(net, loss_of(net), (10 * x, y)))
    assert size(found.sum) > 0.29
    assert found.l2 == bound(0.3)
