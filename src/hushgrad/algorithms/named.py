"""Algorithms by name, each with what a plan for it needs, for the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hushgrad.accounting import PLD, RDP, Accountant
from hushgrad.algorithms.adaptive import Agd
from hushgrad.algorithms.algorithm import Algorithm
from hushgrad.algorithms.local import LocalGd
from hushgrad.algorithms.output import average, uniform
from hushgrad.algorithms.recursive import PerDistance, SpiderBoost, Srm
from hushgrad.algorithms.sgd import Sgd
from hushgrad.clipping.rules import abadi
from hushgrad.types import Relation


@dataclass(frozen=True)
class Setting:
    """An algorithm, and what a plan for it needs: full batches, a relation, an accountant.

    `own_step` says that it chooses its steps itself, for an optimizer of rate 1.
    """

    algorithm: Algorithm
    full: bool = False
    relation: Relation = Relation.ADD_REMOVE
    accountant: Accountant = PLD
    own_step: bool = False


NAMED: dict[str, Callable[[int, int], Setting]] = {
    "sgd": lambda batch, records: Setting(Sgd()),
    "gd": lambda batch, records: Setting(Sgd(average()), full=True),
    "srm": lambda batch, records: Setting(
        Srm(0.1, abadi(0.1), first_batch=min(2 * batch, records))
    ),
    "spiderboost": lambda batch, records: Setting(
        SpiderBoost(10, PerDistance(1.0), anchor_batch=min(4 * batch, records))
    ),
    "rrpsgd": lambda batch, records: Setting(Sgd(uniform())),
    "agd": lambda batch, records: Setting(
        Agd(largest_loss=5.0), full=True, accountant=RDP, own_step=True
    ),
    "ldp": lambda batch, records: Setting(LocalGd(), full=True, relation=Relation.REPLACE_ONE),
}
"""Functions of a batch's size and the number of records. `rrpsgd` draws which iterate it returns
and accounts for all steps, because a run on the command line writes a folder."""
