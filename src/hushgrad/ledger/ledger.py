"""The ledger: budgets of data sets, and the runs that are charged to them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from hushgrad.accounting.accountants import require_delta
from hushgrad.ledger.budget import Budget
from hushgrad.ledger.file import File
from hushgrad.ledger.records import Account, add_history, figure, load_account, renew_seal, salt
from hushgrad.ledger.rules import Amounts, Filter, total
from hushgrad.types import Refused, Relation


class Ledger:
    """A file that records what was spent on each data set; it is created if it does not exist.

    Guarantees: a charge is on the disk before the call returns, so that a crash can only
    over-count. Charges of several processes cannot exceed a budget together. Every operation
    happens as a whole or not at all.

    Args:
        path: the ledger's file.
        wait: how many seconds to wait for other processes.

    Raises:
        Refused: if the file is damaged, locked, or not a ledger.

    Example:
        >>> import tempfile
        >>> ledger = Ledger(tempfile.mkdtemp() + "/ledger.sqlite")
        >>> budget = ledger.set_budget("census", epsilon=3, delta=1e-5)
        >>> ledger.names, budget.spent, budget.left.epsilon
        (['census'], {'epsilon': 0.0, 'delta': 0.0}, 3.0)

    Reference: Rogers et al. 2016, Privacy Odometers and Filters.
    """

    def __init__(self, path: str | os.PathLike[str], *, wait: float = 60.0) -> None:
        self.path = Path(path).absolute()
        self._file = File(self.path, wait=wait)

    @property
    def salt(self) -> bytes:
        """The ledger's random bytes, the key for fingerprints of data sets."""
        with self._file.reading() as connection:
            return salt(connection)

    def set_budget(
        self,
        name: str,
        *,
        epsilon: float,
        delta: float,
        relation: Relation | None = None,
        rule: Filter | None = None,
    ) -> Budget:
        """Set or change what may be spent on a data set; the history records changes.

        Args:
            name: the data set's name.
            epsilon: ε; `math.inf` with `delta=1` sets no limit, and only records.
            delta: δ.
            relation: what makes two data sets neighbours; add/remove for a new budget.
            rule: the filter by which costs add up; `total()` for a new budget.

        Raises:
            Refused: if the budget would be below what is spent, or if relation or filter would
                change after a run was charged.
        """
        require_budget(name, epsilon=epsilon, delta=delta)
        with self._file.writing() as connection:
            asked = "SELECT 1 FROM budgets WHERE name = ?"
            account = None
            if connection.execute(asked, (name,)).fetchone():
                account = load_account(connection, name, self.path)
            chosen = rule or (account.rule if account else total())
            between = relation or (account.relation if account else Relation.ADD_REMOVE)
            limit = chosen.limit(epsilon, delta)
            instead = ""
            if account is None:
                asked = "INSERT INTO budgets VALUES (?, 1, 1, '', '', 0, '', '')"
                connection.execute(asked, (name,))
            else:
                _require_unchanged(account, chosen, between, limit)
                instead = f" in place of ({account.epsilon:.6g}, {account.delta:.6g})"
            connection.execute(
                "UPDATE budgets SET epsilon = ?, delta = ?, relation = ?, rule = ?, alpha = ? "
                "WHERE name = ?",
                (epsilon, delta, between.value, chosen.name, chosen.order, name),
            )
            what = f"budget set to ({epsilon:.6g}, {delta:.6g})-DP{instead}"
            add_history(connection, name, None, f"{what}, {between.value}, filter {chosen.title}")
            renew_seal(connection, name)
        return Budget(self._file, name)

    def budget(self, name: str) -> Budget:
        """Return the budget of a data set.

        Raises:
            Refused: if the data set has no budget; the message lists those that have one.
        """
        names = self.names
        if name not in names:
            raise Refused(
                f"expected a data set with a budget in {self.path}, got {name!r}; there "
                + (f"are {', '.join(names)}" if names else "is none yet: set one with set_budget")
            )
        return Budget(self._file, name)

    @property
    def names(self) -> list[str]:
        """The data sets that have a budget."""
        with self._file.reading() as connection:
            rows = connection.execute("SELECT name FROM budgets ORDER BY name").fetchall()
        return [row[0] for row in rows]

    def history(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return what happened, oldest first: when, to which budget, by which run, and what."""
        asked = "SELECT at, budget, entry, what FROM history WHERE ?1 IS NULL OR budget = ?1"
        with self._file.reading() as connection:
            rows = connection.execute(f"{asked} ORDER BY number", (name,)).fetchall()
        return [dict(zip(("at", "budget", "entry", "what"), row, strict=True)) for row in rows]

    def close(self) -> None:
        """Close the file in this process; the next use opens it again."""
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r})"


def require_budget(name: str, *, epsilon: float, delta: float) -> None:
    """Raise unless these are a name and a budget."""
    if not name or name != name.strip() or not name.isprintable():
        raise ValueError(
            f"expected the name of a data set, got {name!r}; use a word such as 'census'"
        )
    if not epsilon > 0:
        raise ValueError(f"expected epsilon > 0, got {epsilon}; 1 to 8 is usual")
    if (epsilon == math.inf) != (delta == 1):
        raise ValueError(
            f"expected both epsilon = inf and delta = 1 (no limit) or neither, got {epsilon} and "
            f"{delta}; pass both or neither"
        )
    if epsilon < math.inf:
        require_delta(delta)


def _require_unchanged(account: Account, rule: Filter, relation: Relation, limit: Amounts) -> None:
    if not account.rows:
        return
    old, new = (account.rule.title, account.relation.value), (rule.title, relation.value)
    if old != new:
        raise Refused(
            f"expected the filter {old[0]} under {old[1]}, with which runs on {account.name} were "
            f"charged, got {new[0]} under {new[1]}; keep it: a filter is valid only if it is "
            "chosen before the runs"
        )
    for unit, spent, most in zip(rule.units, account.spent, limit, strict=True):
        if spent > most:
            raise Refused(
                f"expected a budget of at least what is spent, {figure(spent, up=True)} of {unit}, "
                f"got {figure(most)}; what was released cannot be taken back"
            )
