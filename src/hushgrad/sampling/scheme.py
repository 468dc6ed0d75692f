"""What a sampling scheme is: it draws the batches of a run and states their amplification.

Fixed-size and shuffled batches are re-cut when a record is removed: they are never add/remove.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import dp_accounting as dp

from hushgrad.events import Participation
from hushgrad.rng import Rng
from hushgrad.sampling.draws import Positions
from hushgrad.types import Batch, Refused, Relation

SMALLEST_RATE = 2.0**-32
"""Below this the error of 2⁻⁴⁹ in a drawn rate would exceed 2⁻¹⁷ of it."""

ANY_RELATION = frozenset(Relation)
"""For schemes that treat each record by itself."""

SAME_SIZE = frozenset({Relation.REPLACE_ONE, Relation.ZERO_OUT})
"""For schemes whose batches depend on the number of records."""


@runtime_checkable
class Sampling(Protocol):
    """What the accountant needs to know of how batches were sampled."""

    @property
    def relations(self) -> frozenset[Relation]:
        """The relations between data sets under which the amplification holds."""

    @property
    def statement(self) -> str:
        """The words by which a guarantee names the sampling."""

    @property
    def sees_all(self) -> bool:
        """True if every record is in every batch, so that nothing is left to chance."""

    @property
    def participation(self) -> Participation | None:
        """When a record can be in a batch, if each is drawn by itself; None for other schemes."""

    @property
    def loader(self) -> Iterable[Batch] | None:
        """What brings the batches, where it is not hushgrad that draws them."""

    def expected_batch(self, num_records: int) -> float:
        """The public divisor of a step's sum, from the plan's public record count."""

    def resized(self, batch: int, *, num_records: int) -> Sampling:
        """The same way to sample with batches of another expected size, for some of the steps."""

    def epoch(self, num_records: int) -> int | None:
        """So many steps deal every record out once; None where each step draws by itself."""

    def amplify(self, event: dp.DpEvent, *, num_records: int) -> dp.DpEvent:
        """The event of one step that runs `event` on one batch."""

    def run_event(self, event: dp.DpEvent, *, num_records: int, num_steps: int) -> dp.DpEvent:
        """The event of the steps 0 up to `num_steps`, each running `event` on its batch."""


@runtime_checkable
class Draws(Protocol):
    """What draws the batches of a run.

    `draw` depends on the key, the step and the count alone, so that a resumed run draws the same
    batches. Positions are ascending: nothing depends on the order in which they were drawn.
    """

    @property
    def relations(self) -> frozenset[Relation]:
        """The relations between data sets under which the batches may be accounted for."""

    def span(self, num_records: int, *, length: int) -> int:
        """How many positions to draw from, for a public number of records and the real one.

        There need not be a record at each. What it returns is private where it follows `length`.
        """

    def draw(self, num_records: int, *, step: int, rng: Rng) -> Positions:
        """The positions in the batch of one step."""


@runtime_checkable
class Scheme(Sampling, Draws, Protocol):
    """A sampling that this library draws itself."""


def every_position(num_records: int, length: int) -> int:
    """The span of schemes under which a record may be added or removed: every record takes part.

    Were those beyond the public count left out, removing one would pull another in and move the
    sum by 2R.
    """
    return max(num_records, length)


def refuse_resizing(sampling: Sampling) -> Refused:
    """The refusal of a scheme whose batches all have one size."""
    return Refused(
        "expected Poisson sampling or batches without replacement where some steps have larger "
        f"batches, got {sampling.statement}; sample with Poisson(rate), or leave the size out"
    )


def require_relation(sampling: Sampling, relation: Relation) -> None:
    """Refuse a relation that the sampling cannot have."""
    if relation not in sampling.relations:
        possible = " or ".join(sorted(r.value for r in sampling.relations))
        raise Refused(
            f"expected {possible} with {sampling.statement}, got {relation.value}; removing a "
            "record would change which others share its batch: sample with Poisson(rate), or "
            f"state the guarantee for {possible}"
        )


def require_rate(rate: float) -> None:
    """Refuse what is no sampling rate."""
    if not SMALLEST_RATE <= rate <= 1:
        raise ValueError(f"expected 2**-32 <= rate <= 1, got {rate}; pass batch / num_records")


def require_whole(name: str, value: int) -> None:
    """Refuse what is no number of records."""
    if value != int(value) or value < 1:
        raise ValueError(f"expected a whole {name} >= 1, got {value}; pass a number of records")


def require_batch(batch: int, num_records: int) -> None:
    """Refuse a batch that has more records than there are."""
    if batch > num_records:
        raise ValueError(
            f"expected batch <= num_records = {num_records}, got {batch}; use FullBatch() to take "
            "every record at each step"
        )
