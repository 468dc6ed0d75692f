"""Local reports: each record sends its clipped gradient with noise of its own."""

from __future__ import annotations

import math

import dp_accounting as dp
import numpy as np
import pytest
import torch
from record_by_record import (
    RECORDS,
    Spy,
    bound,
    clipped,
    combine,
    data,
    gradients_at,
    plan_of,
    size,
    watched,
)
from scipy import stats
from torch import Tensor

from hushgrad import Refused, Relation, Rng
from hushgrad.accounting import PLD, PureDpEvent
from hushgrad.algorithms import LocalGd, hemisphere, local, report, smallest
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.run.execution import Execution
from hushgrad.run.metrics import Metrics
from hushgrad.sampling import FullBatch

C1 = 0.8
FULL = {"sampling": FullBatch(), "batch": RECORDS, "epochs": 4}
LOCAL = FULL | {"relation": Relation.REPLACE_ONE}


@pytest.mark.parametrize("micro_batch", [None, 16])
def test_each_record_reports_its_clipped_gradient_with_noise_of_its_own(
    monkeypatch, micro_batch: int | None
) -> None:
    spy = Spy(monkeypatch)
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
    spy = Spy(monkeypatch)
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
    with pytest.raises(Refused, match="does not read a step's sum"):
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
    spy = Spy(monkeypatch)
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
