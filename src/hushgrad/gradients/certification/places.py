"""Does a record keep its bits at every place of a pass, and in passes of other sizes?

Once a record is left out, others move up, and kernels may round them otherwise there: by vectors
that end elsewhere, by slices of another length, by rows that begin elsewhere in memory. No bound on
the sum's rounding covers that, since a ReLU that flips moves a whole share. So it is tested, bit by
bit, on all that a sum is made of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from hushgrad.batches.records import take
from hushgrad.gradients.certification.oracle import Oracle
from hushgrad.gradients.forms.choices import AnyGradients
from hushgrad.gradients.probes import variations
from hushgrad.numerics import same_bits
from hushgrad.types import Batch, NotCovered

PassOver = Callable[[Batch, int], AnyGradients]
"""A pass over a batch of so many records."""

_MOST_RECORDS = 16  # different ones; a few outputs of four were seen to agree where others do not
_ENTRIES = 4096  # that are compared; of 100, one model in 40 showed nothing of its period
_MOST_ROUNDS = 8


class MovingBits(NotCovered):
    """A record whose gradient has other last bits in another block; a larger one may help."""


def period_of(oracle: Oracle, run: PassOver, largest: int, multiple: int) -> int:
    """The least period such that a record has the same bits at all places that are equal modulo it.

    Passes are filled up to blocks of `multiple` rows, and no period is longer than a block. Losses,
    norms and factors are compared, in a pass of the largest size and in one that ends before.
    """
    count = max(oracle.count, min(_MOST_RECORDS, largest // multiple))
    # Many different values: a kernel's end rounds some of them alike by accident.
    rounds = _rounds(oracle, count, lambda batch: run(batch, count))
    for period in (1 << k for k in range(multiple.bit_length())):
        if all(_keep_their_bits(x, count, run, largest, multiple, period) for x in rounds):
            return period
    raise MovingBits(
        "a record's gradient has other last bits in another part of the batch, or in a batch of "
        "another size, where leaving one record out would move others"
    )


def _rounds(oracle: Oracle, count: int, run: Callable[[Batch], AnyGradients]) -> list[Batch]:
    """Sets of different records: the oracle's, and variations if the model takes those.

    A record of a small model has few entries whose bits could tell, so more sets are tried.
    """
    own = take(oracle.records, [i % oracle.count for i in range(count)])
    entries = sum(x[0].numel() for x in _made_of(run(own)))
    number = min(_MOST_ROUNDS, -(-_ENTRIES // max(1, entries * count)))
    varied = [variations(own, seed=seed) for seed in range(1, 1 + number)]
    try:
        for each in varied:
            run(each)
    except Exception:  # a variation was no record to it
        return [own]
    return [own, *varied[1:]] if count == oracle.count else varied


def _keep_their_bits(
    several: Batch, count: int, run: PassOver, largest: int, multiple: int, period: int
) -> bool:
    """Has each of several records the same bits wherever it stands at one residue?

    From block to block the records move on by a place.
    """
    known: list[Tensor] = []
    seen = torch.zeros(count * period, dtype=torch.bool)
    start, shorter = 0, largest - multiple if largest > multiple else 2 * multiple
    for turn, rows in enumerate(itertools.cycle((largest, shorter))):
        if turn >= 2 and start >= 2 * len(seen):  # everything was met again
            return True
        place = torch.arange(start, start + rows)
        which = (place % multiple + place // multiple) % count
        # A record and its place modulo the period: at equal keys the bits must be equal.
        key = which * period + place % period
        found = _made_of(run(take(several, which.numpy()), rows))
        if found[0].device.type != "cpu":  # elsewhere kernels differ from run to run
            return True
        known = known or [x.new_empty(len(seen), *x.shape[1:]) for x in found]
        fresh = ~seen[key]
        for x, own in zip(found, known, strict=True):
            if x.shape[1:] != own.shape[1:]:
                return False
            own[key[fresh]] = x[fresh]
            if not same_bits(x, own[key]):
                return False
        seen[key] = True
        start += rows
    raise AssertionError("a cycle does not end")


def _made_of(gradients: AnyGradients) -> list[Tensor]:
    norms = [square.estimate for square in gradients.squares.values()]
    return [gradients.losses, *norms, *gradients.held()]
