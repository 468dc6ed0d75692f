"""The terms of a plan: what it may cost, by the options or by the budget of a data set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dp_accounting import DpEvent

from hushgrad.accounting import ACCOUNTANTS, PLD, Accountant
from hushgrad.accounting.accountants import require_delta
from hushgrad.accounting.calibration import require_proof
from hushgrad.ledger import Budget, Ledger, Spend
from hushgrad.types import Relation


@dataclass(frozen=True)
class Terms:
    """How a plan is to be accounted for.

    Args:
        epsilon: what it may cost, None if neither the options nor a budget say.
        delta: δ.
        relation: what makes two data sets neighbours.
        accountant: what turns the plan into ε.
    """

    epsilon: float | None
    delta: float
    relation: Relation
    accountant: Accountant


@contextmanager
def open_budget(ledger: Path | None, name: str | None, option: str) -> Iterator[Budget | None]:
    """Open the budget of a data set, or yield None if none was named. Nothing is written.

    Args:
        ledger: the ledger's file.
        name: the data set's name in it.
        option: the option that gives the name, for messages.

    Raises:
        ValueError: only one of the two was given, the file is no ledger, or it has no such budget.
    """
    if (ledger is None) != (name is None):
        missing = "--ledger" if ledger is None else option
        raise ValueError(f"expected --ledger and {option} together, got no {missing}; give both")
    if ledger is None or name is None:
        yield None
        return
    if not ledger.is_file():  # opening one would make it
        raise ValueError(
            f"expected a ledger, got no file at {ledger}; make one with hushgrad ledger set-budget"
        )
    with Ledger(ledger) as books:
        yield books.budget(name)


def terms_of(
    budget: Budget | None,
    *,
    accountant: str | None,
    relation: Relation | None,
    delta: float | None,
    calibrated: bool,
) -> Terms:
    """Put the options together with what the budget says where they say nothing.

    Args:
        budget: the budget that the plan must fit, if there is one.
        accountant: a name in `ACCOUNTANTS`; PLD if left out.
        relation: that of the budget, or add/remove, if left out.
        delta: what the budget has left if left out.
        calibrated: whether the plan is to cost the ε that the budget has left.

    Raises:
        ValueError: the options contradict the budget. Under the filter renyi the ε that is left
            belongs to the filter's own order and δ, so neither can be chosen.
    """
    # gdp is refused by name here: what is calibrated or charged must be proved.
    chosen = None if accountant is None else ACCOUNTANTS[accountant]
    require_proof(chosen or PLD)
    if budget is None:
        if delta is None:
            raise ValueError("expected --delta, got none; a value below 1/records is usual")
        require_delta(delta)
        return Terms(None, delta, relation or Relation.ADD_REMOVE, chosen or PLD)
    # A budget adds up under one relation, and no other may be charged to it.
    meant = budget.relation
    if relation is not None and relation is not meant:
        raise ValueError(
            f"expected --relation {meant.value}, which the budget {budget.name} is for, got "
            f"{relation.value}; leave it out"
        )
    if delta is not None and not calibrated:
        require_delta(delta)
        return Terms(None, delta, meant, chosen or PLD)
    left = budget.left
    # No more δ than is left, or the run that is planned would be refused.
    given = left.delta if delta is None else delta
    require_delta(given)
    if given > left.delta:
        raise ValueError(
            f"expected --delta of at most {left.delta:.6g}, which the budget {budget.name} has "
            f"left, got {given}; leave it out"
        )
    if not calibrated:
        return Terms(None, given, meant, chosen or PLD)
    if budget.rule.order is not None:
        if given != left.delta or accountant not in (None, "rdp"):
            raise ValueError(
                f"expected the rdp accountant and delta {left.delta:g}, by which the filter of the "
                f"budget {budget.name} counts, got others; leave out --accountant and --delta"
            )
        return Terms(left.epsilon, given, meant, left.accountant)
    return Terms(left.epsilon, given, meant, chosen or PLD)


def require_room(budget: Budget, event: DpEvent, spent: float, terms: Terms) -> None:
    """Raise unless the budget would take a run.

    Args:
        budget: the budget of the data set.
        event: the whole run.
        spent: its ε, under the terms.
        terms: how it is accounted for.

    Raises:
        Refused: the budget has less left.
    """
    account = budget.account
    account.require_room(account.cost(Spend(event, terms.relation, spent, terms.delta)))
