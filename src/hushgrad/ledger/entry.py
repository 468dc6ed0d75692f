"""A run's entry in the ledger: steps are reserved in advance, recorded, and settled at the end."""

from __future__ import annotations

import functools
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attr
from dp_accounting import DpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import NoOpDpEvent

from hushgrad.events import MixedDpEvent
from hushgrad.ledger.file import File
from hushgrad.ledger.records import (
    PLAN,
    Account,
    Charge,
    RunRow,
    add_charge,
    add_history,
    as_text,
    load_account,
    now,
    renew_seal,
)
from hushgrad.ledger.rules import Amounts
from hushgrad.ledger.spending import Spend
from hushgrad.types import Refused

UNKNOWN = b""
"""The digest of a step whose real digest may have been lost in a power failure."""


class Entry:
    """A run that is charged to a budget; `Budget.open` and `Budget.resume` return it.

    Guarantees: one process at a time holds a run: the one that opened it, until another resumes
    it. Later writes of the first are refused. An entry without a holder is read-only.

    Args:
        file: the ledger's file.
        budget: the data set's name.
        identity: the run's id.
        holder: a token that identifies the process that holds the run; None to read only.

    Example:
        >>> import tempfile
        >>> from hushgrad.accounting import gaussian
        >>> from hushgrad.ledger import Ledger
        >>> from hushgrad.types import Relation
        >>> ledger = Ledger(tempfile.mkdtemp() + "/ledger.sqlite")
        >>> budget = ledger.set_budget("census", epsilon=3, delta=1e-5)
        >>> cost = Spend(gaussian(4.0), Relation.ADD_REMOVE, epsilon=1.0, delta=1e-6)
        >>> entry = budget.open(cost, label="first try", plan={}, fingerprint="")
        >>> entry.reserve(1)
        >>> entry.note(0, b"digest of the release")
        >>> entry.settle(steps=1, event=None)
        >>> entry.settled, budget.spent
        (True, {'epsilon': 1.0, 'delta': 1e-06})
    """

    def __init__(self, file: File, budget: str, identity: str, holder: str | None) -> None:
        self._file, self._budget, self.id, self._holder = file, budget, identity, holder
        self._process = os.getpid()

    @property
    def position(self) -> int:
        """The number of reserved steps: all steps below it may have been released."""
        return self._row().position

    @property
    def settled(self) -> bool:
        """True once the run is over."""
        return self._row().settled is not None

    @property
    def copied(self) -> bool:
        """True if the ledger's file was copied since the run was last opened or resumed.

        Then the run may have continued with the other copy, which this ledger cannot know.
        """
        asked = "SELECT inode FROM homes WHERE entry = ?"
        with self._file.reading() as connection:
            found = connection.execute(asked, (self.id,)).fetchone()
        return found is None or found[0] != self._file.home

    @property
    def spends(self) -> list[Spend]:
        """The plan's cost and every extra one."""
        account = self._account()
        return [c.spend(account.relation) for c in account.charges if c.entry == self.id]

    def reserve(self, upto: int) -> None:
        """Reserve the steps below `upto`: they may be released once this has returned.

        Raises:
            Refused: if the run is settled, or another process holds it.
        """
        with self._holding() as (connection, _):
            row = _found(load_account(connection, self._budget, self._file.path), self.id)
            if upto > row.position and row.settled is not None:
                raise Refused(
                    f"expected a run that is not over, got {self.id}, which was settled at "
                    f"{row.settled} with {row.position} steps paid for; start another run"
                )
            self._update(connection, "position = ?", max(upto, row.position))
            renew_seal(connection, self._budget)

    def digests(self, step: int) -> list[bytes]:
        """Return the digests of this step's earlier releases, oldest first.

        A step that was reserved before the machine went down, and has no digest, may have lost it:
        then the result is `UNKNOWN`, which equals no digest.
        """
        asked = "SELECT digest FROM digests WHERE entry = ? AND step = ? ORDER BY number"
        with self._file.reading() as connection:
            found = connection.execute(asked, (self.id, step)).fetchall()
            row = _row(connection, self.id)
        doubt = row.doubt if row.boot == boot_id() else row.position
        return [bytes(digest) for (digest,) in found] or [UNKNOWN] * (step < doubt)

    def note(self, step: int, digest: bytes) -> None:
        """Record the digest of a release before the release is used; duplicates are ignored.

        It survives a kill of the process, but maybe not a power failure: then `digests` returns
        `UNKNOWN`.

        Raises:
            Refused: if the step is not reserved, or the run is settled and the digest is new.
        """
        with self._holding(durable=False) as (connection, row):
            if not 0 <= step < row.position:
                raise Refused(
                    f"expected a step that is reserved, below {row.position}, got {step}; call "
                    "reserve first"
                )
            known = "SELECT 1 FROM digests WHERE entry = ? AND step = ? AND digest = ?"
            if connection.execute(known, (self.id, step, digest)).fetchone():
                return
            if row.settled is not None:
                raise settled_refusal(row, f"another release of step {step}")
            connection.execute(
                "INSERT INTO digests (entry, step, digest) VALUES (?, ?, ?)",
                (self.id, step, digest),
            )

    def charge(self, spend: Spend, *, reason: str) -> None:
        """Charge a further cost of this run before it releases anything for it.

        Raises:
            Refused: if it would exceed the budget, or the run is settled.
        """
        with self._holding() as (connection, row):
            if row.settled is not None:
                raise settled_refusal(row, "a charge for a further release")
            account = load_account(connection, self._budget, self._file.path)
            charge_more(connection, account, self.id, spend, reason=reason)
            renew_seal(connection, self._budget)

    def settle(self, *, steps: int, event: DpEvent | None) -> None:
        """End the run; unused cost may be refunded.

        Under `total` the plan's cost stays, unless no step was ever reserved. Under `renyi` the
        cost becomes that of the steps that may have been released: those taken, those recorded,
        and those reserved before this process took over. The plan's cost stays if that cannot be
        computed from `event`, or if the number of steps was drawn at random. After that the run
        can only be replayed; settling again does nothing.

        Args:
            steps: the number of steps that were taken.
            event: what these steps cost together, or None if unknown.

        Raises:
            ValueError: if more steps were taken than reserved.
        """
        with self._holding() as (connection, held):
            if held.settled is not None:
                return
            account = load_account(connection, self._budget, self._file.path)
            row = _found(account, self.id)
            if not 0 <= steps <= row.position:
                raise ValueError(
                    f"expected between 0 and {row.position} steps, which is what was reserved, "
                    f"got {steps}; pass the steps that were taken"
                )
            plan = next(c for c in account.charges if (c.entry, c.reason) == (self.id, PLAN))
            least = max(steps, row.floor, self._noted(connection))
            cost = _settled_cost(account, row, plan, done=_least_done(event, steps, least))
            if cost != plan.cost:
                # From now on only the steps that are still paid for may be replayed.
                self._update(connection, "position = ?", least)
                connection.execute(
                    "UPDATE charges SET cost = ? WHERE number = ?", (as_text(cost), plan.number)
                )
            self._update(connection, "steps = ?, settled = ?", steps, now())
            given_back = "" if cost == plan.cost else ", unused cost given back"
            add_history(
                connection, self._budget, self.id, f"settled after {steps} steps{given_back}"
            )
            renew_seal(connection, self._budget)

    def _noted(self, connection: sqlite3.Connection) -> int:
        asked = "SELECT MAX(step) FROM digests WHERE entry = ?"
        last = connection.execute(asked, (self.id,)).fetchone()[0]
        return 0 if last is None else last + 1

    def _account(self) -> Account:
        with self._file.reading() as connection:
            return load_account(connection, self._budget, self._file.path)

    def _row(self) -> RunRow:
        return _found(self._account(), self.id)

    def require_held(self) -> None:
        """Raise `Refused` if another process has taken over the run."""
        with self._file.reading() as connection:
            self._require_holder(_row(connection, self.id))

    @contextmanager
    def _holding(self, *, durable: bool = True) -> Iterator[tuple[sqlite3.Connection, RunRow]]:
        """Begin a transaction, check that this process holds the run, and yield the run's row."""
        with self._file.writing(durable=durable) as connection:
            row = _row(connection, self.id)
            self._require_holder(row)
            yield connection, row

    def _require_holder(self, row: RunRow) -> None:
        if self._holder is None:
            raise Refused(
                f"expected a run that this process holds, got {self.id}, which it only reads; "
                "resume it first, with Budget.resume"
            )
        if row.holder != self._holder:
            raise Refused(
                f"expected this process to hold the run {self.id}, got another process that has "
                "taken it over; end this one"
            )
        if self._process != os.getpid():
            raise Refused(
                f"expected the process that began or resumed the run {self.id}, got one that was "
                "forked from it; continue in the parent process, or resume the run"
            )

    def _update(self, connection: sqlite3.Connection, changes: str, *values: int | str) -> None:
        connection.execute(f"UPDATE entries SET {changes} WHERE id = ?", (*values, self.id))


def take_over(connection: sqlite3.Connection, row: RunRow, *, home: str) -> str:
    """Make the caller the holder of the run, and return its token.

    From then on, everything that any process may have released is below the row's position.
    """
    token = secrets.token_hex(8)
    doubt = row.doubt if row.boot == boot_id() else row.position
    connection.execute(
        "UPDATE entries SET holder = ?, floor = ?, doubt = ?, boot = ? WHERE id = ?",
        (token, row.position, doubt, boot_id(), row.id),
    )
    connection.execute("INSERT OR REPLACE INTO homes VALUES (?, ?)", (row.id, home))
    return token


def charge_more(
    connection: sqlite3.Connection, account: Account, run: str, spend: Spend, *, reason: str
) -> None:
    """Charge a run more than its plan, within a transaction; raises if that exceeds the budget."""
    if not reason or reason == PLAN:
        raise ValueError(f"expected a reason for the charge, got {reason!r}; describe it in words")
    cost = account.cost(spend)
    account.require_room(cost)
    add_charge(connection, run, spend, cost, reason=reason)
    what = f"charged ({spend.epsilon:.6g}, {spend.delta:.6g})-DP: {reason}"
    add_history(connection, account.name, run, what)


def settled_refusal(row: RunRow, got: str) -> Refused:
    """Return the refusal of an addition to a run that is settled."""
    return Refused(
        f"expected at most a replay of the run {row.id}, which was settled at {row.settled}, got "
        f"{got}; start another run"
    )


@functools.cache
def boot_id() -> str:
    """Return an identifier of the machine's current boot; if unknown, one of this process."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return secrets.token_hex(8)


def _row(connection: sqlite3.Connection, identity: str) -> RunRow:
    found = connection.execute("SELECT * FROM entries WHERE id = ?", (identity,)).fetchone()
    return RunRow(*found)


def _found(account: Account, identity: str) -> RunRow:
    return next(row for row in account.rows if row.id == identity)


def _least_done(event: DpEvent | None, steps: int, least: int) -> DpEvent | None:
    """Return the event of the first `least` steps, given that of `steps`; None if unknown."""
    if least == 0:
        return NoOpDpEvent()
    if event is None or least <= steps:
        return event
    if isinstance(event, SelfComposedDpEvent) and event.count == steps:
        return attr.evolve(event, count=least)
    return None


def _settled_cost(account: Account, row: RunRow, plan: Charge, *, done: DpEvent | None) -> Amounts:
    # If the number of steps was drawn at random, the cost is that of the mixture. Refunding small
    # draws, while large ones cost no more than the mixture, would under-count. A run without steps
    # is not refunded either: its drawn number is known, and the user could draw again.
    if MixedDpEvent.__name__ in plan.event:
        return plan.cost
    if row.position == 0:
        return (0.0,) * len(plan.cost)
    if done is None or not account.rule.refunds:
        return plan.cost
    if isinstance(done, NoOpDpEvent):
        return (0.0,) * len(plan.cost)
    cost = account.cost(Spend(done, account.relation, plan.epsilon, plan.delta))
    if any(done_now > planned for done_now, planned in zip(cost, plan.cost, strict=True)):
        raise Refused(
            "expected at most what the plan costs, got an event that costs more; charge further "
            "costs before their release"
        )
    return cost
