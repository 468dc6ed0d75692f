"""Does a record's loss depend on its mates? Tested by value, by bit, and at several draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hushgrad.persample.neutral import WithoutRandomness
from hushgrad.persample.oracle import Evidence, Oracle, view
from hushgrad.persample.probes import (
    beside_nan,
    beside_others,
    beside_variations,
    variations,
)
from hushgrad.persample.records import MULTIPLE, cut, padded_size
from hushgrad.persample.subject import Subject
from hushgrad.persample.traced import checked_losses
from hushgrad.persample.watch import same_bits
from hushgrad.types import Batch, Refused

_QUANTILES = (0.01, 0.99)  # beside the median: a model may mix its records in some draws only
_MULTIPLES = (MULTIPLE, 2 * MULTIPLE, 4 * MULTIPLE)
_VARIATIONS = 3  # of 24 records; one of them overlooked a kernel's end 1 time in 20


@dataclass(frozen=True)
class Passes:
    """Plain passes over an oracle's records; a probe of one size is run once."""

    subject: Subject
    oracle: Oracle
    _known: dict[int, tuple[Tensor, int]] = field(default_factory=dict)

    def run(self, batch: Batch, size: int) -> tuple[Tensor, int]:
        """The losses, and a digest of the operations that gave them."""
        neutral = WithoutRandomness(self.oracle.quantile)
        with torch.enable_grad(), neutral, self.subject.rewound():
            losses = checked_losses(self.subject.loss(batch), size).detach()
        return losses, neutral.program

    def losses(self, batch: Batch, size: int) -> Tensor:
        return self.run(batch, size)[0]

    def probe(self, size: int) -> tuple[Tensor, int]:
        """The same of the oracle's records in turn."""
        if size not in self._known:
            self._known[size] = self.run(self.oracle.probe(size), size)
        return self._known[size]


def check_independence(passes: Passes, sizes: Sequence[int], evidence: Evidence) -> str | None:
    """Refuse a loss in which records meet, in batches of any of these sizes.

    Returned is why records have to be run one at a time, or None if they need not.
    """
    moved = None
    for one in _views(passes):
        for size in sizes:
            _check_values(one, size, evidence)
        moved = _moved(one, sizes[-1]) or moved
    return moved


def _views(passes: Passes) -> Iterator[Passes]:
    yield passes
    if passes.oracle.drew:
        for quantile in _QUANTILES:
            other = view(passes.subject, passes.oracle, quantile)
            if other.count:
                yield Passes(passes.subject, other)


def _check_values(passes: Passes, size: int, evidence: Evidence) -> None:
    """In a batch, at any position, a record's loss must be that of its own run."""
    oracle, losses = passes.oracle, passes.probe(size)[0].double()
    alone = torch.stack(oracle.losses).double().repeat(-(-size // oracle.count))[:size]
    both_nan = losses.isnan() & alone.isnan()
    error = (losses - alone).abs() / (alone.abs() + 0.1)
    error = error.masked_fill(both_nan | (losses == alone), 0)
    worst = int(error.nan_to_num(nan=torch.inf).argmax())
    evidence.merge(Evidence(oracle.precision, sizes=[size], loss=float(error[worst])))
    if not bool(error[worst] <= oracle.precision.loss):
        raise _mixed("alone")


def _moved(passes: Passes, size: int) -> str | None:
    """How other records, also very loud ones, move the last bits of a record's loss, if they do.

    A comparison of values has a tolerance, below which a weak coupling hides until a record is
    large. The same shape gives the same kernels, so here none is needed. Rounding is not let pass
    either where a model runs other operations for other mates: one record would move them all.
    """
    reference, program = passes.probe(size)
    moved, tolerance = None, passes.oracle.precision.loss
    for losses, ran in _beside(passes, size):
        own, before = losses[::2], reference[::2]
        if not _near(own, before, tolerance):
            raise _mixed("beside others")
        if not _same(own, before):
            moved = OTHER_BITS if ran == program else OTHER_PROGRAM
    return moved


def _beside(passes: Passes, size: int) -> Iterator[tuple[Tensor, int]]:
    """Passes beside loud records, beside such as are not numbers, and beside varied ones."""
    probe = passes.oracle.probe(size)
    loud = _unless_refused(passes, beside_others(probe, loud=True), size)
    yield loud or passes.run(beside_others(probe, loud=False), size)
    for mates in (beside_nan, beside_variations):
        found = _unless_refused(passes, mates(probe), size)
        if found is not None:
            yield found


def _unless_refused(passes: Passes, batch: Batch, size: int) -> tuple[Tensor, int] | None:
    try:
        return passes.run(batch, size)
    except Exception:  # the model takes no such records
        return None


def _same(x: Tensor, y: Tensor) -> bool:
    """By bits, where kernels are the same in every run: on other devices, values have to do."""
    return x.device.type != "cpu" or same_bits(x, y)


def _near(x: Tensor, y: Tensor, tolerance: float) -> bool:
    return torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)


OTHER_BITS = (
    "the loss of a record depends on its mates, if only by rounding: it has other last bits beside "
    "other records, as where a model sorts its batch (packed sequences); compute each record's "
    "loss at its own place in the batch"
)
OTHER_PROGRAM = (
    "the loss of a record depends on its mates: the model runs other operations beside other "
    "records, as attention does that drops its mask when no record of the batch is padded, and one "
    "record would move all the others, if only by rounding; make it run the same for every batch "
    '(attn_implementation="eager")'
)


def multiple_for(passes: Passes, size: int) -> int:
    """The least multiple of records, up to 32, at which a record keeps its bits in any batch.

    Vectorised kernels treat the end of a tensor by other code, so it depends on the model's shapes,
    and shows in some values only: many variations of the records are tried.
    """
    count = passes.oracle.count
    for multiple in _MULTIPLES[:-1]:
        whole = padded_size(3 * MULTIPLE, multiple)
        if not all(_same_in_parts(passes, whole, multiple, seed) for seed in range(_VARIATIONS)):
            continue
        in_turn, _ = passes.probe(padded_size(size, multiple))
        alone = passes.probe(multiple)[0][:count]
        if all(same_bits(x, alone[: len(x)]) for x in in_turn.split(count)):
            return multiple
    return _MULTIPLES[-1]


def _same_in_parts(passes: Passes, whole: int, multiple: int, seed: int) -> bool:
    """Have varied records the same losses in one batch and in parts of it?"""
    many, together = _accepted(passes, whole, seed)
    parts = [cut(many, i, i + multiple) for i in range(0, whole, multiple)]
    return same_bits(torch.cat([passes.losses(part, multiple) for part in parts]), together)


def _accepted(passes: Passes, count: int, seed: int) -> tuple[Batch, Tensor]:
    """Variations of the oracle's records, or those themselves if the loss takes no others.

    And their losses.
    """
    many = variations(passes.oracle.probe(count), seed)
    try:
        return many, passes.losses(many, count)
    except Exception:  # a variation was no record to it
        return passes.oracle.probe(count), passes.probe(count)[0]


def _mixed(otherwise: str) -> Refused:
    # Without the losses and the batch's size: they are private, and a message may end up anywhere.
    return Refused(
        f"the loss of a record depends on its mates: in a batch it is not what it is "
        f"{otherwise}, so samples are mixed (a mean or a limit over the batch, BatchNorm, a loss "
        "normalised by the batch?); compute each record's loss from that record alone"
    )
