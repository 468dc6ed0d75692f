"""`hushgrad ledger`: what was spent on each data set, and what may still be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hushgrad.accounting import gaussian, poisson, repeated
from hushgrad.cli.errors import explain_errors
from hushgrad.cli.parameters import AsJson
from hushgrad.events import steps_of
from hushgrad.ledger import Budget, Filter, Ledger, order_for, renyi, total
from hushgrad.ledger.ledger import require_budget
from hushgrad.ledger.records import Account, Charge, RunRow, figure
from hushgrad.ledger.rules import Amounts
from hushgrad.types import Relation

ledger = typer.Typer(no_args_is_help=True, help="See, set and export budgets of data sets.")
"""The group of commands `hushgrad ledger`."""


class FilterName(Enum):
    """The filters, as the command line spells them."""

    TOTAL = "total"
    RENYI = "renyi"


_File = typer.Option("--ledger", envvar="HUSHGRAD_LEDGER", help="the ledger's file")
LedgerFile = Annotated[Path, _File]
_DEFAULT = Path("hushgrad-ledger.sqlite")
_UNITS = {"epsilon": "ε", "delta": "δ", "rdp": "Rényi DP"}
OneName = Annotated[str | None, typer.Argument(help="a data set; all of them if left out")]


@ledger.command()
def show(name: OneName = None, path: LedgerFile = _DEFAULT, as_json: AsJson = False) -> None:
    """Say for each data set what its budget is, what is spent, and what is left."""
    with _open_ledger(path) as books:
        accounts = [budget.account for budget in _budgets(books, name)]
    if as_json:
        typer.echo(json.dumps([_facts(account) for account in accounts]))
        return
    if not accounts:
        typer.echo(f"no budget in {path} yet: set one with hushgrad ledger set-budget")
        return
    console = Console()
    for account in accounts:
        open_runs = sum(row.settled is None for row in account.rows)
        console.print(f"[bold]{escape(account.name)}[/bold]: {_terms_in_words(account)}")
        console.print(f"{len(account.rows)} runs, {open_runs} of them open")
        console.print(_sums(account))


@ledger.command()
def set_budget(
    name: Annotated[str, typer.Argument(help="the name of the data set")],
    epsilon: Annotated[float, typer.Option(help="ε of all runs together")],
    delta: Annotated[float, typer.Option(help="δ of all runs together")],
    path: LedgerFile = _DEFAULT,
    relation: Annotated[Relation | None, typer.Option(help="what makes neighbours")] = None,
    filter: Annotated[FilterName | None, typer.Option(help="how runs add up")] = None,
    order: Annotated[float | None, typer.Option(help="renyi: the order α")] = None,
    typical_records: Annotated[int | None, typer.Option(help="or the order for such a run")] = None,
    typical_batch: Annotated[int | None, typer.Option(help="its expected batch")] = None,
    typical_epochs: Annotated[float | None, typer.Option(help="its passes over the data")] = None,
    typical_noise_multiplier: Annotated[float | None, typer.Option(help="its σ")] = None,
) -> None:
    """Set what may be spent on a data set, or raise or lower it.

    The filter total adds up ε and δ of whole runs. The filter renyi adds up Rényi DP at one order,
    and gives back the steps that a run did not take; name the order, or a typical run to choose it
    for. Exits with 2, and writes nothing, if that makes no sense or less than what is spent.
    """
    with explain_errors():
        # All is checked before the file is opened, which would make it.
        require_budget(name, epsilon=epsilon, delta=delta)
        sizes = (typical_records, typical_batch, typical_epochs, typical_noise_multiplier)
        rule = _rule(filter, order, sizes, delta, relation or Relation.ADD_REMOVE)
        # Raises for an (ε, δ) that the filter cannot keep.
        if rule is not None:
            rule.limit(epsilon, delta)
        with Ledger(path) as books:
            budget = books.set_budget(
                name, epsilon=epsilon, delta=delta, relation=relation, rule=rule
            )
            account = budget.account
    typer.echo(f"{name}: {_terms_in_words(account)}")


@ledger.command()
def history(name: OneName = None, path: LedgerFile = _DEFAULT, as_json: AsJson = False) -> None:
    """List what happened, oldest first."""
    with _open_ledger(path) as books:
        _budgets(books, name)  # a name that is not there is an error, and not an empty history
        found = books.history(name)
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = _table("at", "data set", "run", "what")
    for line in found:
        table.add_row(line["at"], line["budget"], line["entry"] or "", line["what"])
    Console().print(table)


@ledger.command()
def export(
    path: LedgerFile = _DEFAULT,
    output: Annotated[Path | None, typer.Option(help="a file; printed if left out")] = None,
) -> None:
    """Write everything that is public as JSON: budgets, runs, charges and history.

    Left out are what would tell of the data or the noise: fingerprints, digests and the salt.
    """
    with _open_ledger(path) as books:
        whole = {
            "budgets": [_account_for_export(budget.account) for budget in _budgets(books, None)],
            "history": books.history(),
        }
        text = json.dumps(whole, indent=2)
        if output is None:
            typer.echo(text)
            return
        try:
            output.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"expected a file that can be written, got {output} ({error.strerror}); name "
                "another --output"
            ) from error


@contextmanager
def _open_ledger(path: Path) -> Iterator[Ledger]:
    """The ledger in a file that is there: to look at one must not make one."""
    with explain_errors():
        if not path.exists():
            raise ValueError(
                f"expected a ledger, got no file at {path}; name one with --ledger, or make one "
                "with hushgrad ledger set-budget"
            )
        with Ledger(path) as books:
            yield books


def _budgets(books: Ledger, name: str | None) -> list[Budget]:
    return [books.budget(each) for each in (books.names if name is None else [name])]


def _rule(
    kind: FilterName | None,
    order: float | None,
    sizes: tuple[int | None, int | None, float | None, float | None],
    delta: float,
    relation: Relation,
) -> Filter | None:
    records, batch, epochs, sigma = sizes
    typical = any(size is not None for size in sizes)
    if kind is not FilterName.RENYI:
        if order is not None or typical:
            raise ValueError(
                "expected --order and --typical-… with --filter renyi only, got one without it; "
                "add --filter renyi or leave it out"
            )
        return None if kind is None else total()
    if order is not None and not typical:
        return renyi(order)
    if order is not None or records is None or batch is None or epochs is None or sigma is None:
        raise ValueError(
            "expected either --order or all of --typical-records, --typical-batch, "
            "--typical-epochs and --typical-noise-multiplier, got something else; give one of the "
            "two"
        )
    if not 1 <= batch <= records:
        raise ValueError(
            f"expected 1 <= batch <= records for the typical run, got {batch} of {records}; "
            "describe a run that could be"
        )
    # An order that is good for this run is good for those like it; it binds none of them.
    step = poisson(batch / records, gaussian(sigma))
    run = repeated(steps_of(epochs, records=records, batch=batch), step)
    return renyi(order_for(run, delta=delta, relation=relation))


def _terms_in_words(account: Account) -> str:
    budget = f"({account.epsilon:g}, {account.delta:g})-DP"
    return f"{budget}, {account.relation.value}, filter {account.rule.title}"


def _sums(account: Account) -> Table:
    table = _table("", "budget", "spent", "of it open runs", "left", "")
    sums = zip(account.limit, account.spent, account.reserved, account.left, strict=True)
    for unit, (limit, spent, reserved, left) in zip(account.rule.units, sums, strict=True):
        # What is spent is rounded up, and what is left down: neither may look better than it is.
        used = (figure(spent, up=True), figure(reserved, up=True))
        binds = "binds: the least share is left" if unit == account.binding else ""
        table.add_row(_UNITS[unit], figure(limit), *used, figure(left), binds)
    return table


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _facts(account: Account) -> dict[str, Any]:
    def by_unit(amounts: Amounts) -> dict[str, float | None]:
        return dict(zip(account.rule.units, map(_finite, amounts), strict=True))

    return {
        "name": account.name,
        "epsilon": _finite(account.epsilon),
        "delta": account.delta,
        "relation": account.relation.value,
        "filter": account.rule.name,
        "order": account.rule.order,
        "limit": by_unit(account.limit),
        "spent": by_unit(account.spent),
        "reserved": by_unit(account.reserved),
        "left": by_unit(account.left),
        "binds": account.binding,
        "runs": len(account.rows),
        "open_runs": sum(row.settled is None for row in account.rows),
    }


def _account_for_export(account: Account) -> dict[str, Any]:
    # The number of runs gives way to the runs themselves.
    return _facts(account) | {"runs": [_run(row, account.charges) for row in account.rows]}


def _run(row: RunRow, charges: tuple[Charge, ...]) -> dict[str, Any]:
    return {
        "id": row.id,
        "label": row.label,
        "plan": json.loads(row.plan),
        "opened": row.opened,
        "steps_reserved": row.position,
        "steps_taken": row.steps,
        "settled": row.settled,
        "charges": [
            {
                "at": charge.at,
                "reason": charge.reason,
                "event": json.loads(charge.event),
                "epsilon": _finite(charge.epsilon),
                "delta": charge.delta,
                "counts": [_finite(amount) for amount in charge.cost],
            }
            for charge in charges
            if charge.entry == row.id
        ],
    }


def _finite(amount: float) -> float | None:
    """JSON has no infinity: null stands for it."""
    return amount if math.isfinite(amount) else None
