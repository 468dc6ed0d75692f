"""An ordinary run: Gaussian noise on a batch of the same kind at every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dp_accounting import DpEvent

from hushgrad.accounting import events

Amplify = Callable[[DpEvent, int, int], DpEvent]
"""The event on a batch, the batch's size and the number of records, to the event of one step."""


@dataclass(frozen=True)
class Scheme:
    """How a batch is drawn, as far as accounting has to know it."""

    name: str
    amplify: Amplify

    def __repr__(self) -> str:
        return self.name


POISSON = Scheme("poisson", lambda event, batch, records: events.poisson(batch / records, event))
"""Each record by itself with probability batch / records: the default."""

WITHOUT_REPLACEMENT = Scheme(
    "without-replacement",
    lambda event, batch, records: events.without_replacement(batch, event, records=records),
)
"""Batches of one size, drawn anew at each step."""

FULL = Scheme("full", lambda event, batch, records: event)
"""Every record at every step."""


def truncated(max_batch: int) -> Scheme:
    """Poisson sampling in which a batch larger than `max_batch` is cut to it at random."""

    def amplify(event: DpEvent, batch: int, records: int) -> DpEvent:
        rate = batch / records
        return events.truncated_poisson(rate, event, max_batch=max_batch, records=records)

    return Scheme("truncated-poisson", amplify)


@dataclass(frozen=True)
class Training:
    """A run of `steps` steps (T) on batches of `batch` out of `records`.

    `noise_multiplier` (σ) is noise ÷ the bound on one record, under every relation. One of
    `batch`, `noise_multiplier` and `steps` may be None, for `calibrate` to find.
    """

    records: int
    batch: int | None
    noise_multiplier: float | None
    steps: int | None
    scheme: Scheme = POISSON

    def __post_init__(self) -> None:
        if self.batch is not None and not 1 <= self.batch <= self.records:
            raise ValueError(
                f"expected 1 <= batch <= records, got batch {self.batch} of {self.records} "
                "records; pass a smaller batch"
            )

    @property
    def missing(self) -> list[str]:
        """The names of what is None."""
        names = ("batch", "noise_multiplier", "steps")
        return [name for name in names if getattr(self, name) is None]

    @property
    def rate(self) -> float:
        """The share of the records that a batch is expected to hold (q)."""
        assert self.batch is not None, "a run without a batch size has no rate"
        return 1.0 if self.scheme is FULL else self.batch / self.records

    @property
    def event(self) -> DpEvent:
        """The whole run as one event."""
        if self.batch is None or self.noise_multiplier is None or self.steps is None:
            raise ValueError(
                f"expected a run with every number given, got none for "
                f"{', '.join(self.missing)}; find it with calibrate"
            )
        step = self.scheme.amplify(events.gaussian(self.noise_multiplier), self.batch, self.records)
        return events.repeated(self.steps, step)
