"""Real training, killed at random points and resumed: every release is paid for, and once only."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import forked
from torch import nn
from torch.nn import functional as F

import hushgrad as hg
from hushgrad.ledger import Budget, Ledger, Rule, renyi, total
from hushgrad.resuming import Memory

STEPS, SAVE_EVERY = 80, 9
PLAN = hg.Plan(
    records=64,
    sampling=hg.sampling.Poisson(0.25),
    steps=STEPS,
    noise_multiplier=2.0,
    delta=1e-5,
    accountant=hg.accounting.RDP,  # quicker than PLD
)
RULES = [total(), renyi(8.0)]


def records(*, edited: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(7)
    x, y = torch.randn(64, 5, generator=chance), torch.arange(64) % 3
    if edited:
        x[3] += 1
    return x, y


def trained(path: Path, folder: Path, tell: Callable[..., None], *, edited: bool = False) -> None:
    """Train from the start or from the checkpoint, telling the weights after each step."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = hg.train(
        model,
        optimizer,
        records(edited=edited),
        plan=PLAN,
        rng=hg.Rng.from_os(),
        budget=Ledger(path).budget("census"),
        folder=folder,
        resume=(folder / "checkpoint.safetensors").exists(),
    )
    for batch in run:
        step = run.steps_taken
        run.step(lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none"), batch)
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        tell(step, hashlib.sha256(weights).hexdigest())
        if run.steps_taken % SAVE_EVERY == 0:
            run.save()


def killed(work: Callable[[Callable[..., None]], None], *, after: int, pause: float) -> list[Any]:
    """What `work` told before it was killed, after so many lines and a pause, or ended."""
    report, end = os.pipe()

    def tell(*what: Any) -> None:
        os.write(end, (json.dumps(what) + "\n").encode())

    child = forked(lambda: work(tell))
    os.close(end)
    with os.fdopen(report, "rb") as lines:
        heard = [lines.readline() for _ in range(after)]
        time.sleep(pause)
        os.kill(child, signal.SIGKILL)  # a child that has ended is still there to be waited for
        status = os.waitpid(child, 0)[1]
        heard += lines.read().splitlines(keepends=True)
    assert status in (0, signal.SIGKILL), "the training itself failed"
    return [json.loads(line) for line in heard if line.endswith(b"\n")]


def plan_cost(budget: Budget) -> tuple[float, ...]:
    """What one run of the plan counts."""
    return budget.account.charges[0].cost


def kill_at_random(folder: Path, rule: Rule, kills: int) -> None:
    path, chance = folder / "ledger.sqlite", random.Random(kills)
    Ledger(path).set_budget("census", epsilon=1e4, delta=0.5, rule=rule)
    weights: dict[int, str] = {}
    number, resumed, finished = 0, 0, 0
    for _ in range(kills):
        own = folder / str(number)
        resumed += (own / "checkpoint.safetensors").exists()
        after, pause = chance.randrange(40), chance.uniform(0, 0.02)
        told = killed(lambda tell, own=own: trained(path, own, tell), after=after, pause=pause)
        for step, digest in told:
            assert weights.setdefault(step, digest) == digest, f"step {step} came out otherwise"
        budget = Ledger(path).budget("census")
        account = budget.account
        # A kill between the charge and the first checkpoint leaves a run that cannot be resumed:
        # its cost stays. Every other run is charged once, whatever happened to it.
        assert {charge.reason for charge in account.charges} <= {"plan"}
        counted = [charge.cost for charge in account.charges]
        assert set(counted) <= {plan_cost(budget)}
        if told:
            entry = budget.entry(account.rows[-1].id)
            assert entry.position >= max(weights) + 1
            assert all(len(entry.digests(step)) == 1 for step in weights)
        if len(weights) == STEPS:
            number, weights, finished = number + 1, {}, finished + 1
    assert resumed >= kills // 4
    assert finished >= kills // 20


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_ten_kills_of_training_each_way(tmp_path: Path, rule: Rule) -> None:
    kill_at_random(tmp_path, rule, 10)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_hundred_kills_of_training_each_way(tmp_path: Path, rule: Rule) -> None:
    kill_at_random(tmp_path, rule, 100)


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[Path, Path]:
    """A ledger, and the folder of a run that was killed after step 20, its checkpoint older."""
    path, folder = tmp_path / "ledger.sqlite", tmp_path / "run"
    Ledger(path).set_budget("census", epsilon=1e4, delta=0.5)
    told = killed(lambda tell: trained(path, folder, tell), after=21, pause=0.0)
    assert len(told) < STEPS
    return path, folder


def finished(path: Path, folder: Path, *, edited: bool = False) -> Budget:
    """The budget after the run was resumed and came to its end."""
    work: Callable[..., None] = lambda tell: trained(path, folder, tell, edited=edited)  # noqa: E731
    told = killed(work, after=STEPS, pause=0.5)
    assert told[-1][0] == STEPS - 1
    assert not (folder / "key").exists()
    return Ledger(path).budget("census")


def test_a_replay_with_the_key_costs_nothing(stopped: tuple[Path, Path]) -> None:
    budget = finished(*stopped)
    (row,) = budget.account.rows
    assert row.settled
    assert budget.spent["epsilon"] == pytest.approx(PLAN.epsilon)


def test_a_kill_between_the_settlement_and_the_last_checkpoint_costs_nothing(
    stopped: tuple[Path, Path],
) -> None:
    def work(tell: Callable[..., None]) -> None:
        save = Memory.save

        def save_or_die(memory: Memory, run: Any) -> None:
            if run.steps_taken == STEPS:
                os.kill(os.getpid(), signal.SIGKILL)
            save(memory, run)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Memory, "save", save_or_die)
            trained(*stopped, tell)

    told = killed(work, after=STEPS, pause=0.0)
    assert told[-1][0] == STEPS - 1
    (row,) = Ledger(stopped[0]).budget("census").account.rows
    assert row.settled
    assert (stopped[1] / "key").exists()
    budget = finished(*stopped)
    assert len(budget.account.charges) == 1
    assert budget.spent["epsilon"] == pytest.approx(PLAN.epsilon)


def test_a_replay_without_the_key_is_charged(stopped: tuple[Path, Path]) -> None:
    (stopped[1] / "key").unlink()
    budget = finished(*stopped)
    entry = budget.entry(budget.account.rows[0].id)
    assert len(entry.digests(20)) == 2
    assert len(entry.spends) == 2
    assert budget.spent["epsilon"] > 1.1 * PLAN.epsilon


def test_a_replay_on_edited_data_is_charged(stopped: tuple[Path, Path]) -> None:
    budget = finished(*stopped, edited=True)
    entry = budget.entry(budget.account.rows[0].id)
    assert len(entry.digests(20)) == 2
    assert len(entry.spends) == 2
    assert budget.spent["epsilon"] > 1.1 * PLAN.epsilon
