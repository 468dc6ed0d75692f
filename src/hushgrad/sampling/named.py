"""The samplers by name, for the command line. To add one is one entry in `SAMPLERS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hushgrad.sampling.fixed import FullBatch, Shuffled, WithoutReplacement
from hushgrad.sampling.poisson import Poisson, TruncatedPoisson
from hushgrad.sampling.scheme import Sampling

SamplingOf = Callable[[int, int], Sampling]
"""A batch's size and the number of records, to the sampling that draws such batches."""


def poisson_batches(batch: int, records: int) -> Sampling:
    """Return Poisson sampling with probability batch / records, the default.

    Args:
        batch: the expected batch size.
        records: the public number of records.

    Example:
        >>> poisson_batches(10, 1000)
        Poisson(rate=0.01)
    """
    return Poisson(batch / records)


def fixed_batches(batch: int, records: int) -> Sampling:
    """Return sampling without replacement, independently at each step.

    Args:
        batch: the batch size.
        records: the public number of records; ignored.

    Example:
        >>> fixed_batches(10, 1000)
        WithoutReplacement(batch=10)
    """
    return WithoutReplacement(batch)


def shuffled_batches(batch: int, records: int) -> Sampling:
    """Return shuffled epochs in batches of one size, without amplification.

    Args:
        batch: the batch size.
        records: the public number of records; ignored.

    Example:
        >>> shuffled_batches(10, 1000)
        Shuffled(batch=10)
    """
    return Shuffled(batch)


def full_batches(batch: int, records: int) -> Sampling:
    """Return full batches: every record at every step.

    Args:
        batch: ignored.
        records: the public number of records; ignored.

    Example:
        >>> full_batches(1000, 1000)
        FullBatch()
    """
    return FullBatch()


def truncated_batches(max_batch: int) -> SamplingOf:
    """Return a choice of Poisson sampling that truncates batches above `max_batch`.

    Args:
        max_batch: the largest batch.

    Example:
        >>> truncated_batches(16)(10, 1000)
        TruncatedPoisson(rate=0.01, max_batch=16)
    """
    return lambda batch, records: TruncatedPoisson(batch / records, max_batch)


@dataclass(frozen=True)
class Sampler:
    """A way to draw batches, and which numbers must be known to account for it.

    Args:
        of: makes the sampling, from a batch's size and the number of records.
        by_rate: whether its cost depends on batch ÷ records alone, so that a rate is enough.
        whole: whether a batch is all records, so that no size of a batch is needed.
        capped: makes the sampling with batches cut at a size, where it can be cut.
    """

    of: SamplingOf
    by_rate: bool = False
    whole: bool = False
    capped: Callable[[int], SamplingOf] | None = None


SAMPLERS: dict[str, Sampler] = {
    "poisson": Sampler(poisson_batches, by_rate=True),
    "truncated-poisson": Sampler(
        # Cut at the expected size unless another size is named.
        lambda batch, records: TruncatedPoisson(batch / records, batch),
        capped=truncated_batches,
    ),
    "without-replacement": Sampler(fixed_batches, by_rate=True),
    "shuffled": Sampler(shuffled_batches),
    "full": Sampler(full_batches, whole=True),
}
"""The samplers by name."""
