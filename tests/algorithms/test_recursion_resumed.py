"""DP-SRM resumed: bit-identical with its key, charged again without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from record_by_record import RECORDS, data, loss_of, model, plan_of
from torch import nn

import hushgrad as hg
from hushgrad import Relation, Rng
from hushgrad.algorithms import (
    Ball,
    LocalGd,
    PerDistance,
    Sgd,
    SpiderBoost,
    Srm,
    average,
    smallest,
    uniform,
)
from hushgrad.clipping.rules import abadi, automatic
from hushgrad.run.metrics import Metrics
from hushgrad.sampling import FullBatch

GAMMA, C1, C2, LR = 0.2, 0.8, 0.05, 0.5


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
