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
    """A file that remembers what was spent on each data set; made if there is none.

    Guarantees: what is charged is on the disk before the call returns, so that a crash can only
    over-count; charges of several processes cannot together exceed a budget; an operation happens
    as a whole or not at all. `wait` is how many seconds to wait for other processes.
    """

    def __init__(self, path: str | os.PathLike[str], *, wait: float = 60.0) -> None:
        self.path = Path(path).absolute()
        self._file = File(self.path, wait=wait)

    @property
    def salt(self) -> bytes:
        """Random bytes of this ledger, by which to key the fingerprint of a data set."""
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
        """Set what may be spent on a data set, or change it; changes are kept in the history.

        Relation and filter, if left out, stay as they are; a new budget has add/remove and
        `total()`. They cannot change once a run was charged, and the budget cannot be set below
        what is spent. With `epsilon=math.inf` and `delta=1` nothing is refused, and everything is
        remembered.
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
        """The budget of a data set; refused, with the names that there are, if it has none."""
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
        """What happened, oldest first: when, to which budget, by which run, and what."""
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
    """Raise for what is no name or no budget."""
    if not name or name != name.strip() or not name.isprintable():
        raise ValueError(f"expected the name of a data set, got {name!r}; a word will do")
    if not epsilon > 0:
        raise ValueError(f"expected epsilon > 0, got {epsilon}; 1 to 8 is usual")
    if (epsilon == math.inf) != (delta == 1):
        raise ValueError(
            f"expected an infinite epsilon with delta 1, for no limit at all, got {epsilon} and "
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
            f"expected the filter {old[0]} under {old[1]}, by which runs on {account.name} were "
            f"charged, got {new[0]} under {new[1]}; keep it: a filter holds only if it is chosen "
            "before the runs"
        )
    for unit, spent, most in zip(rule.units, account.spent, limit, strict=True):
        if spent > most:
            raise Refused(
                f"expected a budget of at least what is spent, {figure(spent, up=True)} of {unit}, "
                f"got {figure(most)}; what was released cannot be taken back"
            )
