"""DP-SRM and SpiderBoost: what was drawn and noised is what the event says."""

from __future__ import annotations

import math

import dp_accounting as dp
import pytest
import torch
from dp_accounting.dp_event import NoOpDpEvent
from record_by_record import RECORDS, bound, data, model, plan_of, watched

import hushgrad as hg
from hushgrad import Refused, Relation, Rng
from hushgrad.accounting import PLD, RDP
from hushgrad.algorithms import PerDistance, Sgd, SpiderBoost, Srm
from hushgrad.algorithms.schedule import count_stages
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.clipping.rules import abadi
from hushgrad.events import count_leaves
from hushgrad.sampling import Poisson, TruncatedPoisson, WithoutReplacement

GAMMA, C1, C2, LR = 0.2, 0.8, 0.05, 0.5


def gaussian(multiplier: float) -> dp.GaussianDpEvent:
    return dp.GaussianDpEvent(multiplier)


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


def test_releases_of_one_batch_are_charged_together() -> None:
    plan = plan_of(SpiderBoost(3, PerDistance(1.0), anchor_noise=2.0))
    assert plan.released_again([2, 3, 4], times=4) == dp.ComposedDpEvent(
        [
            dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.2, gaussian(0.35)), 2),
            dp.SelfComposedDpEvent(gaussian(0.7), 1),
        ]
    )


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
    parts = [part for part in count_leaves(plan.event(steps)) if part[0] != NoOpDpEvent()]
    stages = count_stages(plan.stage(step) for step in range(steps))
    expected = [
        (stage.sampling.amplify(gaussian(0.7 * stage.noise), num_records=RECORDS), count)
        for stage, count in stages
    ]
    assert parts == expected


def test_batches_of_which_a_truncated_sampling_must_know_the_number_are_not_hidden() -> None:
    """A schedule of several samplings would get round the check on the number of records."""
    truncated = {"sampling": TruncatedPoisson(0.2, 20)}
    with pytest.raises(Refused, match="Poisson sampling or sampling without"):
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
