"""The protocol of docs/ledger.md as a state machine: what a ledger claims is never below the truth.

Any number of processes begin, resume, go on, save, end and are killed between any two writes, on
edited data, with lost keys, older checkpoints, copied folders and losses of power, in any order. A
model keeps every release that was really made. What those cost together, at one order of Rényi DP,
must never be more than what the ledger of the run has charged for it.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import hushgrad as hg
from hushgrad.accounting import gaussian, poisson
from hushgrad.ledger import Budget, Filter, Ledger, Spend, renyi, total
from hushgrad.ledger import entry as entries
from hushgrad.ledger.file import File
from hushgrad.ledger.spending import event_from_json
from hushgrad.run import charging
from hushgrad.run.charging import own_ledger
from hushgrad.run.resuming import CHECKPOINT, KEY, RunStore, open_store
from hushgrad.types import Refused, Relation

STEPS, AHEAD, SIGMA, RATE, ORDER = 6, 2, 2.0, 0.25, 8.0
PLAN = hg.Plan(
    records=64,
    sampling=hg.sampling.Poisson(RATE),
    steps=STEPS,
    noise_multiplier=SIGMA,
    delta=1e-5,
    accountant=hg.accounting.RDP,
)
AT_ORDER = renyi(ORDER)


@cache
def cost(times: int) -> float:
    """What a batch costs whose sum was released so many times."""
    event = poisson(RATE, gaussian(SIGMA / math.sqrt(times)))
    return AT_ORDER.cost(Spend(event, Relation.ADD_REMOVE, 0.0, 0.0))[0]


@cache
def charged(event: str) -> float:
    """What the event of a charge costs, whatever the ledger's own filter counts it as."""
    return AT_ORDER.cost(Spend(event_from_json(event), Relation.ADD_REMOVE, 0.0, 0.0))[0]


class Killed(BaseException):
    """What ends a process between two writes; it catches nothing and cleans nothing up."""


@dataclass
class Fuse:
    """Lets so many more writes pass, and then none."""

    left: float = math.inf

    def burn(self) -> None:
        if self.left <= 0:
            raise Killed
        self.left -= 1


FUSE = Fuse()
DURABLE: dict[Path, int] = {}
"""The last digest in each ledger that no loss of power can take."""


@contextmanager
def every_write_can_be_the_last() -> Iterator[None]:
    """Each write of a file or a ledger burns the fuse."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "unlink", "mkdir", "rmdir", "link"):
            patch.setattr(os, name, _burning(getattr(os, name)))
        writing = File.writing

        @contextmanager
        def burning(file: File, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
            with writing(file, durable=durable) as connection:
                yield connection
                FUSE.burn()  # before it is committed
                if durable:
                    DURABLE[file.path] = last_digest(connection)

        patch.setattr(File, "writing", burning)
        patch.setattr(os, "fsync", lambda opened: None)
        patch.setattr(charging, "AHEAD", AHEAD)
        yield


def last_digest(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT MAX(number) FROM digests").fetchone()[0] or 0)


def _burning(function: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        FUSE.burn()
        return function(*arguments, **options)

    return call


@dataclass
class Truth:
    """What was really released of one run and of all that goes on from it, copies included.

    `made` has the releases of each step of each draw, as digests.
    """

    made: dict[tuple[str, int], set[bytes]] = field(default_factory=lambda: defaultdict(set))
    ledgers: dict[Path, str] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        return math.fsum(cost(len(digests)) for digests in self.made.values())


class Training:
    """A run with weights of 8 bytes. Its sums follow from batch, weights and arithmetic."""

    def __init__(self, truth: Truth, memory: RunStore, arithmetic: int) -> None:
        self.truth, self.memory, self.arithmetic = truth, memory, arithmetic
        self.position = self.steps_taken = 0
        self.weights = b"start"
        memory.restore(self, self._load)

    def state(self) -> dict[str, Any]:
        return {"step": self.position, "taken": self.steps_taken, "weights": self.weights.hex()}

    def _load(self, state: Any) -> None:
        self.position, self.steps_taken = state["step"], state["taken"]
        self.weights = bytes.fromhex(state["weights"])

    @property
    def steps_drawn(self) -> int:
        return self.steps_taken

    def step(self) -> None:
        self.memory.drawn(self.position)
        batch = self.memory.sampling.name
        parts = (batch, self.position, self.weights, self.arithmetic)
        total = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
        digest = self.memory.rng.tag("release", self.position, total)[:16]
        self.memory.released(self.position, digest)
        self.truth.made[batch, self.position].add(digest)
        self.weights = digest[:8]
        self.position += 1
        self.steps_taken += 1

    def finish(self) -> None:
        self.position = STEPS
        self.memory.finish(self)


@dataclass
class Folder:
    """A run's folder, and the checkpoints that it has had."""

    path: Path
    truth: Truth
    own: bool
    older: list[bytes] = field(default_factory=list)


index = st.integers(0, 5)


class Protocol(RuleBasedStateMachine):
    """Processes and what befalls their folders and their machine."""

    def __init__(self) -> None:
        super().__init__()
        FUSE.left = math.inf
        self.home = Path(tempfile.mkdtemp())
        self.folders: list[Folder] = []
        self.processes: list[Training] = []
        self.books: dict[Path, Ledger] = {}
        self.killed = False
        self.boots = 0
        self.boot = entries.boot_id
        self.path = self.home / "ledger.sqlite"

    @initialize(rule=st.sampled_from([total(), AT_ORDER]))
    def begin(self, rule: Filter) -> None:
        with Ledger(self.path) as ledger:
            ledger.set_budget("census", epsilon=1e6, delta=0.9, rule=rule)

    def teardown(self) -> None:
        FUSE.left = math.inf
        entries.boot_id = self.boot  # type: ignore[assignment]
        shutil.rmtree(self.home)

    # --- processes ---

    @precondition(lambda self: len(self.folders) < 2)
    @rule(own=st.booleans(), steps=st.integers(0, STEPS), fuse=st.none() | st.integers(0, 20))
    def start(self, own: bool, steps: int, fuse: int | None) -> None:
        folder = Folder(self.home / f"run{len(self.folders)}", Truth(), own)
        self.folders.append(folder)
        self._enter(folder, resume=False, edited=0, arithmetic=0, fuse=fuse, steps=steps)

    @precondition(lambda self: self.folders)
    @rule(
        which=index,
        edited=st.integers(0, 1),
        arithmetic=st.integers(0, 1),
        lost=st.booleans(),
        older=st.none() | st.integers(0, 3),
        steps=st.integers(0, STEPS),
        fuse=st.none() | st.integers(0, 16),
    )
    def resume(
        self,
        which: int,
        edited: int,
        arithmetic: int,
        lost: bool,
        older: int | None,
        steps: int,
        fuse: int | None,
    ) -> None:
        """Resume, where need be from an older checkpoint or without the key, and go on."""
        folder = self.folders[which % len(self.folders)]
        if lost:
            (folder.path / KEY).unlink(missing_ok=True)
        if older is not None and older < len(folder.older):
            (folder.path / CHECKPOINT).write_bytes(folder.older[-1 - older])
        self._enter(
            folder, resume=True, edited=edited, arithmetic=arithmetic, fuse=fuse, steps=steps
        )

    @precondition(lambda self: self.folders)
    @rule(which=index, edited=st.integers(0, 1), steps=st.integers(0, STEPS), end=st.booleans())
    def resume_twice_at_once(self, which: int, edited: int, steps: int, end: bool) -> None:
        """One reads all that it needs; another resumes, goes on and may end; then the first begins.

        Both go on from there as far as they are let.
        """
        folder = self.folders[which % len(self.folders)]
        with suppress(Refused):
            memory = self._memory(folder, resume=True, edited=edited)
            others = len(self.processes)
            self._enter(folder, resume=True, edited=0, arithmetic=0, fuse=None, steps=steps)
            if end and len(self.processes) > others:
                self.end(others, fuse=None)
            process = Training(folder.truth, memory, 0)
            self._added(process, folder)
            self._go_on(process, STEPS)

    @precondition(lambda self: self.processes)
    @rule(which=index, steps=st.integers(1, STEPS), fuse=st.none() | st.integers(0, 12))
    def go_on(self, which: int, steps: int, fuse: int | None) -> None:
        process = self.processes[which % len(self.processes)]
        with self._burning(fuse, process):
            self._go_on(process, steps)

    @rule(which=index, fuse=st.none() | st.integers(0, 3))
    def save(self, which: int, fuse: int | None) -> None:
        if self.processes:
            process = self.processes[which % len(self.processes)]
            with self._burning(fuse, process):
                process.memory.save(process)
                self._keep(process)

    @rule(which=index, fuse=st.none() | st.integers(0, 6))
    def end(self, which: int, fuse: int | None) -> None:
        if self.processes:
            with self._burning(fuse, self.processes[which % len(self.processes)]):
                self.processes[which % len(self.processes)].finish()

    @rule(which=index)
    def kill(self, which: int) -> None:
        if self.processes:
            del self.processes[which % len(self.processes)]

    # --- folders and the machine ---

    @precondition(lambda self: 0 < len(self.folders) < 4)
    @rule(which=index)
    def copy(self, which: int) -> None:
        """Copy a folder, with its ledger if it has one of its own."""
        if self.folders and (self.folders[which % len(self.folders)].path / CHECKPOINT).exists():
            old = self.folders[which % len(self.folders)]
            path = self.home / f"run{len(self.folders)}"
            shutil.copytree(old.path, path)
            if old.own and (entry := old.truth.ledgers.get(own_ledger(old.path))):
                old.truth.ledgers[own_ledger(path)] = entry
            self.folders.append(Folder(path, old.truth, old.own, list(old.older)))

    @rule(lost=st.integers(0, 6))
    def lose_power(self, lost: int) -> None:
        """End all processes; the last digests that nothing durable followed may be gone."""
        self.processes.clear()
        self.boots += 1
        name = f"boot {self.boots}"
        entries.boot_id = lambda: name  # type: ignore[assignment]
        for path in {self.path, *(p for f in self.folders for p in f.truth.ledgers)}:
            connection = sqlite3.connect(path)
            last = last_digest(connection)
            first = max(DURABLE.get(path, last), last - lost)
            connection.execute("DELETE FROM digests WHERE number > ?", (first,))
            connection.commit()
            connection.close()

    # --- what must hold ---

    @invariant()
    def the_claim_is_never_below_the_truth(self) -> None:
        for truth in {id(folder.truth): folder.truth for folder in self.folders}.values():
            reached = len({step for _, step in truth.made})
            claimed = math.fsum(
                self._claimed(path, run, reached) for path, run in truth.ledgers.items()
            )
            assert truth.cost <= claimed * (1 + 1e-9)

    @invariant()
    def one_process_at_most_has_a_run(self) -> None:
        held: dict[tuple[Path, str], int] = defaultdict(int)
        for process in self.processes:
            entry = process.memory.entry
            assert entry is not None
            with suppress(Refused):
                entry.require_held()
                held[entry._file.path, entry.id] += 1
        assert all(count == 1 for count in held.values())

    def _claimed(self, path: Path, run: str, reached: int) -> float:
        """What a ledger has charged for a run, without the plan's share for steps still to come."""
        ledger = self.books[path] = self.books.get(path) or Ledger(path)
        account = ledger.budget(ledger.names[0]).account
        counts = account.rule.name == "renyi"
        plan, *more = (
            charge.cost[0] if counts else charged(charge.event) * (max(charge.cost) > 0)
            for charge in account.charges
            if charge.entry == run
        )
        whole = STEPS * cost(1)
        if plan >= whole * (1 - 1e-9):
            plan = reached * cost(1)
        return math.fsum([plan, *more])

    # --- by hand ---

    def _budget(self, folder: Folder) -> Budget | None:
        return None if folder.own else Ledger(self.path).budget("census")

    def _memory(self, folder: Folder, *, resume: bool, edited: int) -> RunStore:
        return open_store(
            plan=PLAN,
            rng=hg.Rng.from_os(),
            budget=self._budget(folder),
            folder=folder.path,
            resume=resume,
            keep={},
            fingerprint=lambda key: str(edited),
        )

    def _enter(
        self,
        folder: Folder,
        *,
        resume: bool,
        edited: int,
        arithmetic: int,
        fuse: int | None,
        steps: int,
    ) -> None:
        """Begin, and go on for some steps; a process that is killed meanwhile is no more."""
        others = list(self.processes)
        with self._burning(fuse):
            memory = self._memory(folder, resume=resume, edited=edited)
            process = Training(folder.truth, memory, arithmetic)
            self._added(process, folder)
            self._go_on(process, steps)
        if self.killed:
            self.processes = others

    def _go_on(self, process: Training, steps: int) -> None:
        for _ in range(min(steps, STEPS - process.position)):
            process.step()

    def _added(self, process: Training, folder: Folder) -> None:
        entry = process.memory.entry
        assert entry is not None
        folder.truth.ledgers.setdefault(entry._file.path, entry.id)
        assert folder.truth.ledgers[entry._file.path] == entry.id
        self.processes.append(process)
        self._keep(process)

    def _keep(self, process: Training) -> None:
        path = process.memory._folder
        assert path is not None
        (folder,) = [f for f in self.folders if f.path == path]
        folder.older.append((path / CHECKPOINT).read_bytes())

    @contextmanager
    def _burning(self, fuse: int | None, process: Training | None = None) -> Iterator[None]:
        """Let a process write so often, and kill it then; what is refused is no failure."""
        FUSE.left = math.inf if fuse is None else fuse
        try:
            with suppress(Refused):
                yield
            self.killed = False
        except Killed:
            self.killed = True
            self.processes = [other for other in self.processes if other is not process]
        finally:
            FUSE.left = math.inf
