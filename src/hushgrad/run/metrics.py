"""Private metrics: a few numbers of each record that are released along with its clipped gradient.

A training loss in a progress bar is a release, too. So each record's metrics are put beside its
gradient, short enough to add little to its bound, and the two are released together: one batch, one
noise, one event.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from hushgrad.types import Bounded

NAME = ".metrics"
"""The metrics' place in a sum; no parameter's name begins with a dot."""

_EXPONENTS = range(-8, 9, 2)  # the bins of the norms end at these powers of two
_ENTRY = 2.0**-20  # entries are whole multiples of this, so that their float64 sums are exact
_UNDER = 1 - 2.0**-20  # leaves room for the rounding of one product of up to 2³² records


@dataclass(frozen=True)
class Metrics:
    """Loss, share of clipped records, a histogram of gradient norms, and other `watched` values.

    Guarantees: one record's metrics have norm at most ρ times its gradient's bound, and the two
    together are one release, so metrics cost no further privacy; they make the noise √(1 + ρ²)
    times larger.

    Args:
        share: ρ, the norm of a record's metrics relative to its gradient's bound. At 0.1 the noise
            is 0.5 % larger.
        watched: the names of other metrics; `run.step(..., watch=...)` computes them, from 0 to 1.
        largest_loss: losses are clamped from 0 to this number.

    Raises:
        ValueError: if a number is not positive and finite, or a name is taken.

    Example:
        >>> metrics = Metrics(watched=("correct",))
        >>> metrics.names[:3]
        ('loss', 'clipped', 'correct')
        >>> round(metrics.noise(1.0, expected=1000), 3)  # of one reading of a share
        0.02
    """

    share: float = 0.1
    watched: tuple[str, ...] = ()
    largest_loss: float = 10.0

    def __post_init__(self) -> None:
        for name in ("share", "largest_loss"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"expected {name} > 0 and finite, got {value}; leave it out")
        taken = {"loss", "clipped", *self.bins}
        if len({*self.watched, *taken}) != len(self.watched) + len(taken):
            raise ValueError(
                f"expected names of their own for watched metrics, got {self.watched}; loss, "
                "clipped and the norms' bins are there already"
            )

    def terms(self) -> dict[str, Any]:
        """The choices in words and numbers that JSON can hold."""
        chosen = {"share": self.share, "largest_loss": self.largest_loss}
        return chosen | {"watched": list(self.watched)}

    @property
    def bins(self) -> tuple[str, ...]:
        """The names of the histogram's bins, by the largest norm that each holds."""
        return (*(f"norm 2^{k}" for k in _EXPONENTS), f"norm above 2^{_EXPONENTS[-1]}")

    @property
    def names(self) -> tuple[str, ...]:
        """All metrics, in the order in which they are released."""
        return ("loss", "clipped", *self.watched, *self.bins)

    def rows(
        self,
        losses: Float[Tensor, " batch"],
        norms: Float[Tensor, "batch group"],
        weights: Float[Tensor, "batch group"],
        watched: Mapping[str, Float[Tensor, " batch"]],
    ) -> Float[Tensor, "batch metric"]:
        """Return one row for each record, of norm at most 1 whatever the record is."""
        # A NaN loss counts as the largest: nobody is told that a record is NaN.
        loss = losses.double().nan_to_num(nan=torch.inf).clamp(0, self.largest_loss)
        # A record counts as clipped if any of its groups was.
        clipped: Bool[Tensor, " batch"] = (weights < 1).any(1)
        scalars = [loss / self.largest_loss, clipped.double()]
        scalars += [watched[n].double().nan_to_num(0.0).clamp(0, 1) for n in self.watched]
        edges = torch.tensor([2.0**k for k in _EXPONENTS], dtype=torch.float64)
        size = norms.double().square().sum(1).sqrt().nan_to_num(nan=torch.inf)
        place = torch.bucketize(size, edges.to(size.device))
        histogram = torch.nn.functional.one_hot(place, len(self.bins)).double()
        rows = torch.cat([torch.stack(scalars, 1), histogram], 1) * self._each
        # Rounded down, so that rounding never lengthens a row.
        return (rows / _ENTRY).floor() * _ENTRY

    @property
    def _each(self) -> float:
        """The largest entry: all scalars at 1, and one bin, have norm 1 together."""
        return 1 / math.sqrt(2 + len(self.watched) + 1)

    def beside(self, bounded: Bounded, rows: Float[Tensor, "batch metric"]) -> Bounded:
        """Return the sum with its records' metrics, and the bound on both together."""
        room = self.share * bounded.l2
        total = rows.sum(0) * (room * _UNDER)
        # Euclidean norms of two parts of one vector add up in squares.
        return Bounded({**bounded.sum, NAME: total}, math.hypot(bounded.l2, room))

    def read(self, released: Tensor, *, l2: float, expected: float) -> dict[str, float]:
        """Return the mean metrics of a batch of `expected` records, from their released sum.

        `l2` is the bound on gradient and metrics together. The values are noisy, so a share may be
        below 0 or above 1.
        """
        # The bound on metrics alone, from that on gradient and metrics together.
        room = self.share * l2 / math.hypot(1, self.share)
        means = (released / (room * _UNDER * self._each * expected)).tolist()
        found = dict(zip(self.names, means, strict=True))
        return found | {"loss": found["loss"] * self.largest_loss}

    def noise(self, noise_multiplier: float, *, expected: float) -> float:
        """Return the standard deviation of the noise in one reading of a share."""
        return noise_multiplier * math.hypot(1, self.share) / (self.share * self._each * expected)


@dataclass(frozen=True)
class Reading:
    """The released metrics of one step."""

    step: int
    values: dict[str, float]


def smoothed(readings: Sequence[Reading], *, span: int = 50) -> dict[str, float]:
    """Return the mean of each metric over the last `span` readings; {} before the first."""
    recent = readings[-span:]
    if not recent:
        return {}
    return {
        name: math.fsum(reading.values[name] for reading in recent) / len(recent)
        for name in recent[0].values
    }


def pack_readings(readings: Sequence[Reading]) -> Float64[Tensor, "reading column"]:
    """Return the readings as one tensor: a row for each, its step first."""
    rows = [[reading.step, *reading.values.values()] for reading in readings]
    width = len(rows[0]) if rows else 1
    return torch.tensor(rows, dtype=torch.float64).view(len(rows), width)


def unpack_readings(rows: Float64[Tensor, "reading column"], names: Sequence[str]) -> list[Reading]:
    """Return the readings that were packed, of metrics with these names."""
    return [
        Reading(int(step), dict(zip(names, values, strict=True))) for step, *values in rows.tolist()
    ]
