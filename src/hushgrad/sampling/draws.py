"""Random sets of positions, drawn exactly, in ascending order, from a keyed generator."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from hushgrad.rng import Rng

Positions = Int64[ndarray, "_"]
"""Positions of records in their data set, ascending."""


def independent_draws(num_records: int, *, rate: float, rng: Rng) -> Positions:
    """Draw each position independently with probability `rate`, in time O(rate · num_records).

    Guarantees: given the decisions for all earlier positions, a position is drawn with probability
    `rate` up to 2⁻⁴⁹. The positions below m are the same for every `num_records` ≥ m.
    """
    if rate == 1:
        return np.arange(num_records)
    # The gap to the next drawn position is geometric. A gap beyond `jump` is cut there and drawn
    # again, which does not change the distribution (it is memoryless) but keeps u above 1/4: in
    # the far tail, the 52 bits of u would be too coarse for the remaining probability.
    jump = int(1 / rate)
    log_miss = math.log1p(-rate)
    typical = num_records * rate / -math.expm1(jump * log_miss)
    count = int(typical + 6 * math.sqrt(typical)) + 16
    found, last, start = [np.empty(0, np.int64)], -1, 0
    while last < num_records - 1:
        missed = np.log(rng.uniforms(count, start=start)) / log_miss
        ends = last + np.cumsum(np.minimum(np.floor(missed) + 1, jump).astype(np.int64))
        found.append(ends[(missed < jump) & (ends < num_records)])
        last, start = int(ends[-1]), start + count
    return np.concatenate(found)


def subset(size: int, *, num_records: int, rng: Rng) -> Positions:
    """Draw `size` different positions; all sets of this size are equally likely."""
    if 2 * size > num_records:
        kept = np.ones(num_records, dtype=bool)
        kept[subset(num_records - size, num_records=num_records, rng=rng)] = False
        return np.flatnonzero(kept)
    largest = 2**64 - 2**64 % num_records - 1  # rejecting larger words avoids modulo bias
    count = size + size // 2 + 16
    while True:
        words = rng.words(count)
        drawn = words[words <= np.uint64(largest)] % np.uint64(num_records)
        values, first = np.unique(drawn, return_index=True)
        if len(values) >= size:
            earliest = np.argsort(first)[:size]
            return np.sort(values[earliest]).astype(np.int64)
        count *= 2


def slice_of_shuffle(num_records: int, *, start: int, stop: int, rng: Rng) -> Positions:
    """Return the positions ranked `start` up to `stop` in a random order of all positions.

    Guarantees: disjoint ranges give disjoint positions. Two equal tickets (probability n²/2⁶⁵)
    go to the same range, which changes the size of a batch but puts no position into two batches.
    """
    tickets = rng.words(num_records)
    ranked = np.partition(tickets, [k for k in (start, stop) if k < num_records])
    taken = tickets >= ranked[start]
    if stop < num_records:
        taken &= tickets < ranked[stop]
    return np.flatnonzero(taken)
