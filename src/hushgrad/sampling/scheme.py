"""The protocols of a sampling scheme: it draws a run's batches and states their amplification.

Removing a record changes which other records share fixed-size and shuffled batches, so these have
no add/remove guarantee.
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
"""The smallest rate: below it, the error of 2⁻⁴⁹ in a drawn rate would exceed 2⁻¹⁷ of it."""

ANY_RELATION = frozenset(Relation)
"""For schemes that draw each record independently."""

SAME_SIZE = frozenset({Relation.REPLACE_ONE, Relation.ZERO_OUT})
"""For schemes whose batches depend on the number of records."""


@runtime_checkable
class Sampling(Protocol):
    """What the accountant needs to know about the sampling of batches.

    Example:
        >>> from hushgrad.sampling import Poisson
        >>> isinstance(Poisson(0.1), Sampling)
        True
    """

    @property
    def relations(self) -> frozenset[Relation]:
        """The relations between data sets under which the amplification holds."""

    @property
    def statement(self) -> str:
        """The words by which a guarantee names the sampling."""

    @property
    def sees_all(self) -> bool:
        """True if every record is in every batch, so that nothing is random."""

    @property
    def participation(self) -> Participation | None:
        """When a record can be in a batch, if each is drawn by itself; None for other schemes."""

    @property
    def loader(self) -> Iterable[Batch] | None:
        """The user's loader that yields the batches, or None if hushgrad draws them."""

    def expected_batch(self, num_records: int) -> float:
        """Return the public divisor of a step's sum, from the plan's public number of records."""

    def resized(self, batch: int, *, num_records: int) -> Sampling:
        """Return the same kind of sampling with another expected batch size, for some steps."""

    def epoch(self, num_records: int) -> int | None:
        """Return the steps in which each record comes once; None if steps draw independently."""

    def amplify(self, event: dp.DpEvent, *, num_records: int) -> dp.DpEvent:
        """Return the event of one step that runs `event` on one batch."""

    def run_event(self, event: dp.DpEvent, *, num_records: int, num_steps: int) -> dp.DpEvent:
        """Return the event of the steps 0 up to `num_steps`, each with `event` on its batch."""


@runtime_checkable
class Draws(Protocol):
    """What draws the batches of a run.

    Guarantees: `draw` depends only on the key, the step and the number of records, so that a
    resumed run draws the same batches. Positions are ascending, so that nothing depends on the
    order in which they were drawn.

    Example:
        >>> from hushgrad.sampling import FullBatch
        >>> isinstance(FullBatch(), Draws)
        True
    """

    @property
    def relations(self) -> frozenset[Relation]:
        """The relations between data sets under which the batches may be accounted for."""

    def span(self, num_records: int, *, length: int) -> int:
        """Return how many positions to draw from, given the public and the real record count.

        A position need not have a record. The result is private if it depends on `length`.
        """

    def draw(self, num_records: int, *, step: int, rng: Rng) -> Positions:
        """Return the positions in the batch of one step."""


@runtime_checkable
class Scheme(Sampling, Draws, Protocol):
    """A sampling that hushgrad draws itself: `Sampling` and `Draws` together.

    `hushgrad.testing.check_sampler` is the contract suite for your own.

    Example:
        >>> from hushgrad.sampling import Shuffled
        >>> isinstance(Shuffled(8), Scheme)
        True
    """


def every_position(num_records: int, length: int) -> int:
    """Return the span of schemes that allow add/remove: every record can be drawn.

    If records beyond the public count were left out, removing one would let another one in, and
    the sum would move by 2R.
    """
    return max(num_records, length)


def refuse_resizing(sampling: Sampling) -> Refused:
    """Return the refusal for a scheme whose batches cannot have another size."""
    return Refused(
        "expected Poisson sampling or sampling without replacement, because some steps use larger "
        f"batches, got {sampling.statement}; sample with Poisson(rate), or leave the size out"
    )


def require_relation(sampling: Sampling, relation: Relation) -> None:
    """Raise `Refused` if the sampling has no guarantee under this relation.

    Args:
        sampling: the sampling.
        relation: what makes two data sets neighbours.

    Raises:
        Refused: with the relations that are possible.

    Example:
        >>> from hushgrad.sampling import Poisson
        >>> require_relation(Poisson(0.1), Relation.ADD_REMOVE)
    """
    if relation not in sampling.relations:
        possible = " or ".join(sorted(r.value for r in sampling.relations))
        raise Refused(
            f"expected {possible} with {sampling.statement}, got {relation.value}; removing a "
            "record would change which other records share a batch: sample with Poisson(rate), or "
            f"state the guarantee for {possible}"
        )


def require_rate(rate: float) -> None:
    """Raise unless `rate` is a sampling rate."""
    if not SMALLEST_RATE <= rate <= 1:
        raise ValueError(f"expected 2**-32 <= rate <= 1, got {rate}; pass batch / num_records")


def require_whole(name: str, value: int) -> None:
    """Raise unless `value` is a whole number above 0."""
    if value != int(value) or value < 1:
        raise ValueError(f"expected a whole {name} >= 1, got {value}; pass a number of records")


def require_batch(batch: int, num_records: int) -> None:
    """Raise if a batch would have more records than the data set."""
    if batch > num_records:
        raise ValueError(
            f"expected batch <= num_records = {num_records}, got {batch}; use FullBatch() to take "
            "every record at each step"
        )
