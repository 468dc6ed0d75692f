"""Filters: what a spend counts against a budget, and how much of it there is.

Runs are chosen after seeing what earlier runs released, so their costs add up by a rule that allows
for it, fixed when the budget is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dp_accounting import DpEvent
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

from hushgrad.accounting import PLD, RDP, Accountant, Rdp
from hushgrad.accounting.accountants import require_delta
from hushgrad.ledger.spending import Spend
from hushgrad.types import Refused, Relation

Amounts = tuple[float, ...]
"""One number for each of a rule's units."""


@dataclass(frozen=True)
class Filter:
    """A fully adaptive filter.

    `units` names what it adds up, `cost` is a spend in these units, `limit` a budget (ε, δ) in
    them, and `within` the (ε, δ) that a run may still have where so much is left, by `accountant`.
    `refunds` says whether steps that were not taken are given back.
    """

    name: str
    order: float | None
    units: tuple[str, ...]
    cost: Callable[[Spend], Amounts]
    limit: Callable[[float, float], Amounts]
    within: Callable[[Amounts, float], tuple[float, float]]
    accountant: Accountant
    refunds: bool

    @property
    def title(self) -> str:
        """The filter in words, with its order."""
        return self.name if self.order is None else f"{self.name} at order {self.order}"

    def __repr__(self) -> str:
        return f"{self.name}({'' if self.order is None else self.order})"


def total() -> Filter:
    """Σε and Σδ over whole runs, each by its own accountant: the default, for every event.

    A run costs what its plan does, however many of its steps it takes.

    >>> total()
    total()
    """
    return Filter(
        name="total",
        order=None,
        units=("epsilon", "delta"),
        cost=lambda spend: (spend.epsilon, spend.delta),
        limit=lambda epsilon, delta: (epsilon, math.inf if epsilon == math.inf else delta),
        within=lambda left, delta: (left[0], left[1]),
        accountant=PLD,
        refunds=False,
    )


def renyi(order: float) -> Filter:
    """Σ of Rényi DP at one order α, against the Rényi DP that (ε, δ) allows at this order.

    Steps that a run did not take are given back. Only for events that Rényi DP covers.

    Reference: Feldman and Zrnic 2021, Individual Privacy Accounting via a Rényi Filter; the
    conversion is that of Canonne, Kamath and Steinke 2020, Proposition 12.

    >>> renyi(8.0).limit(3.0, 1e-5)
    (1.7858908321544666,)
    """
    if not (math.isfinite(order) and order > 1.01):
        raise ValueError(
            f"expected an order above 1.01 and finite, got {order}; let order_for choose one"
        )
    accountant = Rdp(orders=(order,))

    def cost(spend: Spend) -> Amounts:
        return (_curve(spend.event, spend.relation, accountant)[1][0],)

    def within(left: Amounts, delta: float) -> tuple[float, float]:
        # One float less, so that what is calibrated to it is within what is left: two values of
        # Rényi DP that differ in the last bit may convert to one ε.
        found = float(compute_epsilon([order], [left[0]], delta)[0])
        return math.nextafter(found, 0.0), delta

    return Filter(
        name="renyi",
        order=order,
        units=("rdp",),
        cost=cost,
        limit=lambda epsilon, delta: (_most(epsilon, delta, order),),
        within=within,
        accountant=accountant,
        refunds=True,
    )


def order_for(event: DpEvent, *, delta: float, relation: Relation = Relation.ADD_REMOVE) -> float:
    """The order at which Rényi DP gives the least ε to a typical run.

    A budget at a badly chosen order can cost a hundred times as much.

    >>> from hushgrad.accounting import gaussian
    >>> order_for(gaussian(2.0), delta=1e-5)
    9.6
    """
    require_delta(delta)
    return float(compute_epsilon(*_curve(event, relation, RDP), delta)[1])


def rule_named(name: str, order: float | None) -> Filter:
    """The rule of this name, as a ledger keeps it."""
    if name == "total":
        return total()
    if name == "renyi" and order is not None:
        return renyi(order)
    raise Refused(
        f"expected the filter total or renyi, got {name} from the ledger; use the version of "
        "hushgrad that wrote it"
    )


def add_amounts(costs: Sequence[Amounts], units: int) -> Amounts:
    """The sum, unit by unit, rounded once."""
    return tuple(math.fsum(cost[unit] for cost in costs) for unit in range(units))


def left_of(limit: Amounts, costs: Sequence[Amounts]) -> Amounts:
    """The most that can still be added, rounded down so that all of it can be spent at once."""
    found = []
    for unit, most in enumerate(limit):
        spent = [cost[unit] for cost in costs]
        rest = most if most == math.inf else max(0.0, most - math.fsum(spent))
        while rest > 0 and math.fsum([*spent, rest]) > most:
            rest = math.nextafter(rest, 0.0)
        found.append(rest)
    return tuple(found)


def _curve(event: DpEvent, relation: Relation, accountant: Rdp) -> tuple[list[float], list[float]]:
    try:
        orders, values = accountant.curve(event, relation)
    except Refused as refusal:
        raise Refused(
            f"expected an event that the filter renyi covers, got another ({refusal}); set the "
            "budget with the filter total, which covers every event"
        ) from refusal
    if not len(orders):
        raise Refused(
            f"expected an event whose Rényi DP can be computed at order {accountant.orders[0]:g}, "
            "got one where it cannot; set the budget with the filter total"
        )
    return [float(order) for order in orders], [float(value) for value in values]


def _most(epsilon: float, delta: float, order: float) -> float:
    """The most Rényi DP at `order` that is (ε, δ)-DP: the conversion, solved for it."""
    if epsilon == math.inf:
        return math.inf
    found = epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)
    while found > 0 and compute_epsilon([order], [found], delta)[0] > epsilon:
        found = math.nextafter(found, 0.0)
    if found <= 0:
        raise ValueError(
            f"expected an order at which ({epsilon:g}, {delta:g})-DP allows something, got "
            f"{order:g}; use a larger order, as order_for finds for a typical run"
        )
    return found
