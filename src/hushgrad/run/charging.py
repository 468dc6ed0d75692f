"""A run's entry in a ledger, and its key: what must survive a crash.

The protocol is written down in docs/ledger.md.

Steps are entered, and the digest of each release is recorded, before the release is used. So a
resumed run can tell a replay, which costs nothing, from a second release, which is charged.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from dp_accounting import DpEvent

from hushgrad.ledger import Budget, Entry, Ledger, Spend
from hushgrad.ledger.entry import settled_refusal
from hushgrad.ledger.records import RunRow
from hushgrad.rng import Rng
from hushgrad.run.plan import Plan
from hushgrad.types import Refused, Relation

AHEAD = 64
"""How many steps are entered at once, and so the most that a crash can over-count."""


class Books:
    """A run's entry in a ledger, and which of its steps may have been released before.

    Guarantees: a step is entered durably before its release is used. A step that was released
    before with the same key, but with another sum, is charged before it is released again.
    """

    def __init__(self, entry: Entry, plan: Plan, *, replayed: int = 0) -> None:
        self.entry, self._plan = entry, plan
        self._entered = entry.position
        self._replayed = replayed  # steps below it may have been released with this key

    def drawn(self, step: int) -> None:
        """Enter a step before its batch is seen: it counts, whether it is used or not."""
        if step >= self._entered:
            ahead = min(step + AHEAD, self._plan.steps)
            self.entry.reserve(ahead)
            self._entered = ahead

    def released(self, step: int, digest: bytes) -> None:
        """Enter a release before it is used, and charge it if it is a second release of a step's
        batch.
        """
        self.drawn(step)
        # Only steps below `_replayed` can have been released with this key before.
        known = self.entry.digests(step) if step < self._replayed else []
        if known and digest not in known:
            # Later steps start from another iterate now, so all of them will differ, too.
            times = [len(self.entry.digests(s)) for s in range(step, self._replayed)]
            again = [step + k for k, n in enumerate(times) if n > 0]
            event = self._plan.released_again(again, times=1 + max(times))
            reason = f"{len(again)} steps from {step} on released other sums, and count again"
            self.entry.charge(spend(self._plan, event), reason=reason)
            self._replayed = step
        self.entry.note(step, digest)


def spend(plan: Plan, event: DpEvent) -> Spend:
    """What an event of this plan costs."""
    return Spend(event, plan.relation, plan.spent(event), plan.delta)


def own_ledger(folder: Path) -> Path:
    """Return the path of a run's own ledger, which it has if it has no budget."""
    return folder / "ledger.sqlite"


def own_budget(folder: Path, relation: Relation) -> Budget:
    """Return the account of a single run, without a limit, in the ledger in its folder."""
    ledger = Ledger(own_ledger(folder))
    if "run" in ledger.names:
        return ledger.budget("run")
    return ledger.set_budget("run", epsilon=math.inf, delta=1.0, relation=relation)


def kept_budget(folder: Path) -> Budget:
    """Return the account of the run in this folder, from the ledger that it made earlier."""
    path = own_ledger(folder)
    if not path.exists():
        raise Refused(
            f"expected the ledger of the run at {path}, got none; put it back, or pass the budget "
            "that the run was charged to"
        )
    return Ledger(path).budget("run")


def resumed_charging(
    account: Budget,
    identity: str,
    plan: Plan,
    *,
    step: int,
    replay: bool,
    upto: int | None,
    fingerprint: str,
    check: Callable[[], None],
) -> Books:
    """Take over a run that resumes from a checkpoint at `step`, and charge what that costs.

    A `replay` draws the same batches as before, and a step costs only if its release differs.
    Without the key, or on other data, other batches are drawn: every step since the checkpoint that
    may have been released is then released a second time.

    Args:
        account: the account that the run was charged to.
        identity: the run's entry in it.
        plan: the run's plan.
        step: the step of the checkpoint.
        replay: whether the same batches are drawn again.
        upto: the first step that cannot have been released; None to ask the ledger.
        fingerprint: the digest of the data.
        check: called while nobody else can charge or settle the run; it may refuse.
    """

    def charge(row: RunRow) -> tuple[Spend, str] | None:
        check()
        if replay or step == plan.steps:  # where the run is over, only its end is still written
            return None
        if row.settled is not None:
            raise settled_refusal(
                row, "other batches than it drew before, since its key or its data is missing"
            )
        # Another copy of the ledger may know more steps: then all of them may be released.
        again = list(range(step, row.position if upto is None else upto))
        turns = plan.sampling.participation
        if plan.sampling.epoch(plan.records) or (turns is not None and turns.cycle > 1):
            again.append(step)  # an epoch or a cycle begins again: a record may come once more
        if not again:
            return None
        event = plan.released_again(again, times=1)
        reason = f"{len(again)} steps since the checkpoint at {step} count again, on other batches"
        return spend(plan, event), reason

    entry = account.resume(identity, fingerprint=fingerprint, charge=charge)
    return Books(entry, plan, replayed=entry.position if replay else 0)


def destroy(path: Path) -> None:
    """Overwrite a key and remove its file."""
    if path.exists():
        with path.open("r+b") as file:
            # Overwritten before it is removed: a removed file can often be restored.
            file.write(bytes(path.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        path.unlink(missing_ok=True)


def refuse_reproducible(rng: Rng) -> None:
    """Refuse to enter a run that is not private into a data set's budget."""
    if rng.reproducible:
        raise Refused(
            "expected a secret key with a budget, got Rng.fixed, which protects nothing; use "
            "Rng.from_os(), or leave the budget out to try things on public data"
        )
