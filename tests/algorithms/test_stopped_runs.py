"""Runs that stop at a drawn step or show a drawn iterate: what they cost and what they show."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from record_by_record import data, loss_of, model, plan_of, point_of, watched

import hushgrad as hg
from hushgrad import Refused, Rng
from hushgrad.accounting import PLD, MixedDpEvent
from hushgrad.algorithms import Srm, stopped, uniform
from hushgrad.algorithms.output import draw_stop
from hushgrad.clipping.rules import abadi
from hushgrad.run.metrics import Metrics

GAMMA, C1, C2, LR = 0.2, 0.8, 0.05, 0.5


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
