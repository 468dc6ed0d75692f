"""Does a record's loss depend on the others? Tested by value, by bit, and at several draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hushgrad.batches.records import MULTIPLE, count, cut, padded_size, take
from hushgrad.gradients.certification.deterministic import STRATA, Seed, WithoutRandomness
from hushgrad.gradients.certification.oracle import Evidence, Oracle, view
from hushgrad.gradients.comparison import Precision
from hushgrad.gradients.forms.traced import require_losses
from hushgrad.gradients.objective import Objective
from hushgrad.gradients.probes import (
    beside_nan,
    beside_others,
    beside_variations,
    replaced_places,
    variations,
)
from hushgrad.numerics import same_bits
from hushgrad.types import Batch, Refused

# A model may mix its records in some draws only. The extremes are the least and the largest that a
# float32 draw from 0 to 1 can be; where a model breaks there, the milder ones have to do.
EXTREMES = ((2.0**-24, 0.01), (1 - 2.0**-24, 0.99))
SOME_SEEDS = 4  # at a later test
SEEDS = range(STRATA)  # one option of five, drawn by a vector, is missed 1 time in 200
_MULTIPLES = (MULTIPLE, 2 * MULTIPLE, 4 * MULTIPLE)
LARGEST_MULTIPLE = _MULTIPLES[-1]
"""A batch is filled up to a multiple of at most this many records."""
_VARIATIONS = 3  # of 24 records; one of them overlooked a kernel's end 1 time in 20


class PassResult(NamedTuple):
    """The losses of a pass, a digest of its operations, and whether it drew anything random."""

    losses: Tensor
    program: int
    drew: bool


@dataclass(frozen=True)
class Passes:
    """Plain passes over an oracle's records; a probe of one size is run once."""

    objective: Objective
    oracle: Oracle
    _known: dict[int, PassResult] = field(default_factory=dict)

    def run(self, batch: Batch, size: int) -> PassResult:
        """One pass."""
        neutral = WithoutRandomness(self.oracle.draws)
        loss = neutral.choosing_draws(self.objective.loss)
        with torch.enable_grad(), neutral, self.objective.rewind_buffers():
            losses = require_losses(loss(batch), size).detach()
        return PassResult(losses, neutral.program, neutral.drew)

    def losses(self, batch: Batch, size: int) -> Tensor:
        return self.run(batch, size).losses

    def probe(self, size: int) -> PassResult:
        """The same of the oracle's records in turn."""
        if size not in self._known:
            self._known[size] = self.run(self.oracle.probe(size), size)
        return self._known[size]


def check_independence(
    passes: Passes, sizes: Sequence[int], evidence: Evidence, seeds: Sequence[int] = SEEDS
) -> str | None:
    """Refuse a loss in which records meet, in batches of any of these sizes.

    `seeds` are those of random draws. Returned is why records have to be run one at a time, or
    None if they need not.
    """
    moved = None
    for one in _views(passes):
        for size in sizes:
            _check_values(one, size, evidence)
        moved = _find_moved_bits(one, sizes[-1], _beside) or moved
        moved = _find_moved_bits(one, MULTIPLE, _beside_copies) or moved
    moved = _find_carried_state(passes, sizes[-1]) or moved
    return _find_moved_bits_at(passes, seeds) or moved


def check_briefly(
    objective: Objective, few: Batch, size: int, precision: Precision, turn: int
) -> str | None:
    """Do these records not meet in a batch of `size`, beside one kind of others in turn?

    In place of runs of one record each there is one of these few, at another size.
    """
    oracle = Oracle(few, [torch.empty(0)] * count(few), [], precision)
    alone, _, drew = Passes(objective, oracle).run(few, count(few))
    passes = Passes(objective, replace(oracle, drew=drew))
    losses = passes.probe(size).losses
    alone = alone[oracle.places(size)]
    finite = alone.isfinite()  # beside others it will be seen what becomes of the rest
    if not _near(losses[finite], alone[finite], precision.loss):
        raise _mixing_refusal("in a smaller one")
    moved = _find_moved_bits(passes, size, _one_in_turn(turn))
    return _find_moved_bits_at(passes, [turn]) or moved


def _find_moved_bits_at(passes: Passes, seeds: Sequence[int]) -> str | None:
    """As `_find_moved_bits`, of a few records where all draws are random, from these seeds."""
    moved = None
    for seed in seeds if passes.oracle.drew else ():
        drawn = Passes(passes.objective, replace(passes.oracle, draws=Seed(seed)))
        moved = _find_moved_bits(drawn, MULTIPLE, _one_in_turn(seed)) or moved
    return moved


def _views(passes: Passes) -> Iterator[Passes]:
    yield passes
    if passes.oracle.drew:
        for quantiles in EXTREMES:
            # A milder draw where the extreme one breaks the model: infinite noise proves nothing.
            other = _finite_view(passes, quantiles)
            if other is not None:
                yield Passes(passes.objective, other)


def _finite_view(passes: Passes, quantiles: Sequence[float]) -> Oracle | None:
    """At the first quantile at which some record's loss is finite."""
    for quantile in quantiles:
        try:
            found = view(passes.objective, passes.oracle.records, quantile)
        except Refused:
            raise
        except Exception:  # a draw that the model cannot take, as infinite noise would be
            continue
        if found.count:
            return found
    return None


def _check_values(passes: Passes, size: int, evidence: Evidence) -> None:
    """In a batch, at any position, a record's loss must be that of its own run."""
    oracle, losses = passes.oracle, passes.probe(size).losses.double()
    alone = torch.stack(oracle.losses).double()[oracle.places(size)]
    # A loss that is nan alone may be nan in a batch: it is masked out everywhere.
    both_nan = losses.isnan() & alone.isnan()
    error = (losses - alone).abs() / (alone.abs() + 0.1)
    error = error.masked_fill(both_nan | (losses == alone), 0)
    worst = int(error.nan_to_num(nan=torch.inf).argmax())
    evidence.merge(Evidence(oracle.precision, sizes=[size], loss=float(error[worst])))
    if not bool(error[worst] <= oracle.precision.loss):
        raise _mixing_refusal("alone")


Beside = tuple[list[Batch], Tensor]
"""Batches in which other records stand at some places, of which the first that the loss takes
counts, and these places."""
BesideOthers = Callable[[Passes, int], Iterator[Beside]]


def _find_moved_bits(passes: Passes, size: int, beside: BesideOthers) -> str | None:
    """How other records, also very loud ones, move the last bits of a record's loss, if they do.

    A comparison of values has a tolerance, below which a weak coupling hides until a record is
    large. The same shape gives the same kernels, so here none is needed. Rounding is not let pass
    either where a model runs other operations beside other records: one record would move them all.
    """
    reference, program, _ = passes.probe(size)
    moved, tolerance = None, passes.oracle.precision.loss
    for batches, places in beside(passes, size):
        taken = (_run_if_taken(passes, batch, size) for batch in batches)
        found = next((x for x in taken if x is not None), None)
        if found is None:
            continue
        kept = ~places.to(reference.device)
        own, before = found.losses[kept], reference[kept]
        if not _near(own, before, tolerance):
            raise _mixing_refusal("beside others")
        if not _same(own, before):
            moved = OTHER_BITS if found.program == program else OTHER_PROGRAM
    return moved


def _find_carried_state(passes: Passes, size: int) -> str | None:
    """Does a record's loss depend on the batches before? By now, loud records and nan were there.

    Returned is why records have to be run one at a time, or None.
    """
    reference = passes.probe(size).losses
    again = passes.run(passes.oracle.probe(size), size).losses
    if not _near(again, reference, passes.oracle.precision.loss):
        raise _memory_refusal()
    return None if _same(again, reference) else OTHER_BITS


def _beside_copies(passes: Passes, size: int) -> Iterator[Beside]:
    """Beside copies of itself, where all records have in common what it has: a full length, say."""
    oracle = passes.oracle
    for record in range(oracle.count):
        yield [take(oracle.records, [record] * size)], oracle.places(size) != record


def _beside(passes: Passes, size: int) -> Iterator[Beside]:
    """Beside loud records, beside nan, and beside varied ones, half of them each time."""
    probe, loud = passes.oracle.probe(size), replaced_places(size)
    yield [beside_others(probe, loud, loud=is_loud) for is_loud in (True, False)], loud
    yield [beside_nan(probe, replaced_places(size, 1))], replaced_places(size, 1)
    yield [beside_variations(probe, replaced_places(size, 2))], replaced_places(size, 2)


def _one_in_turn(turn: int) -> BesideOthers:
    """Beside one kind of these others."""

    def one(passes: Passes, size: int) -> Iterator[Beside]:
        kinds = list(_beside(passes, size))
        yield kinds[turn.bit_count() % len(kinds)]

    return one


def _run_if_taken(passes: Passes, batch: Batch, size: int) -> PassResult | None:
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
    "the loss of a record depends on other records, if only by rounding: its last bits change "
    "beside other records, as where a model sorts its batch (packed sequences); compute each "
    "record's loss at its own place in the batch"
)
OTHER_PROGRAM = (
    "the loss of a record depends on other records: the model runs other operations beside other "
    "records, as attention does that drops its mask when no record of the batch is padded, and one "
    "record would move all the others, if only by rounding; make it run the same for every batch "
    '(attn_implementation="eager")'
)


def multiple_for(passes: Passes, size: int) -> int:
    """The least multiple of records, up to 32, at which a record keeps its bits in any batch.

    Vectorised kernels treat the end of a tensor by other code, so it depends on the model's shapes,
    and shows in some values only: many variations of the records are tried.
    """
    few = passes.oracle.count
    for multiple in _MULTIPLES[:-1]:
        whole = padded_size(3 * MULTIPLE, multiple)
        if not all(_same_in_parts(passes, whole, multiple, seed) for seed in range(_VARIATIONS)):
            continue
        in_turn = _in_turn(passes, padded_size(size, multiple))
        alone = _in_turn(passes, multiple)[:few]
        if all(same_bits(x, alone[: len(x)]) for x in in_turn.split(few)):
            return multiple
    return _MULTIPLES[-1]


def _in_turn(passes: Passes, size: int) -> Tensor:
    """The losses of the oracle's records, which stand at few places within a multiple."""
    oracle = passes.oracle
    return passes.losses(take(oracle.records, [i % oracle.count for i in range(size)]), size)


def _same_in_parts(passes: Passes, whole: int, multiple: int, seed: int) -> bool:
    """Have varied records the same losses in one batch and in parts of it?"""
    many, together = _accepted_variations(passes, whole, seed)
    parts = [cut(many, i, i + multiple) for i in range(0, whole, multiple)]
    return same_bits(torch.cat([passes.losses(part, multiple) for part in parts]), together)


def _accepted_variations(passes: Passes, count: int, seed: int) -> tuple[Batch, Tensor]:
    """Variations of the oracle's records, or those themselves if the loss takes no others.

    And their losses.
    """
    many = variations(passes.oracle.probe(count), seed)
    try:
        return many, passes.losses(many, count)
    except Exception:  # a variation was no record to it
        return passes.oracle.probe(count), passes.probe(count).losses


def _mixing_refusal(otherwise: str) -> Refused:
    # Without the losses and the batch's size: they are private, and a message may end up anywhere.
    return Refused(
        f"the loss of a record depends on other records: in a batch it is not what it is "
        f"{otherwise}, so samples are mixed (a mean or a limit over the batch, BatchNorm, a loss "
        "normalised by the batch?); compute each record's loss from that record alone"
    )


def _memory_refusal() -> Refused:
    return Refused(
        "the loss of a record depends on other records in earlier batches: after passes over other "
        "records it is not what it was before, so the model keeps something of the records that "
        "it has seen (a memory, a running mean, a queue); compute each record's loss from that "
        "record and the parameters alone"
    )
