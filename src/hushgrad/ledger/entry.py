"""A run's entry in the ledger: reserved ahead, noted as it goes, settled at its end."""

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
"""The digest of a step of which a loss of power may have taken the real one."""


class Entry:
    """A run that is charged to a budget.

    One process at a time carries a run on: the one that opened it, until another resumes it.
    Whatever the first would write after that is refused. An entry without a holder only reads.
    """

    def __init__(self, file: File, budget: str, identity: str, holder: str | None) -> None:
        self._file, self._budget, self.id, self._holder = file, budget, identity, holder
        self._process = os.getpid()

    @property
    def position(self) -> int:
        """The steps below this may have been released."""
        return self._row().position

    @property
    def settled(self) -> bool:
        """True once the run is over."""
        return self._row().settled is not None

    @property
    def copied(self) -> bool:
        """True if the ledger is a copy, made after the run was last begun or resumed.

        The run may then have gone on by the other ledger, and this one knows nothing of that.
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
        """Reserve: the steps below `upto` may be released once this has returned."""
        with self._holding() as (connection, _):
            row = _found(load_account(connection, self._budget, self._file.path), self.id)
            if upto > row.position and row.settled is not None:
                raise Refused(
                    f"expected a run that goes on, got {self.id}, which was settled at "
                    f"{row.settled} with {row.position} steps paid for; start another run"
                )
            self._update(connection, "position = ?", max(upto, row.position))
            renew_seal(connection, self._budget)

    def digests(self, step: int) -> list[bytes]:
        """The digests of what was released at this step before, oldest first.

        A step that was reserved before the machine went down, and has none, may have lost it:
        it has the digest `UNKNOWN`, which equals no other.
        """
        asked = "SELECT digest FROM digests WHERE entry = ? AND step = ? ORDER BY number"
        with self._file.reading() as connection:
            found = connection.execute(asked, (self.id, step)).fetchall()
            row = _row(connection, self.id)
        doubt = row.doubt if row.boot == boot_id() else row.position
        return [bytes(digest) for (digest,) in found] or [UNKNOWN] * (step < doubt)

    def note(self, step: int, digest: bytes) -> None:
        """Keep the digest of a release, before the release is used. The same one is kept once.

        It outlives the process, and not a loss of power: `digests` then says that it is unknown.
        A settled run may only be replayed: a digest that it does not have is refused.
        """
        with self._holding(durable=False) as (connection, row):
            if not 0 <= step < row.position:
                raise Refused(
                    f"expected a step that is reserved, below {row.position}, got {step}; call "
                    "ahead first"
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
        """Charge an extra cost of this run before it is released; refused if there is no room."""
        with self._holding() as (connection, row):
            if row.settled is not None:
                raise settled_refusal(row, "a charge for what it would release besides")
            account = load_account(connection, self._budget, self._file.path)
            charge_more(connection, account, self.id, spend, reason=reason)
            renew_seal(connection, self._budget)

    def settle(self, *, steps: int, event: DpEvent | None) -> None:
        """End the run after `steps` steps that did `event` together; what is unused may come back.

        Under `total` the plan's cost stays, unless nothing was ever reserved and the number of
        steps was not drawn. Under `renyi` the
        cost becomes that of `event`, or of as many steps as may have been released: those that
        were noted, and those reserved before this process took over. Where that cannot be told
        from `event`, or `event` is None, or the number of steps was drawn, the plan's cost stays.
        A settled run stays as it is: its steps may be replayed, and no more may be reserved.
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
                # Only what is still paid for may be replayed.
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
        """Refuse what this process would do if another one has the run by now."""
        with self._file.reading() as connection:
            self._require_holder(_row(connection, self.id))

    @contextmanager
    def _holding(self, *, durable: bool = True) -> Iterator[tuple[sqlite3.Connection, RunRow]]:
        """A transaction of the one process that carries the run on, and the run's row in it."""
        with self._file.writing(durable=durable) as connection:
            row = _row(connection, self.id)
            self._require_holder(row)
            yield connection, row

    def _require_holder(self, row: RunRow) -> None:
        if self._holder is None:
            raise Refused(
                f"expected a run that this process carries on, got {self.id}, which it only reads; "
                "resume it first, with Budget.resume"
            )
        if row.holder != self._holder:
            raise Refused(
                f"expected to be the only process that carries on the run {self.id}, got "
                "another that has taken it over; end this one"
            )
        if self._process != os.getpid():
            raise Refused(
                f"expected the process that began or resumed the run {self.id}, got one that was "
                "forked from it; go on in the first, or resume the run"
            )

    def _update(self, connection: sqlite3.Connection, changes: str, *values: int | str) -> None:
        connection.execute(f"UPDATE entries SET {changes} WHERE id = ?", (*values, self.id))


def take_over(connection: sqlite3.Connection, row: RunRow, *, home: str) -> str:
    """Make the caller the one that carries the run on; returns what it is known by from now on.

    Whatever may have been released so far, by anyone, is below the row's position from here on.
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
    """Charge a run more than its plan, within a transaction; refused if there is no room."""
    if not reason or reason == PLAN:
        raise ValueError(f"expected a reason for the charge, got {reason!r}; say it in words")
    cost = account.cost(spend)
    account.require_room(cost)
    add_charge(connection, run, spend, cost, reason=reason)
    what = f"charged ({spend.epsilon:.6g}, {spend.delta:.6g})-DP: {reason}"
    add_history(connection, account.name, run, what)


def settled_refusal(row: RunRow, got: str) -> Refused:
    """The refusal of what would add to a run that is settled."""
    return Refused(
        f"expected at most a replay of the run {row.id}, which was settled at {row.settled}, got "
        f"{got}; start another run"
    )


@functools.cache
def boot_id() -> str:
    """What tells one run of the machine from the next; where unknown, one process from the next."""
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
    """What may have been done at least, from what was done in `steps`; None if it is not known."""
    if least == 0:
        return NoOpDpEvent()
    if event is None or least <= steps:
        return event
    if isinstance(event, SelfComposedDpEvent) and event.count == steps:
        return attr.evolve(event, count=least)
    return None


def _settled_cost(account: Account, row: RunRow, plan: Charge, *, done: DpEvent | None) -> Amounts:
    # Where the steps were drawn beforehand, the cost is that of the draw: giving back what a
    # small number leaves over, and no more than the draw's for a large one, would under-count.
    # Nor is a run given back that took no step: the number is known, and could be drawn anew.
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
            "expected at most what the plan costs, got an event that costs more; charge what was "
            "done beyond the plan before it is released"
        )
    return cost
