"""A run that goes on: bit-identical with its key, charged again without it or where it differs."""

from __future__ import annotations

import math
import stat
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from resumed_runs import STEPS, Trainer
from scipy import stats
from small_runs import RECORDS, data, small_plan
from torch import nn

import hushgrad as hg
from hushgrad import Refused, Relation, Rng
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.clipping.rules import Adaptive
from hushgrad.run.metrics import Metrics
from hushgrad.sampling import CyclicPoisson, Shuffled


@pytest.mark.parametrize("rng", [Rng.fixed(3), Rng.from_os()], ids=["seed", "secret"])
@pytest.mark.parametrize("metrics", [None, Metrics()], ids=["bare", "metrics"])
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(
    tmp_path: Path, rng: Rng, metrics
) -> None:
    """Killed at step 7, after a checkpoint at 4: steps 4 to 6 are replayed, for nothing."""
    plan = small_plan(metrics=metrics)
    first = Trainer(tmp_path / "run", plan, rng).go(until=7, save_at=4)
    again = Trainer(tmp_path / "run", plan, Rng.from_os(), resume=True)
    assert again.run.steps_taken == 4
    again.go(until=7)
    assert torch.equal(again.weights, first.weights)
    assert again.run.readings == first.run.readings
    again.go()
    assert again.run.guarantee.charges == ()
    if rng.reproducible:
        whole = Trainer(tmp_path / "whole", plan, rng).go()
        assert torch.equal(again.weights, whole.weights)


def test_a_run_resumes_from_its_start_too(tmp_path: Path) -> None:
    first = Trainer(tmp_path, small_plan(), Rng.from_os()).go(until=3)
    again = Trainer(tmp_path, small_plan(), Rng.from_os(), resume=True).go(until=3)
    assert torch.equal(again.weights, first.weights)
    assert again.run.guarantee.charges == ()


def test_without_the_key_every_step_since_the_checkpoint_is_charged(tmp_path: Path) -> None:
    plan = small_plan()
    first = Trainer(tmp_path, plan, Rng.from_os()).go(until=7, save_at=4)
    (tmp_path / "key").unlink()
    again = Trainer(tmp_path, plan, Rng.from_os(), resume=True).go(until=7)
    assert not torch.equal(again.weights, first.weights)
    again.go()
    (charge,) = again.run.guarantee.charges
    # Ten steps were entered ahead, and any of those from 4 on may have been released.
    assert charge.epsilon == plan.epsilon_after(STEPS - 4)
    assert again.run.guarantee.epsilon == plan.epsilon + charge.epsilon
    assert again.run.guarantee.delta == 2e-4
    assert "of which the plan's" in str(again.run.guarantee)


def test_a_step_that_comes_out_otherwise_is_charged_as_two_of_one_batch(tmp_path: Path) -> None:
    """Another number of threads, say: the batch is the same, so the two are one event of σ/√2."""
    plan = small_plan()
    Trainer(tmp_path, plan, Rng.from_os()).go(until=7, save_at=4)
    again = Trainer(tmp_path, plan, Rng.from_os(), resume=True)
    again.factor = 1 + 1e-3
    again.go()
    (charge,) = again.run.guarantee.charges
    harsher = small_plan(noise_multiplier=1 / math.sqrt(2))
    assert charge.epsilon == pytest.approx(harsher.epsilon_after(3), rel=1e-6)
    assert charge.epsilon > plan.epsilon_after(3)


def test_a_third_release_of_a_batch_is_charged_as_three(tmp_path: Path) -> None:
    plan = small_plan()
    Trainer(tmp_path, plan, Rng.from_os()).go(until=7, save_at=4)
    for shift in (1e-3, 2e-3):
        again = Trainer(tmp_path, plan, Rng.from_os(), resume=True)
        again.factor = 1 + shift
        again.go(until=7)
    charges = again.run.guarantee.charges
    expected = [small_plan(noise_multiplier=1 / math.sqrt(n)).epsilon_after(3) for n in (2, 3)]
    assert [c.epsilon for c in charges] == pytest.approx(expected, rel=1e-6)


def test_an_edited_record_is_charged(tmp_path: Path) -> None:
    plan = small_plan()
    Trainer(tmp_path, plan, Rng.from_os()).go(until=7, save_at=4)
    x, y = data()
    x[0, 0] += 1
    again = Trainer(tmp_path, plan, Rng.from_os(), resume=True, records=(x, y)).go()
    assert len(again.run.guarantee.charges) == 1


def test_no_try_draws_the_batches_of_an_earlier_one(tmp_path: Path) -> None:
    """Data that are edited and edited back: a charge for other batches must be for others."""
    plan, edited = small_plan(), data()
    edited[0][0, 0] += 1
    first = Trainer(tmp_path, plan, Rng.from_os()).go(until=7, save_at=4)
    names = [first.run._memory.sampling.name]
    for records in (edited, data()):
        again = Trainer(tmp_path, plan, Rng.from_os(), resume=True, records=records).go(until=7)
        names.append(again.run._memory.sampling.name)
    assert len(set(names)) == 3
    assert len(again.run.guarantee.charges) == 2


def test_a_second_crash_without_the_key_is_told_from_the_first(tmp_path: Path) -> None:
    """The steps of the second key are replayed for nothing, and charged where they differ."""
    plan = small_plan()
    Trainer(tmp_path, plan, Rng.from_os()).go(until=7, save_at=4)
    (tmp_path / "key").unlink()
    second = Trainer(tmp_path, plan, Rng.from_os(), resume=True).go(until=7)
    third = Trainer(tmp_path, plan, Rng.from_os(), resume=True).go(until=7)
    assert torch.equal(second.weights, third.weights)
    assert len(third.run.guarantee.charges) == 1
    fourth = Trainer(tmp_path, plan, Rng.from_os(), resume=True)
    fourth.factor = 1 + 1e-3
    fourth.go(until=7)
    assert len(fourth.run.guarantee.charges) == 2


def test_batches_are_bound_to_the_data_and_the_plan(tmp_path: Path) -> None:
    x, y = data()
    other = (x + 1, y)
    drawn = []
    for records, plan in (
        (data(), small_plan()),
        (data(), small_plan()),
        (other, small_plan()),
        (data(), small_plan(noise_multiplier=2.0)),
    ):
        net = nn.Linear(6, 2)
        run = hg.train(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            (*records, torch.arange(RECORDS)),
            plan=plan,
            rng=Rng.fixed(0),
        )
        drawn.append([batch[2].tolist() for batch in run._batches(range(len(run)))])
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2] and drawn[0] != drawn[3]


def test_an_epoch_that_is_dealt_anew_from_its_middle_costs_one_more(tmp_path: Path) -> None:
    """Without the key a record that was dealt before step 4 may be dealt again after it."""
    plan = small_plan(sampling=Shuffled(40), relation=Relation.REPLACE_ONE)
    Trainer(tmp_path, plan, Rng.from_os()).go(until=7, save_at=4)
    (tmp_path / "key").unlink()
    again = Trainer(tmp_path, plan, Rng.from_os(), resume=True).go()
    (charge,) = again.run.guarantee.charges
    assert charge.epsilon == plan.spent(plan.released_again(range(3, STEPS), times=1))


def test_an_epoch_of_edited_data_is_dealt_anew_and_costs_one_more(tmp_path: Path) -> None:
    """No step is replayed, but the batches after step 4 are others than the key gave before."""
    plan = small_plan(sampling=Shuffled(40), relation=Relation.REPLACE_ONE)
    Trainer(tmp_path, plan, Rng.from_os()).go(until=4, save_at=4)
    x, y = data()
    x[0, 0] += 1
    again = Trainer(tmp_path, plan, Rng.from_os(), resume=True, records=(x, y)).go()
    (charge,) = again.run.guarantee.charges
    assert charge.epsilon >= plan.spent(plan.released_again([0], times=1))


def test_groups_that_are_drawn_anew_cost_one_more_turn(tmp_path: Path) -> None:
    """A record whose turn has just been may be in the group whose turn is next."""
    plan = small_plan(sampling=CyclicPoisson(0.1, cycle=5))
    Trainer(tmp_path, plan, Rng.from_os()).go(until=7, save_at=4)
    (tmp_path / "key").unlink()
    again = Trainer(tmp_path, plan, Rng.from_os(), resume=True).go()
    (charge,) = again.run.guarantee.charges
    assert charge.epsilon == plan.spent(plan.released_again(range(3, STEPS), times=1))


def test_the_noise_of_a_seed_is_not_made_secret_by_losing_the_key(tmp_path: Path) -> None:
    Trainer(tmp_path, small_plan(), Rng.fixed(3)).go(until=4, save_at=4)
    (tmp_path / "key").unlink()
    with pytest.raises(Refused, match="began with it, got a secret key"):
        Trainer(tmp_path, small_plan(), Rng.from_os(), resume=True)
    assert not (tmp_path / "key").exists()
    again = Trainer(tmp_path, small_plan(), Rng.fixed(3), resume=True).go()
    assert again.run.guarantee.epsilon == math.inf


def test_the_key_is_the_owners_alone_and_gone_at_the_end(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, small_plan(), Rng.from_os())
    file = tmp_path / "key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = bytes.fromhex(file.read_text().split()[2])
    trainer.go(until=5, save_at=5)
    for other in tmp_path.iterdir():
        if other != file:
            content = other.read_bytes()
            assert secret not in content and secret.hex().encode() not in content
    trainer.go()
    assert not file.exists()
    again = Trainer(tmp_path, small_plan(), Rng.from_os(), resume=True)
    assert not file.exists()
    assert list(again.run) == []
    assert torch.equal(again.weights, trainer.weights)


def test_a_finished_run_draws_nothing_more(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, small_plan(), Rng.from_os()).go(until=4)
    trainer.run.finish()
    assert list(trainer.run) == []
    assert trainer.run.guarantee.epsilon == small_plan().epsilon
    assert trainer.run.guarantee.steps_taken == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 0.5}, r"noise_multiplier 1.0 → 0.5"),
        ({"epochs": 2}, r"steps 10 → 20"),
        ({"clip": hg.abadi(2.0)}, r"clip automatic.* → abadi"),
        ({"delta": 1e-5}, r"delta 0.0001 → 1e-05"),
    ],
)
def test_another_plan_is_not_resumed(tmp_path: Path, changes, message: str) -> None:
    Trainer(tmp_path, small_plan(), Rng.from_os()).go(until=4, save_at=4)
    with pytest.raises(Refused, match=message):
        Trainer(tmp_path, small_plan(**changes), Rng.from_os(), resume=True)


def test_a_folder_is_for_one_run(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="expected a checkpoint to resume from"):
        Trainer(tmp_path, small_plan(), Rng.from_os(), resume=True)
    Trainer(tmp_path, small_plan(), Rng.from_os())
    with pytest.raises(Refused, match="a folder without a run in it"):
        Trainer(tmp_path, small_plan(), Rng.from_os())


def test_without_a_folder_there_is_no_checkpoint() -> None:
    net = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = hg.train(net, optimizer, data(), plan=small_plan(), rng=Rng.from_os())
    with pytest.raises(ValueError, match="pass folder= to train"):
        run.save()


def test_the_clipping_norm_goes_on_where_it_was(tmp_path: Path) -> None:
    plan = small_plan(clip=Adaptive(clip_norm=5.0))
    first = Trainer(tmp_path, plan, Rng.from_os()).go(until=4, save_at=4)
    again = Trainer(tmp_path, plan, Rng.from_os(), resume=True)
    assert again.run._clip.clip_norm == first.run._clip.clip_norm != 5.0


@pytest.mark.parametrize("with_key", [True, False])
def test_noise_after_a_resume_has_its_scale_and_is_fresh(tmp_path: Path, with_key: bool) -> None:
    """Two-sided, for the steps after a resume; and no noise is used twice on other sums."""
    plan = small_plan(clip=hg.abadi(0.5), noise_multiplier=2.0)

    def released(resume: bool, until: int) -> list[np.ndarray]:
        net = nn.Linear(6, 400, bias=False)
        nn.init.zeros_(net.weight)
        run = hg.train(
            net,
            torch.optim.SGD(net.parameters(), lr=0.0),
            (torch.zeros(RECORDS, 6),),
            plan=plan,
            rng=Rng.from_os(),
            folder=tmp_path,
            resume=resume,
        )
        found = []
        for batch in run:
            run.step(lambda b: net(b[0]).sum(1), batch)
            found.append(net.weight.grad.double().flatten().numpy() * 40)
            if run.steps_taken == until:
                break
        return found

    before = released(resume=False, until=4)
    if not with_key:
        (tmp_path / "key").unlink()
    after = released(resume=True, until=STEPS)
    scale = 2.0 * 0.5 * (1 + SUM_SLACK)
    for drawn in after:
        assert stats.kstest(drawn, stats.norm(scale=scale).cdf).pvalue > 1e-4
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(drawn, stats.norm(scale=wrong * scale).cdf).pvalue < 1e-4
    for old, new in zip(before, after, strict=False):
        assert np.array_equal(old, new) == with_key
    for one, other in pairwise(after):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.1
