"""The methods of paper C's Table 2: each a plan, a rate, and how many gradients a visit costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hushgrad.accounting import PLD, RDP, Accountant
from hushgrad.algorithms import Agd, PerDistance, Sgd, SpiderBoost, Srm, last, rrpsgd, storm, unclipped
from hushgrad.clipping import Clip, abadi, automatic
from hushgrad.plan import Plan, plan
from hushgrad.sampling import FullBatch, Sampling, WithoutReplacement
from hushgrad.types import Relation

DELTA = 1e-5


@dataclass(frozen=True)
class Accounting:
    """How a run is accounted for, and with it how batches are drawn."""

    name: str
    relation: Relation
    accountant: Accountant
    fixed_size: bool

    def sampling(self, batch: int) -> Sampling | None:
        """None is Poisson sampling."""
        return WithoutReplacement(batch) if self.fixed_size else None


PAPER = Accounting("paper", Relation.REPLACE_ONE, RDP, fixed_size=True)
"""Replace one record, batches of a fixed size, Rényi accountant."""
TIGHT = Accounting("tight", Relation.ADD_REMOVE, PLD, fixed_size=False)
"""Add or remove one record, Poisson sampling, privacy loss distributions."""


@dataclass(frozen=True)
class Setting:
    """What a method was run with: passes, batch as a share of the records, and a rate."""

    passes: float
    share: float
    rate: float
    length: float = 0.1  # of a step, where the method has one
    first: float = 0.25  # the first batch, or an anchor's, as a share of the records
