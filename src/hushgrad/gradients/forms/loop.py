"""The slow form: ordinary autograd, one record at a time. Always right, and everyone's oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hushgrad.batches import records
from hushgrad.gradients.factors.gradients import Factors, Gradients
from hushgrad.gradients.factors.kinds import Dense
from hushgrad.gradients.factors.slots import Slots, in_turn
from hushgrad.gradients.forms.traced import require_losses
from hushgrad.gradients.guards import refuse_kept, refuse_strangers
from hushgrad.gradients.objective import Objective
from hushgrad.gradients.tracing.call_sites import Replaying
from hushgrad.numerics import wide
from hushgrad.types import Batch, Loss, Params


def run_each(objective: Objective, batch: Batch, slots: Slots, _: Replaying) -> Gradients:
    """Take each gradient by a forward and backward pass of its own; no call is followed."""
    params, losses, gradients = objective.params, [], []
    for i in range(slots.records):  # each alone: padding would change nothing
        record = records.cut(batch, i, i + 1)
        with objective.rewind_buffers():
            value, gradient = one_record(objective.loss, params, record, copies=1)
        losses.append(value)
        gradients.append(gradient)
    factors: Factors = {
        name: {(0,): Dense(torch.stack([_or_zero(gradient[name], p) for gradient in gradients]))}
        for name, p in params.items()
    }
    return Gradients(factors, params, torch.stack(losses), in_turn(slots.records))


def one_record(
    loss: Loss, params: Params, record: Batch, copies: int, *, backward: bool = True
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradient of a batch of one record, or of the first of several copies of it.

    Without a backward pass there are no gradients.
    """
    batch = records.take(record, [0] * copies) if copies > 1 else record
    with torch.enable_grad(), _lend_gradients(params):
        losses = require_losses(loss(batch), copies)
        others = refuse_strangers(losses, params, (*params.values(), *records.tensors(batch)))
        # The first of the copies alone: its gradient is the record's.
        if backward and losses.requires_grad:
            losses[0].backward()
        found = {name: p.grad for name, p in params.items()}
    # A table may have asked for sparse gradients; what is noised is dense anyway.
    gradients = {name: None if g is None else wide(g.to_dense()) for name, g in found.items()}
    losses = losses.detach()  # which frees the graph
    refuse_kept(others)
    return losses[0], gradients


def _or_zero(gradient: Tensor | None, p: Tensor) -> Tensor:
    return wide(torch.zeros_like(p)) if gradient is None else gradient


@contextmanager
def _lend_gradients(params: Params) -> Iterator[None]:
    """Lend `.grad` to a pass. Checkpointing's older kind knows no other way to ask for one."""
    before = {name: p.grad for name, p in params.items()}
    try:
        for p in params.values():
            p.grad = None
        yield
    finally:
        for name, p in params.items():
            p.grad = before[name]
