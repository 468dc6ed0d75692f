"""Privacy filters: how costs add up against a budget.

Runs are chosen after seeing what earlier runs released, so their costs must add up by a rule that
stays valid under adaptive choice. The rule is fixed when the budget is set.
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
"""One number for each unit of a filter."""


@dataclass(frozen=True)
class Filter:
    """A privacy filter: a composition rule that stays valid under adaptive choice of runs.

    `total` and `renyi` make the two that exist.

    Args:
        name: the filter's name.
        order: the order of Rényi DP, if it has one.
        units: the names of the quantities that it adds up.
        cost: maps a spend to amounts in these units.
        limit: maps a budget (ε, δ) to amounts.
        within: maps what is left, and δ, to the (ε, δ) that a run may still have.
        accountant: the accountant for which `within` holds.
        refunds: whether steps that were not taken are refunded.

    Example:
        >>> total().units, renyi(8.0).units
        (('epsilon', 'delta'), ('rdp',))

    Reference: Rogers et al. 2016, Privacy Odometers and Filters.
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
        """The filter's name, with its order."""
        return self.name if self.order is None else f"{self.name} at order {self.order}"

    def __repr__(self) -> str:
        return f"{self.name}({'' if self.order is None else self.order})"


def total() -> Filter:
    """Return the default filter: it sums ε and δ over whole runs, and covers every event.

    Each run's ε may come from another accountant. A run costs what its plan costs, even if it
    takes fewer steps.

    Example:
        >>> total().limit(3.0, 1e-5)
        (3.0, 1e-05)

    Reference: Rogers et al. 2016, Privacy Odometers and Filters.
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
    """Return a filter that sums Rényi DP at one order, against what (ε, δ) allows at that order.

    Steps that a run did not take are refunded. It covers only events that Rényi DP covers.

    Args:
        order: α, above 1.01; `order_for` chooses one for a typical run.

    Raises:
        ValueError: if the order is too small or infinite.

    Example:
        >>> renyi(8.0).limit(3.0, 1e-5)
        (1.7858908321544666,)

    Reference: Feldman and Zrnic 2021, Individual Privacy Accounting via a Rényi Filter; the
    conversion is that of Canonne, Kamath and Steinke 2020, Proposition 12.
    """
    if not (math.isfinite(order) and order > 1.01):
        raise ValueError(
            f"expected an order above 1.01 and finite, got {order}; let order_for choose one"
        )
    accountant = Rdp(orders=(order,))

    def cost(spend: Spend) -> Amounts:
        return (_curve(spend.event, spend.relation, accountant)[1][0],)

    def within(left: Amounts, delta: float) -> tuple[float, float]:
        # One float less, so that a plan calibrated to it fits: two values of Rényi DP that differ
        # in the last bit may convert to the same ε.
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
    """Return the order at which Rényi DP gives a typical run the smallest ε.

    At a badly chosen order the same run can cost a hundred times as much.

    Args:
        event: the event of a typical run.
        delta: the δ of the budget.
        relation: what makes two data sets neighbours.

    Raises:
        Refused: for an event that Rényi DP does not cover.

    Example:
        >>> from hushgrad.accounting import gaussian
        >>> order_for(gaussian(2.0), delta=1e-5)
        9.6
    """
    require_delta(delta)
    return float(compute_epsilon(*_curve(event, relation, RDP), delta)[1])


def rule_named(name: str, order: float | None) -> Filter:
    """Return the filter that a ledger stores by this name and order."""
    if name == "total":
        return total()
    if name == "renyi" and order is not None:
        return renyi(order)
    raise Refused(
        f"expected the filter total or renyi, got {name} from the ledger; use the version of "
        "hushgrad that wrote it"
    )


def add_amounts(costs: Sequence[Amounts], units: int) -> Amounts:
    """Return the sum, unit by unit, rounded once."""
    return tuple(math.fsum(cost[unit] for cost in costs) for unit in range(units))


def left_of(limit: Amounts, costs: Sequence[Amounts]) -> Amounts:
    """Return the most that can still be added, rounded down so that it can be spent at once."""
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
    """Return the largest Rényi DP at `order` that implies (ε, δ)-DP."""
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
