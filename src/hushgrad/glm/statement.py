"""The guarantee of a fitted linear model, with everything that its two numbers rest on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hushgrad.guarantee import up
from hushgrad.ledger.records import figure
from hushgrad.types import Relation

_NEIGHBOURS = {
    Relation.ADD_REMOVE: "add/remove one record",
    Relation.REPLACE_ONE: "replace one record",
}


@dataclass(frozen=True)
class GlmGuarantee:
    """(ε, δ)-DP of a fit, and under which relation, sampling, accountant and assumptions.

    `spent` is ε by the accountant, at most what was asked for. With a seed nothing is private, and
    `epsilon` is infinite.
    """

    spent: float
    delta: float
    relation: Relation
    sampling: str
    accountant: str
    mechanism: str
    public: tuple[str, ...]
    reproducible: bool

    @property
    def epsilon(self) -> float:
        """What the fit costs; infinite without secrecy."""
        return math.inf if self.reproducible else self.spent

    def with_public(self, what: str) -> GlmGuarantee:
        """The same, with one thing more that is taken to be public."""
        return replace(self, public=(*self.public, what))

    def __str__(self) -> str:
        budget = f"({up(self.spent)}, {figure(self.delta, up=True)})-DP"
        if self.reproducible:
            budget = f"reproducible, not private: {budget} if the seed were unknown"
        return "\n".join(
            [
                f"{budget}, {_NEIGHBOURS[self.relation]}, {self.sampling}, {self.accountant}",
                self.mechanism,
                "one record, its features and label, is the unit of privacy; rounding in a sum: "
                "measured below 0.1 % of the bound",
                f"taken to be public: {', '.join(self.public)}",
                "not counted: the yes or no of checks on the input, timing and other side channels",
            ]
        )
