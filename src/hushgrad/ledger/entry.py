"""A run's entry in the ledger: reserved ahead, noted as it goes, settled at its end."""

from __future__ import annotations

import functools
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
    Row,
    add_charge,
    as_text,
    loaded,
    now,
    remember,
    sealed,
)
from hushgrad.ledger.rules import Amounts
from hushgrad.ledger.spending import Spend
from hushgrad.types import Refused

UNKNOWN = b""
"""The digest of a step of which a loss of power may have taken the real one."""


class Entry:
    """A run that is charged to a budget.

    One process at a time carries a run on: the first call that writes takes it over, and the
    process that had it before is refused from then on. Reading takes nothing over.
    """

    def __init__(self, file: File, budget: str, identity: str, holder: str | None) -> None:
        self._file, self._budget, self.id, self._holder = file, budget, identity, holder

    @property
    def position(self) -> int:
        """The steps below this may have been released."""
        return self._row().position

    @property
    def settled(self) -> bool:
        """True once the run is over."""
        return self._row().settled is not None

    @property
    def spends(self) -> list[Spend]:
        """The plan's cost and every extra one."""
        account = self._account()
        return [c.spend(account.relation) for c in account.charges if c.entry == self.id]

    def ahead(self, upto: int) -> None:
        """Reserve: the steps below `upto` may be released once this has returned."""
        with self._holding() as connection:
            row = _found(loaded(connection, self._budget, self._file.path), self.id)
            if upto > row.position and row.settled is not None:
                raise Refused(
                    f"expected a run that goes on, got {self.id}, which was settled at "
                    f"{row.settled} with {row.position} steps paid for; start another run"
                )
            self._update(connection, "position = ?", max(upto, row.position))
            sealed(connection, self._budget)

    def digests(self, step: int) -> list[bytes]:
        """The digests of what was released at this step before, oldest first.

        A step that was reserved before the machine went down, and has none, may have lost it:
        it has the digest `UNKNOWN`, which equals no other.
        """
        asked = "SELECT digest FROM digests WHERE entry = ? AND step = ? ORDER BY number"
        with self._file.reading() as connection:
            found = connection.execute(asked, (self.id, step)).fetchall()
            row = _row(connection, self.id)
        doubt = row.doubt if row.boot == boot() else row.position
        return [bytes(digest) for (digest,) in found] or [UNKNOWN] * (step < doubt)

    def note(self, step: int, digest: bytes) -> None:
        """Keep the digest of a release, before the release is used. The same one is kept once.

        It outlives the process, and not a loss of power: `digests` then says that it is unknown.
        """
        with self._holding(durable=False) as connection:
            reserved = _row(connection, self.id).position
            if not 0 <= step < reserved:
                raise Refused(
                    f"expected a step that is reserved, below {reserved}, got {step}; call ahead "
                    "first"
                )
            connection.execute(
                "INSERT OR IGNORE INTO digests (entry, step, digest) VALUES (?, ?, ?)",
                (self.id, step, digest),
            )

    def charge(self, spend: Spend, *, reason: str) -> None:
        """Charge an extra cost of this run before it is released; refused if there is no room."""
        if not reason or reason == PLAN:
            raise ValueError(f"expected a reason for the charge, got {reason!r}; say it in words")
        with self._file.writing() as connection:
            account = loaded(connection, self._budget, self._file.path)
            cost = account.cost(spend)
            account.require_room(cost)
            add_charge(connection, self.id, spend, cost, reason=reason)
            what = f"charged ({spend.epsilon:.6g}, {spend.delta:.6g})-DP: {reason}"
            remember(connection, self._budget, self.id, what)
            sealed(connection, self._budget)

    def settle(self, *, steps: int, event: DpEvent | None) -> None:
        """End the run after `steps` steps that did `event` together; what is unused may come back.

        Under `total` the plan's cost stays, unless nothing was ever reserved and the number of
        steps was not drawn. Under `renyi` the
        cost becomes that of `event`, or of as many steps as may have been released: those that
        were noted, and those reserved before this process took over. Where that cannot be told
        from `event`, or `event` is None, or the number of steps was drawn, the plan's cost stays.
        A settled run stays as it is: its steps may be replayed, and no more may be reserved.
        """
        if self._row().settled is not None:
            return
        with self._holding() as connection:
            account = loaded(connection, self._budget, self._file.path)
            row = _found(account, self.id)
            if not 0 <= steps <= row.position:
                raise ValueError(
                    f"expected between 0 and {row.position} steps, which is what was reserved, "
                    f"got {steps}; pass the steps that were taken"
                )
            plan = next(c for c in account.charges if (c.entry, c.reason) == (self.id, PLAN))
            least = max(steps, row.floor, self._noted(connection))
            cost = _settled_cost(account, row, plan, done=_done(event, steps, least))
            if cost != plan.cost:
                # Only what is still paid for may be replayed.
                self._update(connection, "position = ?", least)
                connection.execute(
                    "UPDATE charges SET cost = ? WHERE number = ?", (as_text(cost), plan.number)
                )
            self._update(connection, "steps = ?, settled = ?", steps, now())
            given_back = "" if cost == plan.cost else ", unused cost given back"
            remember(connection, self._budget, self.id, f"settled after {steps} steps{given_back}")
            sealed(connection, self._budget)

    def _noted(self, connection: sqlite3.Connection) -> int:
        asked = "SELECT MAX(step) FROM digests WHERE entry = ?"
        last = connection.execute(asked, (self.id,)).fetchone()[0]
        return 0 if last is None else last + 1

    def _account(self) -> Account:
        with self._file.reading() as connection:
            return loaded(connection, self._budget, self._file.path)

    def _row(self) -> Row:
        return _found(self._account(), self.id)

    @contextmanager
    def _holding(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction of the one process that carries the run on."""
        if self._holder is None:
            self._take_over()
        with self._file.writing(durable=durable) as connection:
            row = _row(connection, self.id)
            if row.holder != self._holder:
                raise Refused(
                    f"expected to be the only process that carries on the run {self.id}, got "
                    "another that has taken it over; end this one"
                )
            yield connection

    def _take_over(self) -> None:
        holder = secrets.token_hex(8)
        with self._file.writing() as connection:
            row = _found(loaded(connection, self._budget, self._file.path), self.id)
            doubt = row.doubt if row.boot == boot() else row.position
            changes = "holder = ?, floor = ?, doubt = ?, boot = ?"
            self._update(connection, changes, holder, row.position, doubt, boot())
            sealed(connection, self._budget)
        self._holder = holder

    def _update(self, connection: sqlite3.Connection, changes: str, *values: int | str) -> None:
        connection.execute(f"UPDATE entries SET {changes} WHERE id = ?", (*values, self.id))


@functools.cache
def boot() -> str:
    """What tells one run of the machine from the next; where unknown, one process from the next."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return secrets.token_hex(8)


def _row(connection: sqlite3.Connection, identity: str) -> Row:
    found = connection.execute("SELECT * FROM entries WHERE id = ?", (identity,)).fetchone()
    return Row(*found)


def _found(account: Account, identity: str) -> Row:
    return next(row for row in account.rows if row.id == identity)


def _done(event: DpEvent | None, steps: int, least: int) -> DpEvent | None:
    """What may have been done at least, from what was done in `steps`; None if it is not known."""
    if least == 0:
        return NoOpDpEvent()
    if event is None or least <= steps:
        return event
    if isinstance(event, SelfComposedDpEvent) and event.count == steps:
        return attr.evolve(event, count=least)
    return None


def _settled_cost(account: Account, row: Row, plan: Charge, *, done: DpEvent | None) -> Amounts:
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
