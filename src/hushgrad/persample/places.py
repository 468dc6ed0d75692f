"""Does a record keep its bits in every block of a batch, and in batches of other sizes?

Once a record is left out, others move up, and kernels may round them otherwise there: by vectors
that end elsewhere, by slices of another length. No bound on the sum's rounding covers that, since a
ReLU that flips moves a whole share. So it is tested, bit by bit, on all that a sum is made of.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hushgrad.persample.gradients import Gradients
from hushgrad.persample.oracle import Oracle
from hushgrad.persample.records import take
from hushgrad.persample.watch import same_bits
from hushgrad.types import Batch, NotCovered

Run = Callable[[Batch, int], Gradients]
"""A pass over a batch of so many records."""


class MovingBits(NotCovered):
    """A record whose gradient has other last bits in another block; a larger one may help."""


def refuse_moving_bits(oracle: Oracle, run: Run, largest: int, multiple: int) -> None:
    """Refuse a form in which a record's loss, norms or factors change with its block or the size.

    A batch is filled up to blocks of `multiple` records. The probes are of equal blocks: what each
    is made of must have the same bits, in a batch of the largest size and in one that ends before.
    """
    block, known = oracle.places(multiple), None
    for size in (largest, largest - multiple if largest > multiple else 2 * multiple):
        index = block.repeat(size // multiple).tolist()
        found = _made_of(run(take(oracle.records, index), size))
        if found[0].device.type != "cpu":  # elsewhere kernels differ from run to run
            return
        known = known or [x[:multiple] for x in found]
        for x, own in zip(found, known, strict=True):
            if x.shape[1:] != own.shape[1:] or not same_bits(x, _in_turn(own, size)):
                raise MovingBits(_MOVING)


_MOVING = (
    "a record's gradient has other last bits in another part of the batch, or in a batch of "
    "another size, where leaving one record out would move others"
)


def _made_of(gradients: Gradients) -> list[Tensor]:
    norms = [square.estimate for square in gradients.squares.values()]
    return [gradients.losses, *norms, *gradients.held()]


def _in_turn(block: Tensor, size: int) -> Tensor:
    return block.repeat(size // len(block), *[1] * (block.dim() - 1))
