"""The ledger's rows as values, and the seal that detects accidental changes to them.

SQLite detects a broken page but not a changed number, so each budget has a digest of everything
that its sums depend on.
"""

from __future__ import annotations

import json
import math
import sqlite3
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from pathlib import Path
from typing import Any

from hushgrad.ledger.file import damage_refusal, digest_of
from hushgrad.ledger.rules import Amounts, Filter, add_amounts, left_of, rule_named
from hushgrad.ledger.spending import Spend, event_from_json, event_to_json
from hushgrad.types import Refused, Relation

PLAN = "plan"
"""The reason of a run's first charge."""


@dataclass(frozen=True)
class Charge:
    """A charge: the spend, and its cost in the filter's units."""

    number: int
    entry: str
    at: str
    reason: str
    event: str
    epsilon: float
    delta: float
    cost: Amounts

    def spend(self, relation: Relation) -> Spend:
        """The spend that was charged."""
        return Spend(event_from_json(self.event), relation, self.epsilon, self.delta)


@dataclass(frozen=True)
class RunRow:
    """A run: the steps below `position` are reserved and may have been released.

    The steps below `floor` were reserved before the current holder took over, so it must assume
    that they were released. The digests of steps below `doubt` may be lost in a power failure.
    """

    id: str
    budget: str
    label: str
    plan: str
    opened: str
    position: int
    floor: int
    doubt: int
    boot: str
    holder: str
    steps: int | None
    settled: str | None


@dataclass(frozen=True)
class Account:
    """A budget and everything that was charged to it."""

    name: str
    epsilon: float
    delta: float
    relation: Relation
    rule: Filter
    fingerprint: str
    rows: tuple[RunRow, ...]
    charges: tuple[Charge, ...]

    @property
    def limit(self) -> Amounts:
        """The budget in the units of the rule."""
        return self.rule.limit(self.epsilon, self.delta)

    @property
    def costs(self) -> list[Amounts]:
        """The cost of each charge."""
        return [charge.cost for charge in self.charges]

    @property
    def spent(self) -> Amounts:
        """The cost of all charges together, including those of open runs."""
        return add_amounts(self.costs, len(self.rule.units))

    @property
    def reserved(self) -> Amounts:
        """The part of `spent` that belongs to runs that are not settled."""
        still_open = {row.id for row in self.rows if row.settled is None}
        costs = [charge.cost for charge in self.charges if charge.entry in still_open]
        return add_amounts(costs, len(self.rule.units))

    @property
    def left(self) -> Amounts:
        """The most that can still be charged at once."""
        return left_of(self.limit, self.costs)

    @property
    def binding(self) -> str | None:
        """The unit of which the smallest share is left; None while nothing is spent."""
        sums = zip(self.spent, self.limit, strict=True)
        shares = [spent / most if most < math.inf else 0.0 for spent, most in sums]
        if not any(shares):
            return None
        return self.rule.units[max(range(len(shares)), key=shares.__getitem__)]

    def cost(self, spend: Spend) -> Amounts:
        """Return what a spend costs in the filter's units; refuse one under another relation."""
        if spend.relation is not self.relation:
            raise Refused(
                f"expected a cost under {self.relation.value}, the relation of the budget "
                f"{self.name}, got one under {spend.relation.value}; plan with relation "
                f"{self.relation.value}"
            )
        found = self.rule.cost(spend)
        if any(math.isnan(amount) for amount in found):
            raise Refused("expected a cost that is a number, got NaN; plan with another noise")
        return found

    def require_room(self, cost: Amounts) -> None:
        """Refuse a cost that would exceed the budget."""
        units = zip(
            self.rule.units, add_amounts([*self.costs, cost], len(cost)), self.limit, strict=True
        )
        over = [unit for unit, amount, most in units if amount > most]
        if not over:
            return
        first = self.rule.units.index(over[0])
        raise Refused(
            f"expected at most {figure(self.left[first])} of {over[0]}, which is what the budget "
            f"{self.name} has left of {self.limit[first]:.6g}, got {figure(cost[first], up=True)}; "
            "plan for what is left, or raise the budget"
        )


def load_account(connection: sqlite3.Connection, name: str, path: Path) -> Account:
    """Load a budget with its runs and charges, and check its seal."""
    found = connection.execute("SELECT * FROM budgets WHERE name = ?", (name,)).fetchone()
    if found is None:
        raise damage_refusal(path, f"one without its budget {name}")
    if _seal(connection, name) != found[-1]:
        raise damage_refusal(path, f"other records of {name} than were written")
    epsilon, delta, relation, rule, order, fingerprint = found[1:7]
    charges = tuple(Charge(*(*row[:-1], _amounts(row[-1]))) for row in _charges(connection, name))
    return Account(
        name,
        epsilon,
        delta,
        Relation(relation),
        rule_named(rule, order),
        fingerprint,
        tuple(RunRow(*row) for row in _rows(connection, name)),
        charges,
    )


def renew_seal(connection: sqlite3.Connection, name: str) -> None:
    """Renew a budget's seal after its rows were changed, in the same transaction."""
    seal = _seal(connection, name)
    connection.execute("UPDATE budgets SET seal = ? WHERE name = ?", (seal, name))


def _seal(connection: sqlite3.Connection, name: str) -> bytes:
    budget = connection.execute(
        "SELECT name, epsilon, delta, relation, rule, alpha, fingerprint FROM budgets "
        "WHERE name = ?",
        (name,),
    ).fetchall()
    return digest_of(budget, _rows(connection, name), _charges(connection, name))


def _rows(connection: sqlite3.Connection, name: str) -> list[tuple[Any, ...]]:
    asked = "SELECT * FROM entries WHERE budget = ? ORDER BY rowid"
    return connection.execute(asked, (name,)).fetchall()


def _charges(connection: sqlite3.Connection, name: str) -> list[tuple[Any, ...]]:
    asked = (
        "SELECT charges.* FROM charges JOIN entries ON charges.entry = entries.id "
        "WHERE entries.budget = ? ORDER BY charges.number"
    )
    return connection.execute(asked, (name,)).fetchall()


def add_row(connection: sqlite3.Connection, row: RunRow) -> None:
    """Insert a new run."""
    values = astuple(row)
    places = ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO entries VALUES ({places})", values)


def add_charge(
    connection: sqlite3.Connection, entry: str, spend: Spend, cost: Amounts, *, reason: str
) -> None:
    """Insert a new charge."""
    connection.execute(
        "INSERT INTO charges (entry, at, reason, event, epsilon, delta, cost) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            entry,
            now(),
            reason,
            event_to_json(spend.event),
            spend.epsilon,
            spend.delta,
            as_text(cost),
        ),
    )


def add_history(connection: sqlite3.Connection, name: str, entry: str | None, what: str) -> None:
    """Append a line to the history."""
    connection.execute(
        "INSERT INTO history (at, budget, entry, what) VALUES (?, ?, ?, ?)",
        (now(), name, entry, what),
    )


def salt(connection: sqlite3.Connection) -> bytes:
    """Return the ledger's random bytes."""
    return bytes(connection.execute("SELECT salt FROM meta").fetchone()[0])


def figure(value: float, *, up: bool = False, digits: int = 6) -> str:
    """Format a number in a few digits, rounded down (or up), so as not to over-state what is left.

    >>> figure(0.8399999999999999), figure(0.84), figure(1 / 3, up=True)
    ('0.839999', '0.84', '0.333334')
    """
    rounding = ROUND_CEILING if up else ROUND_FLOOR
    exact = Decimal(repr(value))
    return f"{float(Context(prec=digits, rounding=rounding).create_decimal(exact)):.6g}"


def as_text(cost: Amounts) -> str:
    """Format amounts as text that reads back bit-identical."""
    return json.dumps([amount if math.isfinite(amount) else None for amount in cost])


def _amounts(text: str) -> Amounts:
    return tuple(math.inf if amount is None else amount for amount in json.loads(text))


def now() -> str:
    """Return the time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
