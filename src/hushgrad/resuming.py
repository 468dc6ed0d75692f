"""The memory of a run: its keys, its entry in a ledger, and the checkpoints it goes on from."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hushgrad import checkpoint
from hushgrad.charging import Books, destroy, own_budget, refuse_reproducible, restored
from hushgrad.ledger import Budget, Entry, Spend
from hushgrad.plan import Plan
from hushgrad.rng import Rng
from hushgrad.types import Refused

CHECKPOINT, KEY = "checkpoint.safetensors", "key"
"""The files of a run's folder."""


@runtime_checkable
class Stateful(Protocol):
    """What can be saved along with a run: a schedule, an average."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that it needs to go on."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go on from there."""


Keep = Mapping[str, Stateful]
Fingerprint = Callable[[bytes], str]
"""A key, to a digest of the data under it."""


@runtime_checkable
class Training(Protocol):
    """A run, as far as its memory needs to know it."""

    @property
    def steps_drawn(self) -> int:
        """How many steps have drawn their batch."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""


class Memory:
    """What outlives a process, and what must not be told to anyone.

    `rng` makes the noise and `sampling` the batches; the latter is bound to the data, the plan and
    the version, so that no other run can draw the same batches.
    """

    def __init__(
        self,
        plan: Plan,
        rng: Rng,
        *,
        sampling: Rng,
        draw: str = "",
        books: Books | None = None,
        folder: Path | None = None,
        keep: Keep,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self.rng, self.sampling, self._draw = rng.derive("release"), sampling, draw
        self._plan, self._books, self._folder = plan, books, folder
        self._keep, self._saved = keep, saved

    @property
    def charges(self) -> tuple[Spend, ...]:
        """What the run cost beyond its plan."""
        return () if self._books is None else tuple(self._books.entry.spends[1:])

    @property
    def entry(self) -> Entry | None:
        """The run's entry in a ledger."""
        return None if self._books is None else self._books.entry

    def drawn(self, step: int) -> None:
        """Enter a step whose batch is about to be seen."""
        if self._books is not None:
            self._books.drawn(step)

    def released(self, step: int, digest: bytes) -> None:
        """Enter a release that is about to be used; before, nothing of it has left the process."""
        if self._books is not None:
            self._books.released(step, digest)

    def restore(self, run: Training, load: Callable[[Mapping[str, Any]], None]) -> None:
        """Put a run where its checkpoint left it, by `load`, and write a checkpoint with its draw.

        So that what is released from here on is never taken for a release on other batches.
        """
        if self._saved is not None:
            load(self._saved["run"])
            for name, thing in self._keep.items():
                thing.load_state_dict(self._saved["keep"][name])
            self._saved = None
        if self._folder is not None:
            self.save(run)

    def save(self, run: Training) -> None:
        """Write a checkpoint."""
        if self._folder is None:
            raise ValueError(
                "expected a run with a folder for its checkpoints, got none; pass folder= to train"
            )
        assert self._books is not None
        state = {
            "plan": self._plan.terms(),
            "entry": self._books.entry.id,
            "batches": self.sampling.name,
            "draw": self._draw,
            "reproducible": self.rng.reproducible,
            "run": run.state(),
            "keep": {name: thing.state_dict() for name, thing in self._keep.items()},
        }
        checkpoint.write(self._folder / CHECKPOINT, state)

    def finish(self, run: Training) -> None:
        """Settle what the run has cost, and destroy its key."""
        if self._books is not None:
            done = self._plan.event(run.steps_drawn) if run.steps_drawn else None
            self._books.entry.settle(steps=run.steps_drawn, event=done)
        if self._folder is not None:
            self.save(run)
            destroy(self._folder / KEY)


def remembered(
    *,
    plan: Plan,
    rng: Rng,
    budget: Budget | None,
    folder: Path | None,
    resume: bool,
    keep: Keep,
    fingerprint: Fingerprint,
) -> Memory:
    """The memory of a run that starts, or goes on from the checkpoint in its folder."""
    if budget is not None:
        refuse_reproducible(rng)
    _require_folder(folder, resume)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        account = budget or own_budget(folder, plan.relation)
        if resume:
            return _resumed(plan, rng, account, folder, keep, fingerprint)
    elif budget is not None:
        account = budget
    else:
        own = _own(rng)
        return Memory(plan, own, sampling=_sampling(plan, own, fingerprint), keep=keep)
    own = _own(rng)
    entry = account.open(
        Spend(plan.event(plan.steps), plan.relation, plan.epsilon, plan.delta),
        label=folder.name if folder else "",
        plan=plan.describe(),
        fingerprint=fingerprint(budget.salt) if budget else "",
    )
    if folder is not None:
        (folder / KEY).unlink(missing_ok=True)  # of a run that never began
        own.write(folder / KEY)
    sampling, books = _sampling(plan, own, fingerprint), Books(entry, plan)
    return Memory(plan, own, sampling=sampling, books=books, folder=folder, keep=keep)


def _resumed(
    plan: Plan, rng: Rng, account: Budget, folder: Path, keep: Keep, fingerprint: Fingerprint
) -> Memory:
    saved = checkpoint.read(folder / CHECKPOINT)
    _require_same(plan, saved["plan"])
    if saved["keep"].keys() != keep.keys():
        raise Refused(
            f"expected what the checkpoint has kept, {sorted(saved['keep'])}, got {sorted(keep)}; "
            "pass the same keep= as before"
        )
    entry = account.entry(saved["entry"], fingerprint=fingerprint(account.salt))
    # A settled run that still has its key was killed while it ended: its steps are paid for.
    if entry.settled and not (folder / KEY).exists():
        raise Refused(
            f"expected a run that goes on, got the one in {folder}, which is over; start another "
            "run in a folder of its own"
        )
    file = folder / KEY
    own = Rng.read(file) if file.exists() else _own(rng)
    if saved["reproducible"] and not own.reproducible:
        raise Refused(
            "expected a seed for a run that began with Rng.fixed, got a secret key, which cannot "
            "hide the noise of its first steps; pass Rng.fixed, or start another run"
        )
    if not file.exists():
        own.write(file)
    draw = saved["draw"]
    sampling = _sampling(plan, own, fingerprint, draw)
    same = sampling.name == saved["batches"]
    if not same:  # and none that an earlier try has drawn: two releases of one batch cost more
        draw = secrets.token_hex(16)
        sampling = _sampling(plan, own, fingerprint, draw)
    books = restored(entry, plan, step=saved["run"]["step"], same_batches=same)
    return Memory(
        plan,
        own,
        sampling=sampling,
        draw=draw,
        books=books,
        folder=folder,
        keep=keep,
        saved=saved,
    )


def _own(rng: Rng) -> Rng:
    """A key for one run: two runs from one key must not draw the same batches and noise."""
    return rng.derive("run") if rng.reproducible else rng.derive("run", secrets.token_bytes(16))


def _sampling(plan: Plan, own: Rng, fingerprint: Fingerprint, draw: str = "") -> Rng:
    """The key of a run's batches; `draw` tells those of a run that could not draw its first."""
    data = fingerprint(own.derive("data").words(4).tobytes())
    return own.derive("sampling", data, json.dumps(plan.terms()), version("hushgrad"), draw)


def _require_folder(folder: Path | None, resume: bool) -> None:
    there = folder is not None and (folder / CHECKPOINT).exists()
    if resume and not there:
        raise Refused(
            f"expected a checkpoint to resume from, got none in {folder or 'no folder'}; leave "
            "resume out to start a run"
        )
    if there and not resume:
        raise Refused(
            f"expected a folder without a run in it, got {folder}; pass resume=True to go on with "
            "it, or name another folder"
        )


def _require_same(plan: Plan, saved: Mapping[str, Any]) -> None:
    now = json.loads(json.dumps(plan.terms()))
    changed = [f"{key} {saved.get(key)} → {now[key]}" for key in now if now[key] != saved.get(key)]
    if changed:
        raise Refused(
            f"expected the plan that the run began with, got {'; '.join(changed)}; resume with "
            "that plan, or start another run"
        )


def none(key: bytes) -> str:
    """The fingerprint of data that cannot be read beforehand."""
    return ""
