"""Several processes on one ledger: they cannot overspend together, nor under-count when killed."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from charged_runs import STEPS, event, forked, opened, spend
from hushgrad.ledger import Filter, Ledger, renyi, total
from hushgrad.types import Refused

RULES = [total(), renyi(8.0)]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("processes", [2, 4])
def test_racing_processes_cannot_overspend(tmp_path: Path, rule: Filter, processes: int) -> None:
    path = tmp_path / "ledger.sqlite"
    one = rule.cost(spend(0.3, 1e-7))
    with Ledger(path) as ledger:
        budget = ledger.set_budget("census", epsilon=3.0, delta=1e-5, rule=rule)
        room = int(budget.account.limit[0] / one[0] + 1e-9)
    gate, go = os.pipe()

    def spend_all() -> None:
        os.read(gate, 1)
        own = Ledger(path).budget("census")
        for _ in range(room):
            with suppress(Refused):
                opened(own, spend(0.3, 1e-7)).charge(spend(0.0, 0.0, steps=1), reason="more")

    children = [forked(spend_all) for _ in range(processes)]
    os.write(go, b"!" * processes)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * processes
    account = Ledger(path).budget("census").account
    assert account.spent[0] <= account.limit[0]
    assert account.left[0] < one[0]  # all that fits was spent: together they asked for more
    assert len({row.id for row in account.rows}) == len(account.rows) >= room - processes


def test_racing_processes_make_one_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    gate, go = os.pipe()

    def begin(name: str) -> None:
        os.read(gate, 1)
        Ledger(path).set_budget(name, epsilon=1, delta=1e-5)

    children = [forked(lambda name=name: begin(name)) for name in "abcd"]
    os.write(go, b"!!!!")
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert Ledger(path).names == ["a", "b", "c", "d"]
    assert not [other for other in tmp_path.iterdir() if not other.name.startswith(path.name)]


def test_a_child_has_a_connection_of_its_own(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    budget = ledger.set_budget("census", epsilon=3, delta=1e-5)
    entry = opened(budget)
    child = forked(lambda: opened(budget).reserve(8))
    entry.reserve(4)
    assert os.waitpid(child, 0)[1] == 0
    entry.note(3, b"x")
    assert sorted(row.position for row in Ledger(ledger.path).budget("census").account.rows) == [
        4,
        8,
    ]


def test_a_thread_has_a_connection_of_its_own(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    budget = ledger.set_budget("census", epsilon=3, delta=1e-5)
    threads = [threading.Thread(target=opened, args=(budget,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(budget.account.rows) == 4
    ledger.close()


def test_a_lock_that_is_kept_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    budget = ledger.set_budget("census", epsilon=3, delta=1e-5)
    hurried = Ledger(path, wait=0.05).budget("census")
    with ledger._file.writing():
        with pytest.raises(Refused, match="another process keeps locked; wait for it"):
            opened(hurried)
        assert hurried.account.rows == ()  # reading goes on
    opened(hurried)
    assert len(budget.account.rows) == 1


# --- SIGKILL ---


def endless(path: Path, report: int, seed: int) -> None:
    """Open, reserve, note, charge and settle for ever, telling what has become durable."""
    chance = random.Random(seed)

    def tell(*what: Any) -> None:
        os.write(report, (json.dumps(what) + "\n").encode())

    budget = Ledger(path).budget("census")
    while True:
        entry = opened(budget)
        tell("open", entry.id)
        taken = 0
        for upto in range(8, chance.randrange(8, STEPS), 8):
            entry.reserve(upto)
            tell("reserve", entry.id, upto)
            while taken < upto:
                entry.note(taken, bytes([taken]))
                tell("note", entry.id, taken)
                taken += 1
        if chance.random() < 0.3:
            entry.charge(spend(0.01, 1e-9, steps=1), reason="more")
            tell("charge", entry.id)
        tell("settling", entry.id, taken)
        entry.settle(steps=taken, event=event(max(1, taken)))
        tell("settled", entry.id)


def check_after(path: Path, told: list[list[Any]], rule: Filter, before: tuple[float, ...]) -> None:
    """What the killed process reported is in the ledger, and at most one thing more."""
    budget = Ledger(path).budget("census")
    account = budget.account
    rows = {row.id: row for row in account.rows}
    entries = {run: budget.entry(run) for what, run, *_ in told if what == "open"}
    plan, extra = rule.cost(spend()), rule.cost(spend(0.01, 1e-9, steps=1))
    least = list(before)
    for what, run, *rest in told:
        if what == "open":
            least = [sum(pair) for pair in zip(least, plan, strict=True)]
        elif what == "reserve":
            assert rows[run].position >= rest[0]
        elif what == "note":
            assert entries[run].digests(rest[0]) == [bytes(rest)]
        elif what == "charge":
            least = [sum(pair) for pair in zip(least, extra, strict=True)]
        elif what == "settling" and (rule.refunds or rest[0] == 0):
            kept = rule.cost(spend(steps=rest[0])) if rest[0] else (0.0,) * len(plan)
            least = [a - b + c for a, b, c in zip(least, plan, kept, strict=True)]
        elif what == "settled":
            assert rows[run].settled
    for spent, known, one in zip(account.spent, least, plan, strict=True):
        assert known * (1 - 1e-9) - 1e-15 <= spent <= known + one * (1 + 1e-9)


def kill_at_random(path: Path, rule: Filter, kills: int) -> int:
    """Kill a working process so many times; how many different things it had just done."""
    chance, last = random.Random(kills), set()
    with Ledger(path) as ledger:
        ledger.set_budget("census", epsilon=1e5, delta=0.9, rule=rule)
    for seed in range(kills):
        with Ledger(path) as ledger:
            before = ledger.budget("census").account.spent
        report, end = os.pipe()
        child = forked(lambda end=end, seed=seed: endless(path, end, seed))
        os.close(end)
        with os.fdopen(report, "rb") as lines:
            heard = [lines.readline() for _ in range(chance.randrange(150))]
            time.sleep(chance.uniform(0.0, 0.002))
            os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
            heard += lines.read().splitlines(keepends=True)
        told = [json.loads(line) for line in heard if line.endswith(b"\n")]
        last.add(told[-1][0] if told else None)
        check_after(path, told, rule, before)
    return len(last)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_twenty_kills_never_under_count(tmp_path: Path, rule: Filter) -> None:
    assert kill_at_random(tmp_path / "ledger.sqlite", rule, 20) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_hundreds_of_kills_never_under_count(tmp_path: Path, rule: Filter) -> None:
    seen = [kill_at_random(tmp_path / f"{n}.sqlite", rule, 20 + n) for n in range(10)]
    assert max(seen) >= 3


def test_a_kill_while_the_file_is_made_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    chance, made = random.Random(0), 0
    began = time.monotonic()
    os.waitpid(forked(lambda: Ledger(tmp_path / "timed.sqlite")), 0)
    usual = time.monotonic() - began
    for number in range(20):
        path = tmp_path / f"{number}.sqlite"
        child = forked(lambda path=path: Ledger(path))
        time.sleep(chance.uniform(0, 2 * usual))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        made += path.exists()
        assert Ledger(path).set_budget("census", epsilon=1, delta=1e-5).epsilon == 1
    assert made > 0
