"""LDP-GD, DP-FedAvg and DP-AGD: each report, client or measurement is what is accounted for."""

from __future__ import annotations

import math
from pathlib import Path

import dp_accounting as dp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dp_accounting.dp_event import ZCDpEvent
from record_by_record import (
    FEATURES,
    RECORDS,
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
from scipy import stats
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import Refused, Relation, Rng
from hushgrad.accounting import PLD, RDP, PureDpEvent
from hushgrad.algorithms import (
    Agd,
    FedAvg,
    LocalGd,
    Sgd,
    adaptive,
    hemisphere,
    local,
    report,
    smallest,
)
from hushgrad.algorithms.adaptive import _mean, budget
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.noise import Noise, release
from hushgrad.run.execution import Execution
from hushgrad.run.metrics import Metrics
from hushgrad.run.step import BatchPass, Summand
from hushgrad.sampling import FullBatch
from hushgrad.types import Bounded

C1 = 0.8
FULL = {"sampling": FullBatch(), "batch": RECORDS, "epochs": 4}
LOCAL = FULL | {"relation": Relation.REPLACE_ONE}


class Spy:
    """Notes each release of an algorithm's own."""

    def __init__(self, monkeypatch, module: str) -> None:
        self.bounded: list[Bounded] = []
        self.noises: list[Noise] = []
        self.values: list[dict[str, Tensor]] = []
        monkeypatch.setattr(f"hushgrad.algorithms.{module}.release", self)

    def __call__(self, bounded: Bounded, noise: Noise, *, rng: Rng, step: int):
        found = release(bounded, noise, rng=rng, step=step)
        self.bounded.append(bounded)
        self.noises.append(noise)
        self.values.append({n: x.clone() for n, x in found.values.items()})
        return found


# --- local differential privacy ---


@pytest.mark.parametrize("micro_batch", [None, 16])
def test_each_record_reports_its_clipped_gradient_with_noise_of_its_own(
    monkeypatch, micro_batch: int | None
) -> None:
    spy = Spy(monkeypatch, "local")
    plan = plan_of(LocalGd(), **LOCAL, noise_multiplier=3.0)
    seen = watched(plan, monkeypatch, execution=Execution(micro_batch=micro_batch))
    parts = 1 if micro_batch is None else 4
    sent = torch.cat([found["reports"] for found in spy.values[:parts]])
    exact = torch.cat([found.sum["reports"] for found in spy.bounded[:parts]])
    each = [clipped(g, C1) for g in gradients_at(seen.points[0], seen.batches[0])]
    flat = torch.stack([torch.cat([x.flatten() for x in g.values()]) for g in each])
    assert torch.allclose(exact, flat, atol=1e-6)
    assert float(torch.linalg.vector_norm(exact, dim=1).max()) <= C1 * (1 + 1e-9)
    assert {found.l2 for found in spy.bounded} == {C1 * (1 + SUM_SLACK)}
    assert {found.noise_multiplier for found in spy.noises} == {3.0}
    noise = ((sent - exact) / (3.0 * C1 * 1.001)).flatten().numpy()
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    assert stats.kstest(1.5 * noise, "norm").pvalue < 1e-6
    mean = sent.sum(0) / RECORDS
    moved = torch.cat([x.flatten() for x in seen.points[1].values()])
    start = torch.cat([x.flatten() for x in seen.points[0].values()])
    assert torch.allclose(moved, start - 0.5 * mean, atol=1e-9)
    assert plan.event(4) == dp.SelfComposedDpEvent(dp.GaussianDpEvent(3.0), 4)


def test_equal_records_in_two_micro_batches_do_not_share_their_noise(monkeypatch) -> None:
    spy = Spy(monkeypatch, "local")
    x, y = data(8)
    twice = (torch.cat([x, x]), torch.cat([y, y]))
    plan = plan_of(LocalGd(), **(LOCAL | {"batch": 16, "records": 16, "epochs": 1}))
    watched(plan, monkeypatch, records=twice, execution=Execution(micro_batch=8))
    assert torch.equal(spy.bounded[0].sum["reports"], spy.bounded[1].sum["reports"])
    assert not torch.equal(spy.values[0]["reports"], spy.values[1]["reports"])


def test_any_two_records_are_compared() -> None:
    """Trap 4: Theorem D.2's noise, for sensitivity L, claims 1 and gives 1.63."""
    printed = math.sqrt(2 * math.log(1e5))
    plan = plan_of(LocalGd(), **(LOCAL | {"epochs": 1}), noise_multiplier=printed, delta=1e-5)
    assert plan.epsilon == pytest.approx(1.63, abs=0.01)
    assert PLD.epsilon(dp.GaussianDpEvent(printed), delta=1e-5) < 1.0
    met = plan_of(LocalGd(), **LOCAL, noise_multiplier=None, epsilon=1.0)
    assert 0.99 < met.epsilon <= 1.0


def test_local_plans_that_are_not_local_are_refused() -> None:
    with pytest.raises(Refused, match="any two records"):
        plan_of(LocalGd(), **FULL)
    with pytest.raises(Refused, match="full batches"):
        plan_of(LocalGd(), relation=Relation.REPLACE_ONE)
    with pytest.raises(Refused, match="no metrics"):
        plan_of(LocalGd(), **LOCAL, metrics=Metrics())
    with pytest.raises(Refused, match="recursive estimates"):
        plan_of(LocalGd(output=smallest()), **LOCAL)


@pytest.mark.parametrize("length", [0.0, 0.3, 1.0])
def test_a_pure_report_is_the_vector_in_the_mean(length: float) -> None:
    vector = torch.zeros(5).double()
    vector[1], vector[3] = 0.6 * length, -0.8 * length
    rows = vector.expand(40_000, 5)
    found = hemisphere(rows, 1.5, bound=1.0, rng=Rng.fixed(1))
    radius = torch.linalg.vector_norm(found, dim=1)
    assert torch.allclose(radius, radius[0].expand(len(radius)))
    assert float((found.mean(0) - vector).norm()) < 5 * float(radius[0]) / 200


def test_a_pure_report_keeps_its_epsilon_and_no_less() -> None:
    """Between the two farthest records the chance of a side differs by e^ε, as it should."""
    epsilon = 1.2
    toward = torch.tensor([[1.0, 0.0, 0.0]]).double().expand(60_000, 3)
    rates = [
        float((hemisphere(v, epsilon, bound=1.0, rng=Rng.fixed(2))[:, 0] > 0).double().mean())
        for v in (toward, -toward)
    ]
    ratio = math.log(rates[0] / rates[1])
    assert ratio == pytest.approx(epsilon, abs=0.04)
    with pytest.raises(ValueError, match="0 < epsilon"):
        hemisphere(toward, 0.0, bound=1.0, rng=Rng.fixed(2))


class Even(Rng):
    """Coins that are evenly spaced numbers, so that shares are exact."""

    def __init__(self) -> None:
        super().__init__(bytes(32), reproducible=True)

    def derive(self, *labels: int | str | bytes) -> Rng:
        return self if labels == ("coins",) else Rng.fixed(1).derive(*labels)

    def uniforms(self, count: int, *, start: int = 0) -> np.ndarray:
        spaced = (np.arange(count // 2) + 0.5) / (count // 2)
        return np.concatenate([np.full(count // 2, 1e-9), spaced])


@pytest.mark.parametrize("epsilon", [0.1, 1.2, 5.0])
def test_the_coin_of_a_pure_report_has_its_chance_and_no_more(epsilon: float) -> None:
    """With vectors at the bound the sides' odds are e^ε, to 0.1 %, and never above it."""
    count = 200_000
    toward = torch.tensor([[1.0, 0.0]]).double().expand(count, 2)
    found = hemisphere(toward, epsilon, bound=1.0, rng=Even())
    share = float((found[:, 0] > 0).double().mean())
    exact = 1 / (1 + math.exp(-epsilon))
    assert exact - 1e-3 * (1 - exact) - 1 / count <= share <= exact + 1 / count


def test_a_pure_coin_that_cannot_be_thrown_is_refused() -> None:
    with pytest.raises(ValueError, match="<= 20"):
        hemisphere(torch.ones(1, 2).double(), 40.0, bound=2.0, rng=Rng.fixed(0))


def test_pure_reports_of_other_rows_have_draws_of_their_own(monkeypatch) -> None:
    """A step that is taken again on changed records must not throw the same coins.

    Where the draws were those of the first time, a record's second report would be ± its first,
    and the sign would tell, unprotected, whether its gradient changed sides.
    """
    plan = plan_of(LocalGd(pure=True), **(LOCAL | {"epochs": 1}), noise_multiplier=1.0)
    x, y = data()
    sent = []
    real = local.hemisphere

    def spy(rows: Tensor, epsilon: float, *, bound: float, rng: Rng) -> Tensor:
        assert epsilon == 1.0
        assert bound == C1 * (1 + SUM_SLACK)
        assert float(torch.linalg.vector_norm(rows, dim=1).max()) <= C1 * (1 + 1e-9)
        sent.append(real(rows, epsilon, bound=bound, rng=rng))
        return sent[-1]

    monkeypatch.setattr(local, "hemisphere", spy)
    for records in ((x, y), (x, y), (x, 1 - y)):
        watched(plan, monkeypatch, records=records)
    assert torch.equal(sent[0], sent[1])  # a replay is no second release
    unsigned = (sent[0].abs() - sent[2].abs()).abs().max(1).values
    assert float(unsigned.min()) > 1e-3


def test_a_pure_run_learns_and_is_accounted_for(monkeypatch) -> None:
    plan = plan_of(LocalGd(pure=True), **LOCAL, noise_multiplier=0.5)
    assert plan.event(4) == dp.SelfComposedDpEvent(PureDpEvent(2.0), 4)
    assert plan.epsilon <= 8.0 + 1e-2
    seen = watched(plan, monkeypatch, lr=0.01)
    assert size(combine((1.0, seen.points[1]), (-1.0, seen.points[0]))) > 0


def test_a_record_on_its_own_sends_the_same_kind_of_report(monkeypatch) -> None:
    spy = Spy(monkeypatch, "local")
    gradient = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}
    asked = {"clip_norm": 1.0, "noise_multiplier": 2.0}
    sent = [report(gradient, **asked, rng=Rng.fixed(k), step=0) for k in range(400)]
    first = torch.stack([found["a"][0] for found in sent]).numpy()
    assert stats.kstest((first - 0.6) / (2.0 * 1.001), "norm").pvalue > 1e-3
    assert size(spy.bounded[0].sum) == pytest.approx(1.0, rel=1e-12)
    assert spy.bounded[0].l2 == bound(1.0)
    assert spy.noises[0].noise_multiplier == 2.0
    lost = report({"a": torch.tensor([math.nan, 1.0])}, **asked, rng=Rng.fixed(0), step=0)
    assert bool(lost["a"].isfinite().all())


# --- clients ---


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
        work = BatchPass(loss_of(net), dict(net.named_parameters()), one, modules=(net,))
        found = work.sum(lambda part: [Summand(FedAvg(0.4, 2).updates(part), hg.normalize(0.1))])
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


# --- adaptive budgets ---


def agd_plan(**changes):
    options = FULL | {"epochs": 40, "accountant": RDP, "noise_multiplier": 0.5}
    return plan_of(Agd(largest_loss=3.0, splits=4, choices=5), **(options | changes))


@pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.REPLACE_ONE])
def test_what_was_measured_and_chosen_stays_within_the_budget(monkeypatch, relation) -> None:
    spy = Spy(monkeypatch, "adaptive")
    plan = agd_plan(relation=relation)
    seen = watched(plan, monkeypatch, lr=1.0)
    double = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    spent = 0.0
    for bounded, noise in zip(spy.bounded, spy.noises, strict=True):
        if noise.name == "gaussian":
            assert bounded.l2 == bound(C1)
            spent += (double / noise.noise_multiplier) ** 2 / 2
        else:  # scores that move by Δ, on a grid of 2⁻¹⁴ of the noise: ε-DP, ε²/2-zCDP
            assert bounded.l1 == bound(3.0)
            spent += (2 / noise.noise_multiplier + 2**-14) ** 2 / 2
    rho = budget(0.5, relation)
    assert rho == double**2 / 0.5
    assert spent <= rho
    assert spent > 0.6 * rho  # and it was used
    assert spent == pytest.approx(rho - seen.run._remembered["left"], rel=1e-6)
    assert plan.event(40) == plan.event(1) == ZCDpEvent(rho)
    assert seen.run._remembered["over"]
    assert seen.run.steps_taken < 40


def test_a_step_is_the_chosen_length_along_the_measured_gradient(monkeypatch) -> None:
    spy = Spy(monkeypatch, "adaptive")
    seen = watched(agd_plan(noise_multiplier=0.02), monkeypatch, lr=1.0, penalty=0.01)
    each = [clipped(g, C1) for g in gradients_at(seen.points[0], seen.batches[0])]
    assert_close(spy.bounded[0].sum, total(each, seen.points[0]), 1e-6)
    mean = {n: x / RECORDS + 0.02 * seen.points[0][n] for n, x in spy.values[0].items()}
    scores = []
    for k in range(5):
        theta = combine((1.0, seen.points[0]), (-2.0 * k / 4 / size(mean), mean))
        net = model()
        net.load_state_dict(theta)
        losses = loss_of(net)(data()).detach().clamp(0, 3.0).sum()
        scores.append(float(losses + RECORDS * 0.01 * size(theta) ** 2))
    assert torch.allclose(spy.bounded[1].sum["scores"], torch.tensor(scores).double(), atol=1e-5)
    chosen = int(spy.values[1]["scores"].argmin())
    assert chosen > 0
    step = combine((1.0, seen.points[0]), (-2.0 * chosen / 4 / size(mean), mean))
    assert_close(seen.points[1], step, 1e-6)


def test_a_gradient_that_leads_nowhere_is_measured_again_and_averaged(monkeypatch) -> None:
    """The choice is made to fall on no step twice, and then on the third length of five."""
    spy = Spy(monkeypatch, "adaptive")
    chosen = iter([0, 0, 2])
    monkeypatch.setattr(Agd, "_least", lambda self, scores, rho, context: next(chosen))
    seen = watched(agd_plan(epochs=1), monkeypatch, lr=1.0)
    first = budget(0.5, Relation.ADD_REMOVE) / 8
    costs = [1 / noise.noise_multiplier**2 / 2 for noise in spy.noises]
    assert costs == pytest.approx([first, 0.1 * first, 0.11 * first])  # γ of what is known
    weighted = combine(*((c / sum(costs), x) for c, x in zip(costs, spy.values, strict=True)))
    step = combine((1.0, seen.points[0]), (-2.0 * 2 / 4 / size(weighted), weighted))
    assert_close(seen.points[1], step, 1e-9)
    assert seen.run._remembered["gradient"] == pytest.approx(sum(costs))


def test_two_measurements_are_as_good_as_one_of_both_costs() -> None:
    """Weights by ρ give the variance of a single measurement for the sum of the costs."""
    draws = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0)).double()
    costs = (3.0, 1.0)
    old, new = (x / math.sqrt(2 * rho) for x, rho in zip(draws, costs, strict=True))
    mean = _mean(old, costs[0], new, costs[1])
    assert float(mean.std()) == pytest.approx(1 / math.sqrt(2 * sum(costs)), rel=0.02)
    assert float(((old + new) / 2).std()) > 1.1 / math.sqrt(2 * sum(costs))


def test_a_loss_of_one_record_moves_a_score_by_at_most_its_bound(monkeypatch) -> None:
    spy = Spy(monkeypatch, "adaptive")
    x, y = data()
    far = x.clone()
    far[0] *= 1e6
    for records in ((x, y), (far, 1 - y)):
        watched(agd_plan(epochs=1), monkeypatch, lr=1.0, records=records)
    for found in spy.bounded:
        if "scores" in found.sum:
            assert float(found.sum["scores"].max()) <= 3.0 * RECORDS
            assert float(found.sum["scores"].min()) >= 0


def test_scores_of_the_farthest_records_reach_their_bound_and_stop_there(monkeypatch) -> None:
    """Every record at the largest loss: a clamp that is 1 % off shows."""
    spy = Spy(monkeypatch, "adaptive")
    x, _ = data()
    wrong = 1 - model()(x).argmax(1)  # losses above log 2
    plan = plan_of(Agd(0.5, splits=4), **(FULL | {"epochs": 1, "accountant": RDP}))
    watched(plan, monkeypatch, lr=1.0, records=(x, wrong))
    scores = next(found for found in spy.bounded if "scores" in found.sum)
    assert float(scores.sum["scores"][0]) == pytest.approx(0.5 * RECORDS, rel=1e-9)
    assert scores.l1 == bound(0.5)


def test_a_penalty_does_not_carry_scores_to_where_a_record_is_lost(monkeypatch) -> None:
    """At 1e20 float64 has steps of 16384, and one record would move a score by that."""
    spy = Spy(monkeypatch, "adaptive")
    seen = watched(agd_plan(epochs=1), monkeypatch, lr=1.0, penalty=1e20)
    scores = [found.sum["scores"] for found in spy.bounded if "scores" in found.sum]
    assert float(torch.stack(scores).max()) == 2.0**36 * 3.0
    assert torch.finfo(torch.float64).eps * 2.0**36 < 1e-3 * SUM_SLACK * RECORDS
    assert seen.run.steps_taken == 1


class Rows(nn.Module):
    """Notes how many rows it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = model(), set[int]()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.seen.add(len(x))
        return self.inner(x)


def test_losses_are_taken_in_batches_that_keep_a_records_bits() -> None:
    """32 rows, the most that any model needs, whichever number certification found."""
    net = Rows()
    plan = agd_plan(epochs=1)
    optimizer, execution = torch.optim.SGD(net.parameters(), lr=1.0), Execution(micro_batch=8)
    run = hg.train(net, optimizer, data(), plan=plan, rng=Rng.fixed(0), execution=execution)
    for batch in run:
        run.step(loss_of(net), batch)
    assert net.seen
    assert all(rows % 32 == 0 for rows in net.seen)


def test_the_ends_share_their_dropout_and_records_do_not(monkeypatch) -> None:
    """The same record in every place of two micro-batches: at one end all draws are its own."""
    x, y = data()
    same = (x[:1].expand(RECORDS, FEATURES).clone(), y[:1].expand(RECORDS).clone())
    parts: list[Tensor] = []
    real = adaptive._losses
    monkeypatch.setattr(adaptive, "_losses", lambda part: parts.append(real(part)) or parts[-1])
    options = {"records": same, "dropout": 0.5, "execution": Execution(micro_batch=32)}
    watched(agd_plan(epochs=1), monkeypatch, lr=1.0, **options)
    one, other = ([found for found in parts if len(found) == n] for n in (32, RECORDS - 32))
    assert len(one) == len(other) > 0
    assert not any(torch.equal(a[: RECORDS - 32], b) for a in one for b in other)


def test_a_run_that_is_over_stays_where_it_is(monkeypatch) -> None:
    """The penalty's gradient is part of a chosen step, and not a step of its own."""
    seen = watched(agd_plan(), monkeypatch, lr=1.0, penalty=0.1)
    assert seen.run._remembered["over"]
    assert_close(seen.points[-1], seen.points[-2], 0.0)


def test_adaptive_budgets_resume_with_the_same_bits(tmp_path: Path) -> None:
    plan = agd_plan(noise_multiplier=0.05)
    nets = [model(), model(), model()]
    runs = []
    for net, folder, until, resume in (
        (nets[0], "whole", None, False),
        (nets[1], "halves", 2, False),
        (nets[2], "halves", None, True),
    ):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        options = {"plan": plan, "rng": Rng.fixed(3), "folder": tmp_path / folder}
        run = hg.train(net, optimizer, data(), **options, resume=resume)
        for batch in run:
            run.step(loss_of(net), batch)
            if run.steps_taken == until:
                run.save()
                break
        runs.append(run)
    assert_close(point_of(nets[0]), point_of(nets[2]), 0.0)
    assert runs[0].steps_taken == runs[2].steps_taken > 2
    assert runs[2].guarantee.charges == ()


def test_another_choice_on_the_same_gradient_is_a_second_release(tmp_path: Path) -> None:
    """A penalty moves the scores and not the sum of gradients: its choice is drawn, and charged."""
    plan = agd_plan(noise_multiplier=0.05)
    for penalty, resume in ((0.0, False), (0.0, True), (0.05, True)):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        options = {"plan": plan, "rng": Rng.from_os(), "folder": tmp_path}
        run = hg.train(net, optimizer, data(), **options, resume=resume)
        for batch in run:

            def decay(weight: float = penalty, net: nn.Module = net) -> Tensor:
                return weight * sum(p.square().sum() for p in net.parameters())  # type: ignore[return-value]

            run.step(loss_of(net), batch, penalty=decay if penalty else None)
            break
        charged = [charge.epsilon for charge in run.guarantee.charges]
        assert len(charged) == (penalty > 0)
    assert charged[0] >= plan.epsilon  # all of ρ, once more at least


def test_adaptive_budgets_need_their_accountant_and_noise() -> None:
    met = agd_plan(noise_multiplier=None, epsilon=1.0)
    assert 0.99 < met.epsilon <= 1.0
    with pytest.raises(Refused, match="rdp accountant"):
        _ = agd_plan(accountant=PLD).epsilon
    with pytest.raises(Refused, match="expected noise"):
        budget(0.0, Relation.ADD_REMOVE)
    with pytest.raises(Refused, match="full batches"):
        plan_of(Agd(3.0))
    with pytest.raises(ValueError, match="largest_loss > 0"):
        Agd(0.0)
    with pytest.raises(ValueError, match="splits >= 2"):
        Agd(3.0, splits=1)
