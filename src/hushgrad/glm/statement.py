"""The guarantee of a fitted linear model, with everything that ε and δ depend on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from hushgrad.glm.fits import Earlier
from hushgrad.ledger.records import figure
from hushgrad.run.guarantee import up
from hushgrad.types import Relation

_NEIGHBOURS = {
    Relation.ADD_REMOVE: "add/remove one record",
    Relation.REPLACE_ONE: "replace one record",
}


@dataclass(frozen=True)
class GlmGuarantee:
    """The (ε, δ)-DP guarantee of a fit: relation, sampling, accountant and assumptions.

    `spent` and `delta` add up this fit and the earlier fits that this process is known to have
    made on some of the same records; `fits` counts them all. `alone` is (ε, δ) of this fit, with ε
    by the accountant, at most what was asked for. With a public seed nothing is private, and
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
    earlier: Earlier = field(default_factory=Earlier)

    @property
    def epsilon(self) -> float:
        """ε of all fits together; infinite if the seed is public."""
        return math.inf if self.reproducible else self.spent

    @property
    def fits(self) -> int:
        """How many fits are counted."""
        return 1 + self.earlier.fits

    @property
    def alone(self) -> tuple[float, float]:
        """(ε, δ) of this fit alone, as if its records had been used for nothing else."""
        return self.spent - self.earlier.epsilon, self.delta - self.earlier.delta

    def with_public(self, what: str) -> GlmGuarantee:
        """Return the guarantee with one more assumption of what is public."""
        return replace(self, public=(*self.public, what))

    def after(self, earlier: Earlier) -> GlmGuarantee:
        """Return the guarantee with the cost of earlier fits on the same records added."""
        return replace(
            self,
            spent=self.spent + earlier.epsilon,
            delta=self.delta + earlier.delta,
            earlier=earlier,
        )

    def __str__(self) -> str:
        budget = f"({up(self.spent)}, {figure(self.delta, up=True)})-DP"
        if self.earlier.fits:
            epsilon, delta = self.alone
            budget += (
                f" for {self.fits} fits on shares of the same records, of which this one "
                f"({up(epsilon)}, {figure(delta, up=True)})"
            )
        if self.reproducible:
            budget = f"reproducible, not private: {budget} if the seed were unknown"
        return "\n".join(
            [
                f"{budget}, {_NEIGHBOURS[self.relation]}, {self.sampling}, {self.accountant}",
                self.mechanism,
                "one record, its features and label, is the unit of privacy; rounding in a sum: "
                "proved below 0.4 % of the bound",
                f"taken to be public: {', '.join(self.public)}",
                f"not counted: {'; '.join(self._uncounted())}",
            ]
        )

    def _uncounted(self) -> list[str]:
        found = [
            "a search over settings whose scores were looked at",
            "preprocessing that was fitted to the records, such as a scaler",
            "fits in other processes",
            "the yes or no of checks on the input, timing and other side channels",
        ]
        if self.earlier.copies:
            found[2] += (
                f" ({self.earlier.copies} unfitted copies of this estimator were pickled or copied)"
            )
        if self.earlier.unlike:
            found.insert(0, f"{self.earlier.unlike} fits under another relation")
        return found
