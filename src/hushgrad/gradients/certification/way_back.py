"""Does a record's gradient depend on the other records? A loss may not, and its backward pass may.

Hooks and functions of one's own can do there what no loss shows: clip the gradient of the whole
batch, scale it, turn its sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hushgrad.batches.records import MULTIPLE, take
from hushgrad.gradients.certification.deterministic import (
    MEDIAN,
    STRATA,
    RandomDraws,
    Seed,
    WithoutRandomness,
)
from hushgrad.gradients.certification.independence import EXTREMES
from hushgrad.gradients.certification.oracle import Oracle
from hushgrad.gradients.comparison import Precision
from hushgrad.gradients.errors import without_numbers
from hushgrad.gradients.factors.gradients import Gradients
from hushgrad.gradients.factors.slots import in_turn
from hushgrad.gradients.forms.traced import trace
from hushgrad.gradients.objective import Objective
from hushgrad.gradients.probes import beside_nan, beside_others, loudness, replaced_places
from hushgrad.gradients.tracing.call_sites import Probing, Replaying, Site, Unforeseen
from hushgrad.gradients.tracing.layout import Ambiguous
from hushgrad.numerics import same_bits
from hushgrad.types import Batch, Loss, NotCovered, Refused

ProbePass = Callable[[Objective, Batch], tuple[Gradients, int]]
"""A pass over a batch of one size: the gradients, and a digest of the operations that ran."""


def trace_probe(
    objective: Objective,
    batch: Batch,
    size: int,
    guide: Probing | Replaying,
    draws: RandomDraws = MEDIAN,
) -> tuple[Gradients, int]:
    """A traced pass, and a digest of the operations that ran."""
    try:
        with (
            objective.rewind_buffers(),
            WithoutRandomness(draws) as neutral,
            objective.guard_pass(),
        ):
            without_draws = replace(objective, loss=neutral.choosing_draws(objective.loss))
            return trace(without_draws, batch, in_turn(size), guide), neutral.program
    # These say what is wrong in words of ours, and may have another remedy.
    except (Refused, Ambiguous, Unforeseen):
        raise
    except Exception as error:  # the plain forward pass worked: the fault is the form's
        raise NotCovered(reason_of(error)) from error


def replays_of(sites: tuple[Site, ...], size: int, draws: RandomDraws = MEDIAN) -> ProbePass:
    """Traced passes that follow certified call sites."""

    def run(objective: Objective, batch: Batch) -> tuple[Gradients, int]:
        return trace_probe(objective, batch, size, Replaying(sites, size), draws)

    return run


def reason_of(error: Exception) -> str:
    """What an exception says, with its type where that is not known."""
    return str(error) if isinstance(error, Refused) else without_numbers(error)


def refuse_loud_gradients(
    objective: Objective, oracle: Oracle, sites: tuple[Site, ...], draws: RandomDraws = MEDIAN
) -> None:
    """Refuse call sites at which a record's gradient changes beside loud or NaN records.

    They are loud on both ways: in what they are, and in the gradients that their losses send back.
    A few records do: what is loud is so in any batch.
    """
    run, batch = replays_of(sites, FEW, draws), oracle.probe(FEW)
    quiet = run(objective, batch)
    refuse_mixed_gradients(objective, _loud(batch, FEW), run, quiet, oracle.precision)
    refuse_mixed_gradients(objective, _nan(batch, FEW), run, quiet, oracle.precision)


def refuse_gradients_beside_copies(
    objective: Objective, oracle: Oracle, sites: tuple[Site, ...]
) -> None:
    """Refuse call sites at which a record's gradient changes among copies of itself.

    What all records have in common, such as a full length that needs no mask, all have there.
    """
    run, batch, places = replays_of(sites, FEW), oracle.probe(FEW), oracle.places(FEW)
    quiet = run(objective, batch)
    for record in range(oracle.count):
        copies = take(oracle.records, [record] * FEW)
        beside: LoudBeside = [(copies, torch.ones(FEW))], places != record
        refuse_mixed_gradients(objective, beside, run, quiet, oracle.precision)


FEW = 2 * MULTIPLE
RARE_DRAWS: list[RandomDraws] = [
    *(extreme for extreme, _ in EXTREMES),
    *(Seed(seed) for seed in range(0, STRATA, 8)),
]

LoudBatch = tuple[Batch, Tensor]
"""A batch with other records at some places, and what all its losses are multiplied by."""

LoudBeside = tuple[list[LoudBatch], Tensor]
"""Kinds of others, of which the first that the model takes counts, and where they stand."""


def beside_neighbours(batch: Batch, size: int) -> LoudBeside:
    """Beside neighbours, which any model takes."""
    places = replaced_places(size)
    return [(beside_others(batch, places, loud=False), torch.ones(size))], places


def _loud(batch: Batch, size: int) -> LoudBeside:
    places = replaced_places(size)
    loud = beside_others(batch, places, loud=True)
    return [(loud, loudness(places)), (batch, loudness(places))], places


def _nan(batch: Batch, size: int) -> LoudBeside:
    places = replaced_places(size, 1)
    nan = torch.ones(size).masked_fill(places, torch.nan)
    return [(beside_nan(batch, places), nan), (batch, nan)], places


def refuse_mixed_gradients(
    objective: Objective,
    beside: LoudBeside,
    run: ProbePass,
    quiet: tuple[Gradients, int],
    precision: Precision,
) -> None:
    """Refuse a form in which a record's gradient changes beside others.

    `quiet` is the pass over the batch as it is.
    """
    (gradients, program), (kinds, places) = quiet, beside
    found = _first_taken(objective, kinds, run)
    # A model may refuse loud records (an index, a domain): the next kind then counts.
    if found is not None:
        mixed, ran = found
        reason = _MIXED if ran == program else _OTHER_PROGRAM
        _compare(gradients, mixed, ~places, precision, reason)


@dataclass(frozen=True)
class _Weighted:
    """A loss times a factor for each record."""

    loss: Loss
    factors: Tensor

    def __call__(self, batch: Batch) -> Tensor:
        losses = self.loss(batch)
        return losses * self.factors.to(losses.device, losses.dtype)


def _first_taken(
    objective: Objective, kinds: list[LoudBatch], run: ProbePass
) -> tuple[Gradients, int] | None:
    for others, factors in kinds:
        plain = bool((factors == 1).all())
        try:
            if plain:
                return run(objective, others)
            return run(replace(objective, loss=_Weighted(objective.loss, factors)), others)
        except (Refused, Unforeseen):
            # A loss that was multiplied may overflow; that is the factor's fault, not the model's.
            if plain:  # others like these will come
                raise
    return None


_MIXED = "samples are mixed on the way back; compute each record's loss from that record alone"


_OTHER_PROGRAM = (
    "the pass runs other operations beside other records, as attention does that drops its mask "
    "when no record of the batch is padded; make it run the same for every batch "
    '(attn_implementation="eager")'
)


def _compare(
    one: Gradients, other: Gradients, kept: Tensor, precision: Precision, reason: str
) -> None:
    """Norms keep their bits, where kernels are the same in every run; the vectors stay near."""
    device = one.losses.device
    # The replaced records differ by design; only the others' gradients must stay.
    kept = kept.to(device)
    drawn = torch.from_numpy(np.random.default_rng(2).standard_normal(len(kept)))
    # One random combination of the vectors tells what their norms alone cannot.
    weights = dict.fromkeys(one.squares, drawn.to(device) * kept)
    sums = one.weighted_sum(weights), other.weighted_sum(weights)
    total = torch.stack([s.estimate[kept].sum() for s in one.squares.values()]).sum().sqrt()
    for name, square in one.squares.items():
        before, after = square.estimate[kept], other.squares[name].estimate[kept]
        # Elsewhere than on the processor kernels may add up in another order in every run.
        same = same_bits(before, after) if device.type == "cpu" else True
        gap = (sums[0][name].double() - sums[1][name].double()).square().sum().sqrt()
        scale = torch.maximum(before.sum().clamp_min(0).sqrt(), precision.floor * total)
        if not (same and bool(gap <= precision.gradient * scale.clamp_min(1e-30))):
            raise NotCovered(f"a record's gradient of {name} depends on other records: {reason}")
