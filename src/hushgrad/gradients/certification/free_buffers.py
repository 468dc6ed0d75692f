"""What a pass may write: buffers that get the same bits from any records."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hushgrad.batches import records
from hushgrad.gradients.certification.deterministic import WithoutRandomness
from hushgrad.gradients.certification.oracle import Oracle, consult
from hushgrad.gradients.forms.traced import require_losses
from hushgrad.gradients.guards import WatchedKey, restored, write_refusal
from hushgrad.gradients.objective import Objective
from hushgrad.numerics import same_bits
from hushgrad.types import Batch, Refused


def consult_finding_buffers(objective: Objective, few: Batch) -> tuple[Objective, Oracle]:
    """The oracle, and the objective with the buffers that its passes may write.

    Most models write none: then the oracle's own runs are the proof, but for another number.
    """
    try:
        oracle = consult(objective, few)
        more = records.take(few, [0] * (2 * records.MULTIPLE))
        if not oracle.wrote and not _writes_of(objective, more):
            return objective, oracle
    except Refused:  # something was written, or else what follows tells
        pass
    objective = replace(objective, free_buffers=_free_buffers(objective, few))
    return objective, consult(objective, few)


def _free_buffers(objective: Objective, few: Batch) -> frozenset[WatchedKey]:
    """The buffers that a pass writes with the same bits whatever the records and their number.

    Spectral norm's vectors and step counters are such; anything else that is written is refused.
    """
    runs = [(i, records.MULTIPLE) for i in range(records.count(few))]
    written_by = []
    for i, copies in [*runs, (0, 2 * records.MULTIPLE)]:
        written_by.append(_writes_of(objective, records.take(few, [i] * copies)))
    if any(written_by):  # what a step uses to move them
        written_by.append(_writes_of(objective, records.zeros_like(few)))
    buffers = {(n, name) for n, m in enumerate(objective.modules) for name, _ in m.named_buffers()}
    first = written_by[0]
    for key in frozenset().union(*written_by):
        same = all(key in one and same_bits(one[key], first[key]) for one in written_by)
        if key not in buffers or not same:
            raise write_refusal(key)
    return frozenset(first)


def _writes_of(objective: Objective, batch: Batch) -> dict[WatchedKey, Tensor]:
    watched = restored(objective.params, objective.modules)
    with watched as changed, torch.enable_grad(), WithoutRandomness() as neutral:
        require_losses(neutral.choosing_draws(objective.loss)(batch), records.count(batch))
    return changed
