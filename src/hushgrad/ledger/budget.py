"""The budget of a data set. A run is charged to it before the run releases anything."""

from __future__ import annotations

import json
import math
import secrets
import sqlite3
from collections.abc import Callable
from typing import Any

from hushgrad.accounting import Target
from hushgrad.ledger.entry import Entry, boot_id, charge_more, take_over
from hushgrad.ledger.file import File
from hushgrad.ledger.records import (
    PLAN,
    Account,
    RunRow,
    add_charge,
    add_history,
    add_row,
    load_account,
    now,
    renew_seal,
    salt,
)
from hushgrad.ledger.rules import Filter
from hushgrad.ledger.spending import Spend
from hushgrad.types import Refused, Relation

Surcharge = Callable[[RunRow], tuple[Spend, str] | None]
"""Maps a run's row to the cost of resuming it and the reason; None if it costs nothing."""


class Budget:
    """What may be spent on one data set, by all runs together; `Ledger.budget` returns it.

    Guarantees: every property is read from the file each time, because other processes may have
    charged the budget in the meantime.

    Args:
        file: the ledger's file.
        name: the data set's name.

    Example:
        >>> import tempfile
        >>> from hushgrad.ledger import Ledger
        >>> ledger = Ledger(tempfile.mkdtemp() + "/ledger.sqlite")
        >>> ledger.set_budget("census", epsilon=3, delta=1e-5)
        Budget('census', (3, 1e-05), total())
    """

    def __init__(self, file: File, name: str) -> None:
        self._file, self.name = file, name

    @property
    def account(self) -> Account:
        """The budget with all its current runs and charges."""
        with self._file.reading() as connection:
            return load_account(connection, self.name, self._file.path)

    @property
    def salt(self) -> bytes:
        """The ledger's random bytes, the key for fingerprints of data sets."""
        with self._file.reading() as connection:
            return salt(connection)

    @property
    def epsilon(self) -> float:
        """ε of the budget."""
        return self.account.epsilon

    @property
    def delta(self) -> float:
        """δ of the budget."""
        return self.account.delta

    @property
    def relation(self) -> Relation:
        """What makes two data sets neighbours, for every run that is charged here."""
        return self.account.relation

    @property
    def rule(self) -> Filter:
        """The filter by which costs add up."""
        return self.account.rule

    @property
    def spent(self) -> dict[str, float]:
        """What all runs cost together, including open ones, in the filter's units."""
        account = self.account
        return dict(zip(account.rule.units, account.spent, strict=True))

    @property
    def left(self) -> Target:
        """What a plan may still cost: a plan that is calibrated to exactly this is accepted.

        Under `total` a run may use this ε and this δ, or less. Under `renyi` the ε holds at the
        budget's δ for Rényi DP at the filter's order, and for no other accountant.

        Raises:
            Refused: if the budget has no limit, or nothing is left.
        """
        account = self.account
        if math.inf in account.limit:
            raise Refused(
                f"expected a budget with a limit, got {self.name}, which has none; choose epsilon "
                "and delta yourself"
            )
        if min(account.left) <= 0:
            raise Refused(
                f"expected the budget {self.name} to have something left, got nothing; raise the "
                "budget, or train on other data"
            )
        epsilon, delta = account.rule.within(account.left, account.delta)
        return Target(epsilon, delta, account.relation, account.rule.accountant)

    def open(self, spend: Spend, *, label: str, plan: dict[str, Any], fingerprint: str) -> Entry:
        """Charge a run before it releases anything.

        Args:
            spend: what the run costs.
            label: a name for people.
            plan: a description of the run, stored as it is.
            fingerprint: a keyed digest of the data (see `Ledger.salt`), or "" if unknown. A data
                set's name keeps its first fingerprint, and no other name may have the same one.

        Raises:
            Refused: if the run would exceed the budget, or the fingerprint contradicts the name.
        """
        described = json.dumps(plan, sort_keys=True)
        identity = secrets.token_hex(8)
        row = RunRow(
            identity, self.name, label, described, now(), 0, 0, 0, boot_id(), "", None, None
        )
        with self._file.writing() as connection:
            account = load_account(connection, self.name, self._file.path)
            cost = account.cost(spend)
            account.require_room(cost)
            if fingerprint:
                _require_no_other(connection, self.name, fingerprint)
                _require_same(account, fingerprint)
                connection.execute(
                    "UPDATE budgets SET fingerprint = ? WHERE name = ?", (fingerprint, self.name)
                )
            add_row(connection, row)
            holder = take_over(connection, row, home=self._file.home)
            add_charge(connection, identity, spend, cost, reason=PLAN)
            what = f"opened {label}: ({spend.epsilon:.6g}, {spend.delta:.6g})-DP"
            add_history(connection, self.name, identity, what)
            renew_seal(connection, self.name)
        return Entry(self._file, self.name, identity, holder)

    def share(self, fingerprint: str) -> str:
        """Return the fingerprint to open a run with, if its data may be part of this data set.

        It is "" if the budget already has another fingerprint: the run is charged to this budget,
        and the budget's fingerprint stays.

        Raises:
            Refused: if the data have a budget under another name.
        """
        with self._file.reading() as connection:
            known = load_account(connection, self.name, self._file.path).fingerprint
            _require_no_other(connection, self.name, fingerprint)
        return fingerprint if known in ("", fingerprint) else ""

    def entry(self, identity: str) -> Entry:
        """Return the entry of an earlier run, for reading only; `resume` continues a run."""
        _require_row(self.account, identity, self._file)
        return Entry(self._file, self.name, identity, holder=None)

    def resume(
        self, identity: str, *, fingerprint: str = "", charge: Surcharge = lambda row: None
    ) -> Entry:
        """Take over a run from the process that held it.

        Guarantees: taking over and charging are one transaction. Either both happen, or neither,
        and then the other process may continue.

        Args:
            identity: the run's id.
            fingerprint: a keyed digest of the data. It may differ from the run's first one, if
                records were edited; `charge` computes what that costs.
            charge: maps the run's row, locked during the call, to what resuming costs beyond the
                plan and why; None for a replay. It may raise `Refused`.

        Raises:
            Refused: if there is no such run, or the data have a budget under another name.
        """
        with self._file.writing() as connection:
            account = load_account(connection, self.name, self._file.path)
            _require_no_other(connection, self.name, fingerprint)
            row = _require_row(account, identity, self._file)
            more = charge(row)
            if more is not None:
                spend, reason = more
                charge_more(connection, account, identity, spend, reason=reason)
            holder = take_over(connection, row, home=self._file.home)
            renew_seal(connection, self.name)
        return Entry(self._file, self.name, identity, holder)

    def __repr__(self) -> str:
        account = self.account
        return f"Budget({self.name!r}, ({account.epsilon:g}, {account.delta:g}), {account.rule!r})"


def _require_row(account: Account, identity: str, file: File) -> RunRow:
    for row in account.rows:
        if row.id == identity:
            return row
    raise Refused(
        f"expected a run that was charged to {account.name} in {file.path}, got {identity!r}; "
        "resume with the ledger that the run was started with"
    )


def _require_no_other(connection: sqlite3.Connection, name: str, fingerprint: str) -> None:
    """Refuse data that have a budget under another name; an unknown fingerprint never matches."""
    asked = "SELECT name FROM budgets WHERE fingerprint = ? AND fingerprint != '' AND name != ?"
    other = connection.execute(asked, (fingerprint, name)).fetchone()
    if other is not None:
        raise Refused(
            f"expected data that only {name} names, got the data of {other[0]}, which already have "
            f"a budget; charge the run to {other[0]}"
        )


def _require_same(account: Account, fingerprint: str) -> None:
    if account.fingerprint not in ("", fingerprint):
        raise Refused(
            f"expected the data that {account.name} names, got other data (another fingerprint); "
            "give them another name and budget, or pass the unchanged data"
        )
