"""The privacy ledger: a file that records, across runs and crashes, what each data set has spent.

A budget is charged before anything is released:

    ledger = Ledger("ledger.sqlite")
    ledger.set_budget("census", epsilon=3, delta=1e-5)
    budget = ledger.budget("census")
    entry = budget.open(spend, label="first try", plan={}, fingerprint="")
    entry.reserve(64)                    # steps 0 to 63 may be released from here on
    entry.settle(steps=64, event=None)

Costs add up by a filter, a composition rule that stays valid when runs are chosen adaptively, after
seeing earlier results: `total()` sums ε and δ over whole runs, and `renyi(order)` sums Rényi DP and
refunds steps that were not taken.
"""

from hushgrad.ledger.budget import Budget
from hushgrad.ledger.entry import UNKNOWN, Entry
from hushgrad.ledger.ledger import Ledger
from hushgrad.ledger.rules import Filter, order_for, renyi, total
from hushgrad.ledger.spending import Spend

__all__ = ["UNKNOWN", "Budget", "Entry", "Filter", "Ledger", "Spend", "order_for", "renyi", "total"]
