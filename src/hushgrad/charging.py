"""What a run must not forget: its entry in a ledger, and its key.

Steps are entered, and the digest of each release is noted, before the release is used. So a run
that was killed can tell a replay, which costs nothing, from a second release, which is charged.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from dp_accounting import DpEvent

from hushgrad.ledger import Budget, Entry, Ledger, Spend
from hushgrad.plan import Plan
from hushgrad.rng import Rng
from hushgrad.sampling import Shuffled
from hushgrad.types import Refused, Relation

AHEAD = 64
"""How many steps are entered at once: what a power cut can over-count by."""


class Books:
    """A run's entry in a ledger, and what of its steps may have been released before.

    Guarantees: a step is entered durably before its release is used. A step that was released
    before, with the same key and another sum, is charged before it is released again.
    """

    def __init__(self, entry: Entry, plan: Plan, *, replayed: int = 0) -> None:
        self.entry, self._plan = entry, plan
        self._entered = entry.position
        self._replayed = replayed  # steps below it may have been released with this key

    def drawn(self, step: int) -> None:
        """Enter a step before its batch is seen: it counts, whether it is used or not."""
        if step >= self._entered:
            ahead = min(step + AHEAD, self._plan.steps)
            self.entry.ahead(ahead)
            self._entered = ahead

    def released(self, step: int, digest: bytes) -> None:
        """Enter a release before it is used; charge it if it is another one of a step's batch."""
        self.drawn(step)
        known = self.entry.digests(step) if step < self._replayed else []
        if known and digest not in known:
            times = [len(self.entry.digests(s)) for s in range(step, self._replayed)]
            again = [step + k for k, n in enumerate(times) if n > 0]
            event = self._plan.released_again(again, times=1 + max(times))
            reason = f"{len(again)} steps from {step} on came out otherwise, and count again"
            self.entry.charge(spend(self._plan, event), reason=reason)
            self._replayed = step
        self.entry.note(step, digest)


def spend(plan: Plan, event: DpEvent) -> Spend:
    """What an event of this plan costs."""
    return Spend(event, plan.relation, plan.spent(event), plan.delta)


def own_budget(folder: Path, relation: Relation) -> Budget:
    """A ledger for one run, without a limit, in the run's own folder."""
    ledger = Ledger(folder / "ledger.sqlite")
    if "run" in ledger.names:
        return ledger.budget("run")
    return ledger.set_budget("run", epsilon=math.inf, delta=1.0, relation=relation)


def restored(entry: Entry, plan: Plan, *, step: int, same_batches: bool) -> Books:
    """The books of a run that goes on from a checkpoint at `step`.

    With another key, or other data, other batches are drawn: every step since the checkpoint is
    then a second release and is charged.
    """
    if same_batches:
        return Books(entry, plan, replayed=entry.position)
    again = list(range(step, entry.position))
    if isinstance(plan.sampling, Shuffled):
        again.append(step)  # the epoch is dealt anew from its middle, and a record may come twice
    if again:
        event = plan.released_again(again, times=1)
        reason = f"{len(again)} steps since the checkpoint at {step} count again, on other batches"
        entry.charge(spend(plan, event), reason=reason)
    return Books(entry, plan)


def destroy(path: Path) -> None:
    """Overwrite a key and remove its file."""
    if path.exists():
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()


def refuse_reproducible(rng: Rng) -> None:
    """Refuse to enter a run that is not private into a data set's budget."""
    if rng.reproducible:
        raise Refused(
            "expected a secret key with a budget, got Rng.fixed, which protects nothing; use "
            "Rng.from_os(), or leave the budget out to try things on public data"
        )
