"""A data set's budget, to which runs are charged before they release anything."""

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
"""A run's row, to what resuming it costs and the reason; None where it costs nothing."""


class Budget:
    """What may be spent on one data set, over all runs on it.

    Every property is read from the file anew: other processes may have charged since.
    """

    def __init__(self, file: File, name: str) -> None:
        self._file, self.name = file, name

    @property
    def account(self) -> Account:
        """The budget with all its runs and charges, as they are now."""
        with self._file.reading() as connection:
            return load_account(connection, self.name, self._file.path)

    @property
    def salt(self) -> bytes:
        """Random bytes of the ledger, by which to key the fingerprint of a data set."""
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
        """The filter that adds up."""
        return self.account.rule

    @property
    def spent(self) -> dict[str, float]:
        """What all runs count, open ones too, in the filter's units."""
        account = self.account
        return dict(zip(account.rule.units, account.spent, strict=True))

    @property
    def left(self) -> Target:
        """What a plan may cost at most: calibrating to exactly this is accepted.

        Under `total` a run may have this ε and this δ, or less of either. Under `renyi` it is an
        ε at the budget's δ by Rényi DP at the filter's order, and by no other accountant.
        """
        account = self.account
        if math.inf in account.limit:
            raise Refused(
                f"expected a budget with a limit, got {self.name}, which has none; calibrate to an "
                "epsilon and a delta of your own"
            )
        if min(account.left) <= 0:
            raise Refused(
                f"expected something left of the budget {self.name}, got nothing; raise it, or "
                "train on other data"
            )
        epsilon, delta = account.rule.within(account.left, account.delta)
        return Target(epsilon, delta, account.relation, account.rule.accountant)

    def open(self, spend: Spend, *, label: str, plan: dict[str, Any], fingerprint: str) -> Entry:
        """Charge a run before it releases anything; refused if it would exceed the budget.

        `plan` is kept as it is. `fingerprint` is a keyed digest of the data (see `Ledger.salt`),
        or empty if unknown: a name keeps its first one, and no other name may have it.
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
        """The fingerprint by which to open a run on data that may be a share of this budget's.

        It is empty where the budget has another one already: the run is charged here, and what the
        name stands for stays. Data that have a budget under another name are refused.
        """
        with self._file.reading() as connection:
            known = load_account(connection, self.name, self._file.path).fingerprint
            _require_no_other(connection, self.name, fingerprint)
        return fingerprint if known in ("", fingerprint) else ""

    def entry(self, identity: str) -> Entry:
        """A run that was opened before, to look at. `resume` is for the process that goes on."""
        _require_row(self.account, identity, self._file)
        return Entry(self._file, self.name, identity, holder=None)

    def resume(
        self, identity: str, *, fingerprint: str = "", charge: Surcharge = lambda row: None
    ) -> Entry:
        """Take a run over, in the place of whatever process has carried it on.

        `charge` says from the run's row, which nobody changes meanwhile, what going on costs
        beyond the plan, and why; None for a replay. It may refuse. Taking over and charging are
        one transaction: both happen, or neither does, and then the other process goes on.

        Data that have a budget under another name are refused. Others may have been edited since
        the run began: what that costs is for `charge` to say.
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
    """Refuse data that have a budget under another name; an unknown fingerprint is none's."""
    asked = "SELECT name FROM budgets WHERE fingerprint = ? AND fingerprint != '' AND name != ?"
    other = connection.execute(asked, (fingerprint, name)).fetchone()
    if other is not None:
        raise Refused(
            f"expected data of its own under the name {name}, got those of {other[0]}, "
            f"which have a budget already; charge the run to {other[0]}"
        )


def _require_same(account: Account, fingerprint: str) -> None:
    if account.fingerprint not in ("", fingerprint):
        raise Refused(
            f"expected the data that {account.name} names, got other data (another fingerprint); "
            "give them a name and a budget of their own, or pass the data as they were"
        )
