"""The fast form: every operation on a private parameter is seen, none is repeated."""

from __future__ import annotations

import torch
from torch import Tensor

from hushgrad.batches import records
from hushgrad.gradients.factors.gradients import Gradients
from hushgrad.gradients.factors.slots import Slots
from hushgrad.gradients.guards import refuse_kept, refuse_strangers
from hushgrad.gradients.objective import Objective
from hushgrad.gradients.tracing.call_sites import Guide, Replaying
from hushgrad.gradients.tracing.rules import RULES
from hushgrad.gradients.tracing.tape import Tape
from hushgrad.types import Batch, Refused


def trace(objective: Objective, batch: Batch, slots: Slots, guide: Guide) -> Gradients:
    """Take gradients by one forward and one backward pass over the rows of a batch's slots."""
    params = objective.params
    tape = Tape(params, slots.rows, guide, RULES)
    with torch.enable_grad(), tape.intercept():
        losses = require_losses(objective.loss(batch), slots.rows)
        # Before the backward pass, which would write the gradients of strangers.
        others = refuse_strangers(losses, params, (tape.token, *records.tensors(batch)))
        if losses.requires_grad:
            losses.backward(torch.ones_like(losses))
        if isinstance(guide, Replaying):
            # A pass that ends early has left a use out, and its gradient would be too small.
            guide.finish()
        factors = tape.finish()
    losses = losses.detach()  # which frees the graph
    # Activations die with the graph; a tensor that lives on is trained by somebody.
    refuse_kept(others)
    return Gradients(factors, params, slots.of_records(losses), slots)


def require_losses(losses: object, batch: int) -> Tensor:
    """Require one loss for each record."""
    if isinstance(losses, Tensor) and losses.shape == (batch,) and losses.is_floating_point():
        return losses
    raise Refused(
        "expected one loss for each record, a tensor of one dimension as long as the batch, got "
        f"{_description_of(losses, batch)}; use reduction='none' and reduce each record's own "
        "dimensions only"
    )


def _description_of(losses: object, batch: int) -> str:
    """In words without a number of records, which is private."""
    if not isinstance(losses, Tensor):
        return f"a {type(losses).__name__}"
    kind = f"a {losses.dtype} tensor of {losses.dim()} dimension{'s' * (losses.dim() != 1)}"
    if losses.dim() == 0:
        return f"{kind}, as after a mean or a sum"
    return f"{kind}, {'as' if len(losses) == batch else 'not as'} long as the batch"
