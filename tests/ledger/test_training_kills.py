"""Real training, killed at random points and resumed: every release is paid for, and once only."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hushgrad as hg
from charged_runs import forked
from hushgrad.launch.loop import carry_out, start
from hushgrad.launch.report import VERSIONS, Request, write_beginning, write_end
from hushgrad.ledger import Budget, Entry, Filter, Ledger, renyi, total
from hushgrad.ledger.file import File
from hushgrad.noise import correlated
from hushgrad.run import checkpoint, resuming
from hushgrad.types import Refused
from trial_recipes import good

STEPS, SAVE_EVERY = 80, 9
PLAN = hg.Plan(
    records=64,
    sampling=hg.sampling.Poisson(0.25),
    steps=STEPS,
    noise_multiplier=2.0,
    delta=1e-5,
    accountant=hg.accounting.RDP,  # quicker than PLD
)
TURNS = hg.sampling.CyclicPoisson(0.25, cycle=3)
CORRELATED = replace(PLAN, sampling=TURNS, noise=correlated(bands=3).fitted(TURNS, num_steps=STEPS))
WAYS = [(total(), PLAN), (renyi(8.0), PLAN), (total(), CORRELATED)]


def records(*, edited: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(7)
    x, y = torch.randn(64, 5, generator=chance), torch.arange(64) % 3
    if edited:
        x[3] += 1
    return x, y


def trained(
    path: Path,
    folder: Path,
    tell: Callable[..., None],
    *,
    edited: bool = False,
    plan: hg.Plan = PLAN,
) -> None:
    """Train from the start or from the checkpoint, telling the weights after each step."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = hg.train(
        model,
        optimizer,
        records(edited=edited),
        plan=plan,
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


def kill_at_random(folder: Path, rule: Filter, plan: hg.Plan, kills: int) -> None:
    path, chance = folder / "ledger.sqlite", random.Random(kills)
    Ledger(path).set_budget("census", epsilon=1e4, delta=0.5, rule=rule)
    weights: dict[int, str] = {}
    number, resumed, finished = 0, 0, 0
    for _ in range(kills):
        own = folder / str(number)
        resumed += (own / "checkpoint.safetensors").exists()
        after, pause = chance.randrange(40), chance.uniform(0, 0.02)
        work = partial(trained, path, own, plan=plan)
        told = killed(lambda tell, work=work: work(tell), after=after, pause=pause)
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


@pytest.mark.parametrize(("rule", "plan"), WAYS, ids=["total", "renyi", "correlated"])
def test_a_few_kills_of_training_each_way(tmp_path: Path, rule: Filter, plan: hg.Plan) -> None:
    kill_at_random(tmp_path, rule, plan, 5)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "plan"), WAYS, ids=["total", "renyi", "correlated"])
def test_a_hundred_kills_of_training_each_way(tmp_path: Path, rule: Filter, plan: hg.Plan) -> None:
    kill_at_random(tmp_path, rule, plan, 100)


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


@pytest.mark.parametrize("last", ["save", "settle", "destroy"])
def test_a_kill_while_a_run_ends_costs_nothing(stopped: tuple[Path, Path], last: str) -> None:
    """Killed before its last checkpoint, before its settlement, or before its key is destroyed."""

    def work(tell: Callable[..., None]) -> None:
        def save_or_die(path: Path, state: Any) -> None:
            if state["run"]["taken"] == STEPS:
                die()
            write(path, state)

        write = checkpoint.write
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*{
                "save": (checkpoint, "write", save_or_die),
                "settle": (Entry, "settle", die),
                "destroy": (resuming, "destroy", die),
            }[last])  # fmt: skip
            trained(*stopped, tell)

    def die(*arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    told = killed(work, after=STEPS, pause=0.0)
    assert told[-1][0] == STEPS - 1
    (row,) = Ledger(stopped[0]).budget("census").account.rows
    assert bool(row.settled) == (last == "destroy")
    assert (stopped[1] / "key").exists()
    again = killed(lambda tell: trained(*stopped, tell), after=STEPS, pause=0.0)
    assert bool(again) == (last == "save")  # else no step is taken any more
    assert not (stopped[1] / "key").exists()
    budget = Ledger(stopped[0]).budget("census")
    assert len(budget.account.charges) == 1
    assert budget.spent["epsilon"] == pytest.approx(PLAN.epsilon)
    assert all(row.settled for row in budget.account.rows)


def test_a_settled_run_is_not_resumed_on_edited_data(stopped: tuple[Path, Path]) -> None:
    """The copy of a folder whose run has ended meanwhile."""
    path, folder = stopped
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    spent = finished(path, folder).spent
    for edited, lost, message in (
        (True, False, "got other batches than it drew before"),
        (False, True, "got other batches than it drew before"),
    ):
        if lost:
            (copy / "key").unlink()
        before = sorted(copy.iterdir())
        with pytest.raises(Refused, match=message):
            trained(path, copy, lambda *what: None, edited=edited)
        assert sorted(copy.iterdir()) == before
    assert Ledger(path).budget("census").spent == spent


def test_a_settled_run_is_replayed_and_nothing_else(stopped: tuple[Path, Path]) -> None:
    path, folder = stopped
    copies = [folder.with_name(name) for name in ("one", "two")]
    for copy in copies:
        shutil.copytree(folder, copy)
    first: list[Any] = killed(lambda tell: trained(path, folder, tell), after=STEPS, pause=0.5)
    again: list[Any] = []
    trained(path, copies[0], lambda *what: again.append(list(what)))
    assert again == first[-len(again) :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", lambda self: None)  # so step 19 comes out otherwise
        with pytest.raises(Refused, match="got a charge for a further release"):
            trained(path, copies[1], lambda *what: None)
    assert len(Ledger(path).budget("census").account.charges) == 1


# --- the files of a finished run ---


class Fuse:
    """Kills its process instead of a write, after so many writes."""

    def __init__(self, writes: int) -> None:
        self.left = writes

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.burn()
            return function(*arguments, **options)

        return call

    def burn(self) -> None:
        self.left -= 1
        if self.left < 0:
            os._exit(9)


def reported(folder: Path, *, writes: int = 10**6) -> int:
    """Train and report in a process of its own, killed after so many writes; its exit code."""

    def work() -> None:
        fuse, writing = Fuse(writes), File.writing

        @contextmanager
        def burning(file: File, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
            with writing(file, durable=durable) as connection:
                yield connection
                fuse.burn()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(File, "writing", burning)
            for name in ("replace", "link", "unlink"):
                patch.setattr(os, name, fuse.before(getattr(os, name)))
            recipe = good(steps=2)
            resume = (folder / "checkpoint.safetensors").exists()
            run = start(recipe, rng=hg.Rng.fixed(0), folder=folder, resume=resume)
            request = Request("good", {}, 0, 0, "")
            if not (folder / VERSIONS).exists():
                write_beginning(run, folder, request)
            write_end(carry_out(run, recipe), recipe, folder, request)

    return os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1])


def check_report(folder: Path, whole: Path) -> None:
    for name in ("model.safetensors", "metrics.csv", "plan.json", "curves.png"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}
    assert not (folder / "key").exists()
    (row,) = (row for row in Ledger(folder / "ledger.sqlite").budget("run").account.rows)
    assert row.settled


def kill_each_write(tmp_path: Path, every: int) -> None:
    """A run that is killed at any write can be resumed, or has released nothing."""
    whole = tmp_path / "whole"
    assert reported(whole) == 0
    writes = 1
    while (code := reported(folder := tmp_path / str(writes), writes=writes)) != 0:
        assert code == 9
        if (folder / "checkpoint.safetensors").exists():
            assert reported(folder) == 0, f"killed after {writes} writes"
            check_report(folder, whole)
        else:
            assert not (folder / "metrics.csv").exists()
        writes += every
    assert writes > 25


@pytest.mark.slow  # it starts a process for each kill
def test_a_run_that_is_killed_at_some_writes_gets_its_model_and_report(tmp_path: Path) -> None:
    kill_each_write(tmp_path, 7)


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_write_gets_its_model_and_report(tmp_path: Path) -> None:
    kill_each_write(tmp_path, 1)


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
