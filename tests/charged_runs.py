"""Runs that are charged in the tests of the ledger."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from dp_accounting import DpEvent

from hushgrad.accounting import gaussian, poisson, repeated
from hushgrad.ledger import Budget, Entry, Filter, Ledger, Spend, renyi, total
from hushgrad.types import Relation

STEPS = 50


def event(steps: int = STEPS) -> DpEvent:
    return repeated(steps, poisson(0.02, gaussian(1.0)))


def spend(epsilon: float = 0.5, delta: float = 1e-6, *, steps: int = STEPS) -> Spend:
    return Spend(event(steps), Relation.ADD_REMOVE, epsilon, delta)


def opened(budget: Budget, cost: Spend | None = None, fingerprint: str = "") -> Entry:
    return budget.open(cost or spend(), label="run", plan={"a": 1}, fingerprint=fingerprint)


def forked(work: Callable[[], Any]) -> int:
    """Run `work` in a child process; its id. The child ends with 0, or with 1 if it raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


RULES = [total(), renyi(8.0)]


def budget_of(ledger: Ledger, rule: Filter = RULES[0], epsilon: float = 3.0) -> Budget:
    return ledger.set_budget("census", epsilon=epsilon, delta=1e-5, rule=rule)
