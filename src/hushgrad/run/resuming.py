"""A run's store: its keys, its entry in a ledger, and the checkpoints that it resumes from."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hushgrad.files import explain_file_errors
from hushgrad.ledger import Budget, Entry, Spend
from hushgrad.ledger.file import ENDINGS
from hushgrad.rng import Rng
from hushgrad.run import checkpoint
from hushgrad.run.charging import (
    Books,
    destroy,
    kept_budget,
    own_budget,
    own_ledger,
    refuse_reproducible,
    resumed_charging,
)
from hushgrad.run.folder import Claim
from hushgrad.run.plan import Plan
from hushgrad.run.saved_state import require_state
from hushgrad.types import Refused

CHECKPOINT, KEY = "checkpoint.safetensors", "key"
"""The files of a run's folder."""


@runtime_checkable
class Stateful(Protocol):
    """What can be saved along with a run, such as a schedule or an average."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that it needs to resume."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Resume from this state."""


Keep = Mapping[str, Stateful]
Fingerprint = Callable[[bytes], str]
"""Maps a key to a digest of the data under it."""


@runtime_checkable
class Resumable(Protocol):
    """A run, as far as its store needs to know it."""

    @property
    def steps_drawn(self) -> int:
        """How many steps have drawn their batch."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""


Enter = Callable[[Claim | None], Books]
"""Enters a run into its ledger and writes its key; the claim is told which files it creates."""


class RunStore:
    """What outlives a process, and what must stay secret.

    `rng` makes the noise and `sampling` the batches. The latter depends on the data, the plan and
    the version of hushgrad, so that no other run can draw the same batches. Nothing is written and
    nothing is charged before `restore`.
    """

    def __init__(
        self,
        plan: Plan,
        rng: Rng,
        *,
        sampling: Rng,
        draw: str = "",
        enter: Enter | None = None,
        folder: Path | None = None,
        keep: Keep,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self.rng, self.sampling, self._draw = rng.derive("release"), sampling, draw
        self._plan, self._enter, self._folder = plan, enter, folder
        self._keep, self._saved = keep, saved
        self._books: Books | None = None

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
        """Enter a release that is about to be used: until then none of it has left the process."""
        if self._enter is not None:
            assert self._books is not None, "restore comes before the first release"
            self._books.released(step, digest)

    def restore(self, run: Resumable, load: Callable[[Mapping[str, Any]], None]) -> None:
        """Restore a run from its checkpoint by `load`, enter it in the ledger, and write a
        checkpoint.

        The checkpoint contains the run's draw, so that later releases are never mistaken for
        releases on other batches. If anything is refused, no files and no folders are left behind.
        """
        # Loaded before anything is charged: a model of another shape must cost nothing.
        if self._saved is not None:
            self._load(self._saved, load)
        with nullcontext() if self._folder is None else Claim(self._folder) as claim:
            try:
                self._books = None if self._enter is None else self._enter(claim)
                if self._folder is not None and claim is not None:
                    if self._saved is None:
                        claim.made(self._folder / CHECKPOINT)
                    self.save(run)
            except BaseException:
                if self._saved is None and self._books is not None:
                    with suppress(Refused):  # nothing was released
                        self._books.entry.settle(steps=0, event=None)
                raise

    def save(self, run: Resumable) -> None:
        """Write a checkpoint; refused if another process has resumed the run meanwhile."""
        if self._folder is None:
            raise ValueError(
                "expected a run with a folder for its checkpoints, got none; pass folder= to train"
            )
        assert self._books is not None
        # Two processes must not alternate in writing one checkpoint.
        self._books.entry.require_held()
        state = {
            "plan": self._plan.terms(),
            # By it a resumed run finds its entry in the ledger.
            "entry": self._books.entry.id,
            "batches": self.sampling.name,
            "draw": self._draw,
            "reproducible": self.rng.reproducible,
            "run": run.state(),
            "keep": {name: thing.state_dict() for name, thing in self._keep.items()},
        }
        checkpoint.write(self._folder / CHECKPOINT, state)

    def finish(self, run: Resumable) -> None:
        """Write the last checkpoint, settle the run's cost, and destroy its key, in this order.

        So a run whose cost is settled always has a model.
        """
        if self._folder is not None:
            self.save(run)
        if self._books is not None:
            done = self._plan.settled_event(run.steps_drawn)
            self._books.entry.settle(steps=run.steps_drawn, event=done)
        if self._folder is not None:
            with explain_file_errors(self._folder / KEY):
                destroy(self._folder / KEY)

    def _load(self, saved: Mapping[str, Any], load: Callable[[Mapping[str, Any]], None]) -> None:
        try:
            load(saved["run"])
            for name, thing in self._keep.items():
                thing.load_state_dict(saved["keep"][name])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise Refused(
                "expected the same kind of model, optimizer and other objects in keep= as when the "
                f"checkpoint was written, got others ({error}); build them as before"
            ) from error


def open_store(
    *,
    plan: Plan,
    rng: Rng,
    budget: Budget | None,
    folder: Path | None,
    resume: bool,
    keep: Keep,
    fingerprint: Fingerprint,
) -> RunStore:
    """Return the store of a run that starts, or that resumes from the checkpoint in its folder."""
    if budget is not None:
        refuse_reproducible(rng)
    _require_folder(folder, resume)
    if resume and folder is not None:
        return _resumed(plan, rng, budget, folder, keep, fingerprint)
    own = _own(rng)
    entered = budget is not None or folder is not None
    return RunStore(
        plan,
        own,
        sampling=_sampling(plan, own, fingerprint),
        enter=_new(plan, own, budget, folder, fingerprint) if entered else None,
        folder=folder,
        keep=keep,
    )


def _new(
    plan: Plan, own: Rng, budget: Budget | None, folder: Path | None, fingerprint: Fingerprint
) -> Enter:
    """Return what enters a run that starts."""

    def enter(claim: Claim | None) -> Books:
        account = budget
        if folder is not None and claim is not None:
            _require_folder(folder, resume=False)  # again, now that no other process begins there
            _write_key(own, folder, claim)
            if account is None:
                ledger = own_ledger(folder)
                if not ledger.exists():
                    claim.made(*(ledger.with_name(ledger.name + end) for end in ENDINGS))
                account = own_budget(folder, plan.relation)
        assert account is not None
        entry = account.open(
            Spend(plan.event(plan.steps), plan.relation, plan.epsilon, plan.delta),
            label=folder.name if folder else "",
            plan=plan.describe(),
            fingerprint=fingerprint(budget.salt) if budget else "",
        )
        return Books(entry, plan)

    return enter


def _resumed(
    plan: Plan,
    rng: Rng,
    budget: Budget | None,
    folder: Path,
    keep: Keep,
    fingerprint: Fingerprint,
) -> RunStore:
    """Return the store of a run that resumes, with its key and the batches of its next steps.

    The same batches are drawn again only if the key, the data and the ledger are the same.
    """
    stamp = checkpoint.stamp(folder / CHECKPOINT)
    saved = checkpoint.read(folder / CHECKPOINT)
    require_state(saved, plan, folder / CHECKPOINT)
    if saved["keep"].keys() != keep.keys():
        raise Refused(
            f"expected keep= with the names in the checkpoint, {sorted(saved['keep'])}, got "
            f"{sorted(keep)}; pass the same keep= as before"
        )
    # Without a budget the run keeps a ledger of its own in its folder.
    account = budget or kept_budget(folder)
    step, over = saved["run"]["step"], saved["run"]["step"] == plan.steps
    copied = account.entry(saved["entry"]).copied
    # Noise and batches follow from the key: without it both are new.
    lost = not over and not (folder / KEY).exists()
    own = _resumed_key(rng, folder, saved, over=over, budget=budget)
    draw, sampling = saved["draw"], _sampling(plan, own, fingerprint, saved["draw"])
    replay = over or (sampling.name == saved["batches"] and not copied)
    if not replay and plan.correlated:
        raise Refused(
            "expected the key and the data that the run began with, from which the noise of its "
            f"past steps is drawn again, got others; a run with correlated noise cannot resume in "
            f"{folder} without them: start another run"
        )
    # Fresh batches, also of an earlier attempt to resume: two releases of one batch cost more.
    if not replay:
        draw = secrets.token_hex(16)
        sampling = _sampling(plan, own, fingerprint, draw)

    def check() -> None:
        # Otherwise an older checkpoint could replace the last one of a run that has just ended.
        if checkpoint.stamp(folder / CHECKPOINT) != stamp:
            raise _overtaken(folder)

    def enter(claim: Claim | None) -> Books:
        if lost and claim is not None:
            if (folder / KEY).exists():
                raise _overtaken(folder)
            _write_key(own, folder, claim)
        return resumed_charging(
            account,
            saved["entry"],
            plan,
            step=step,
            replay=replay,
            upto=plan.steps if copied else None,
            fingerprint=fingerprint(account.salt),
            check=check,
        )

    return RunStore(
        plan,
        own,
        sampling=sampling,
        draw=draw,
        enter=enter,
        folder=folder,
        keep=keep,
        saved=saved,
    )


def _resumed_key(
    rng: Rng, folder: Path, saved: Mapping[str, Any], *, over: bool, budget: Budget | None
) -> Rng:
    """Return the key of a run that resumes: its own, or a new one if that is lost."""
    if over:  # nothing is drawn any more, so any key will do
        return Rng(secrets.token_bytes(32), reproducible=saved["reproducible"])
    file = folder / KEY
    own = Rng.read(file) if file.exists() else _own(rng)
    if budget is not None:
        refuse_reproducible(own)
    if saved["reproducible"] and not own.reproducible:
        raise Refused(
            "expected Rng.fixed for a run that began with it, got a secret key, which cannot hide "
            "the noise of its first steps; pass Rng.fixed, or start another run"
        )
    return own


def _overtaken(folder: Path) -> Refused:
    return Refused(
        f"expected to be the only process that resumes the run in {folder}, got another that "
        "resumed it meanwhile; end it, and resume again"
    )


def _write_key(own: Rng, folder: Path, claim: Claim) -> None:
    file = folder / KEY
    file.unlink(missing_ok=True)  # of a run that never began
    claim.made(file)
    with explain_file_errors(file):
        own.write(file)


def _own(rng: Rng) -> Rng:
    """Return a key for one run: two runs with one key must not draw the same batches and noise."""
    # A reproducible run must not depend on the operating system's randomness.
    return rng.derive("run") if rng.reproducible else rng.derive("run", secrets.token_bytes(16))


def _sampling(plan: Plan, own: Rng, fingerprint: Fingerprint, draw: str = "") -> Rng:
    """Return the key of a run's batches; `draw` distinguishes new batches from lost ones."""
    # Other data, another plan or version must draw other batches than those released.
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
            f"expected a folder without a run in it, got {folder}; pass resume=True to resume "
            "that run, or name another folder"
        )


def none(key: bytes) -> str:
    """Return the empty fingerprint, for data that cannot be read in advance."""
    return ""
