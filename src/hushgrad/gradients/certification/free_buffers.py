"""What a pass may write: buffers that get the same bits from any records."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hushgrad.batches import records
from hushgrad.gradients.certification.deterministic import WithoutRandomness
from hushgrad.gradients.certification.oracle import Oracle, consult
from hushgrad.gradients.forms.traced import checked_losses
from hushgrad.gradients.guards import Key, restored, same_bits, written
from hushgrad.gradients.objective import Subject
from hushgrad.types import Batch, Refused


def consulted(subject: Subject, few: Batch) -> tuple[Subject, Oracle]:
    """The oracle, and the subject with the buffers that its passes may write.

    Most models write none: then the oracle's own runs are the proof, but for another number.
    """
    try:
        oracle = consult(subject, few)
        more = records.take(few, [0] * (2 * records.MULTIPLE))
        if not oracle.wrote and not _written(subject, more):
            return subject, oracle
    except Refused:  # something was written, or else what follows tells
        pass
    subject = replace(subject, free_buffers=_free_buffers(subject, few))
    return subject, consult(subject, few)


def _free_buffers(subject: Subject, few: Batch) -> frozenset[Key]:
    """The buffers that a pass writes with the same bits whatever the records and their number.

    Spectral norm's vectors and step counters are such; anything else that is written is refused.
    """
    runs = [(i, records.MULTIPLE) for i in range(records.count(few))]
    written_by = []
    for i, copies in [*runs, (0, 2 * records.MULTIPLE)]:
        written_by.append(_written(subject, records.take(few, [i] * copies)))
    if any(written_by):  # what a step uses to move them
        written_by.append(_written(subject, records.zeros_like(few)))
    buffers = {(n, name) for n, m in enumerate(subject.modules) for name, _ in m.named_buffers()}
    first = written_by[0]
    for key in frozenset().union(*written_by):
        same = all(key in one and same_bits(one[key], first[key]) for one in written_by)
        if key not in buffers or not same:
            raise written(key)
    return frozenset(first)


def _written(subject: Subject, batch: Batch) -> dict[Key, Tensor]:
    watched = restored(subject.params, subject.modules)
    with watched as changed, torch.enable_grad(), WithoutRandomness() as neutral:
        checked_losses(neutral.calling(subject.loss)(batch), records.count(batch))
    return changed
