"""What was spent on a data set, remembered over all runs on it, in a file that outlives a crash.

A budget is charged before anything is released:

    ledger = Ledger("ledger.sqlite")
    ledger.set_budget("census", epsilon=3, delta=1e-5)
    budget = ledger.budget("census")
    entry = budget.open(spend, label="first try", plan={}, fingerprint="")
    entry.reserve(64)                    # steps 0 to 63 may be released from here on
    entry.settle(steps=64, event=None)

Costs add up by a filter that holds although runs are chosen after seeing earlier ones: `total()`,
the sum of ε and of δ over whole runs, or `renyi(order)`, which gives back the steps not taken.
"""

from hushgrad.ledger.budget import Budget
from hushgrad.ledger.entry import UNKNOWN, Entry
from hushgrad.ledger.ledger import Ledger
from hushgrad.ledger.rules import Filter, order_for, renyi, total
from hushgrad.ledger.spending import Spend

__all__ = ["UNKNOWN", "Budget", "Entry", "Filter", "Ledger", "Spend", "order_for", "renyi", "total"]
