"""Runs whose noise is correlated over steps: resumed, forked, refused, and paid for as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import Refused, Relation, Rng
from hushgrad.algorithms import PerDistance, Sgd, SpiderBoost, Srm, average, smallest
from hushgrad.clipping.rules import Adaptive, abadi
from hushgrad.noise import correlated
from hushgrad.run.metrics import Metrics
from hushgrad.run.plan import Plan
from hushgrad.sampling import CyclicPoisson, FullBatch, Poisson

RECORDS, CYCLE = 60, 3
SAMPLED = CyclicPoisson(0.2, cycle=CYCLE)
FULL: dict[str, Any] = {"sampling": FullBatch(), "batch": RECORDS, "epochs": 9}


def plan_of(**options: Any) -> Plan:
    usual = {"records": RECORDS, "batch": 12, "epochs": 1.8, "delta": 1e-3, "noise_multiplier": 2.0}
    return hg.plan(**(usual | {"sampling": SAMPLED, "noise": correlated()} | options))


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(4, 2).double()


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0)).double()
    return x, (x[:, 0] > 0).long()


def run_of(plan: Plan, folder: Path | None = None, **options: Any) -> tuple[hg.Run, nn.Module]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    options = {"rng": Rng.fixed(1)} | options
    return hg.train(net, optimizer, data(), plan=plan, folder=folder, **options), net


def take(run: hg.Run, net: nn.Module, *, upto: int | None = None, scale: float = 1.0) -> None:
    for batch in run:
        run.step(lambda b: scale * F.cross_entropy(net(b[0]), b[1], reduction="none"), batch)
        if run.steps_taken == upto:
            return


def values(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("options", [{}, FULL | {"noise": correlated(bands=3, inverse=True)}])
def test_each_release_is_given_the_tags_of_those_before(options, monkeypatch) -> None:
    past, found = [], []
    real = hg.run.step.release  # type: ignore[attr-defined]

    def spy(*given: Any, **labels: Any) -> Any:
        past.append(list(labels["past"]))
        found.append(real(*given, **labels))
        return found[-1]

    monkeypatch.setattr("hushgrad.run.step.release", spy)
    run, net = run_of(plan_of(**options))
    take(run, net)
    tags = [released.digest for released in found]
    assert len(tags) == 9
    assert past == [tags[:step] for step in range(9)]


def test_the_guarantee_is_that_of_the_whole_run() -> None:
    plan = plan_of()
    expected = plan.noise.run_event(2.0, sampling=SAMPLED, num_records=RECORDS, num_steps=9)
    assert plan.event(9) == expected
    less = plan_of(noise_multiplier=1.6)
    assert plan.epsilon < less.epsilon
    run, net = run_of(plan, rng=Rng.from_os())
    take(run, net, upto=2)
    run.finish()
    assert run.guarantee.epsilon == plan.epsilon
    assert "correlated" in str(run.guarantee)


@pytest.mark.parametrize("options", [{}, FULL | {"noise": correlated(bands=3, inverse=True)}])
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(options, tmp_path) -> None:
    plan = plan_of(**options)
    whole, net = run_of(plan, tmp_path / "whole")
    take(whole, net)
    first, other = run_of(plan, tmp_path / "halves")
    take(first, other, upto=4)
    first.save()
    take(first, other, upto=6)  # steps that no checkpoint has: they are replayed
    second, again = run_of(plan, tmp_path / "halves", resume=True)
    take(second, again)
    assert torch.equal(values(net), values(again))
    assert second.guarantee.charges == ()


def test_a_step_that_comes_out_otherwise_is_charged_as_one_more_run(tmp_path) -> None:
    plan = plan_of()
    first, net = run_of(plan, tmp_path, rng=Rng.from_os())
    first.save()
    take(first, net, upto=6)
    second, again = run_of(plan, tmp_path, rng=Rng.from_os(), resume=True)
    take(second, again, scale=0.5)
    (charge,) = second.guarantee.charges
    twice = plan.noise.run_event(2.0, sampling=SAMPLED, num_records=RECORDS, num_steps=9, runs=2)
    assert charge.event == twice
    assert charge.epsilon == plan.spent(twice) > plan.epsilon


def test_without_its_key_it_cannot_go_on(tmp_path) -> None:
    plan = plan_of()
    first, net = run_of(plan, tmp_path, rng=Rng.from_os())
    take(first, net, upto=2)
    first.save()
    (tmp_path / "key").unlink()
    with pytest.raises(Refused, match="the key and the data that the run began with"):
        run_of(plan, tmp_path, rng=Rng.from_os(), resume=True)


def test_a_batch_without_a_step_ends_the_run() -> None:
    run, _ = run_of(plan_of())
    batches = iter(run)
    next(batches)
    with pytest.raises(Refused, match=r"run\.step for each batch"):
        next(batches)


def test_a_checkpoint_holds_tags_and_no_noise(tmp_path) -> None:
    run, net = run_of(plan_of(), tmp_path)
    take(run, net, upto=4)
    state = run.state()
    assert state["tags"].shape == (4, 16)
    assert not any("buffer" in name for name in state)


def test_a_ledger_gives_nothing_back(tmp_path) -> None:
    ledger = hg.Ledger(tmp_path / "ledger.sqlite")
    budget = ledger.set_budget(
        "x",
        epsilon=100,
        delta=0.1,
        rule=hg.ledger.renyi(8.0),  # type: ignore[attr-defined]
    )
    plan = plan_of(**FULL, accountant=hg.accounting.RDP)
    run, net = run_of(plan, budget=budget, rng=Rng.from_os())
    before = budget.spent
    take(run, net, upto=3)
    run.finish()
    assert budget.spent == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": Poisson(0.2), "noise": correlated(bands=3)}, "as many bands"),
        ({"clip": Adaptive(), "metrics": Metrics()}, "one clipping norm"),
        ({"relation": Relation.REPLACE_ONE}, "add-remove"),
        ({"algorithm": Srm(0.2, abadi(0.1))}, "steps that are all alike"),
        (
            {"algorithm": SpiderBoost(3, PerDistance(1.0))},
            r"steps that are all alike|rate \* cycle",
        ),
        ({"algorithm": Sgd(smallest())}, "does not read a single release"),
        ({"noise": correlated(bands=CYCLE + 1)}, "as many bands"),
    ],
)
def test_what_its_event_does_not_cover_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((Refused, ValueError), match=message):
        plan_of(**options)


def test_metrics_and_averages_go_with_it() -> None:
    run, net = run_of(plan_of(metrics=Metrics(), algorithm=Sgd(average())))
    take(run, net)
    assert len(run.readings) == 9
