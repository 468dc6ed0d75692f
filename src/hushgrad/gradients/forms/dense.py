"""The general form, `torch.func.vmap(grad)`: any model that is a pure function of one record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.batches import records
from hushgrad.gradients.factors.gradients import Factors, Gradients
from hushgrad.gradients.factors.kinds import Dense
from hushgrad.gradients.factors.slots import Slots
from hushgrad.gradients.forms.traced import require_losses
from hushgrad.gradients.objective import Objective
from hushgrad.gradients.tracing.call_sites import Replaying
from hushgrad.gradients.tracing.calls import map_in
from hushgrad.numerics import wide
from hushgrad.types import Batch, Params

_CHUNK_BYTES = 2**28  # the gradients of the records that are worked on at once


def vectorise(objective: Objective, batch: Batch, slots: Slots, _: Replaying) -> Gradients:
    """Take gradients by vectorising the gradient of one record's loss; no call is followed."""
    params = objective.params
    leaves = records.tensors(batch)

    def one(values: dict[str, Tensor], *record: Tensor) -> tuple[Tensor, Tensor]:
        parts = iter(record)
        alone = records.map_tensors(lambda _: next(parts).unsqueeze(0), batch)
        # vmap gives one record's values; the loss still reads the module's own parameters.
        with _substitute(params, values), _lend_buffers(objective):
            value = require_losses(objective.loss(alone), 1)[0]
        return value, value.detach()

    gradient = torch.func.grad(one, has_aux=True)
    each = torch.func.vmap(
        gradient,
        in_dims=(None, *[0] * len(leaves)),
        randomness="different",
        chunk_size=_chunk(params),
    )
    values = {name: p.detach() for name, p in params.items()}
    gradients, losses = each(values, *leaves)
    factors: Factors = {name: {(0,): Dense(wide(gradients[name].detach()))} for name in params}
    return Gradients(factors, params, slots.of_records(losses.detach()), slots)


def _chunk(params: Params) -> int:
    """How many records to work on at once: a power of two, so that padded batches divide alike."""
    one_gradient = sum(p.numel() * p.element_size() for p in params.values())
    return 1 << max(_CHUNK_BYTES // max(one_gradient, 1), 1).bit_length() - 1


@contextmanager
def _lend_buffers(objective: Objective) -> Iterator[None]:
    """Give the pass copies of the buffers that it may write: vmap lets it write nothing else."""
    owners = [m for module in objective.modules for m in module.modules()]
    before = [dict(owner._buffers) for owner in owners if objective.free_buffers]
    try:
        for owner, buffers in zip(owners, before, strict=False):
            for name, b in buffers.items():
                owner._buffers[name] = None if b is None else b.clone()
        yield
    finally:
        for owner, buffers in zip(owners, before, strict=False):
            owner._buffers.clear()
            owner._buffers.update(buffers)


@contextmanager
def _substitute(params: Params, values: dict[str, Tensor]) -> Iterator[None]:
    """Let `values` stand in for the parameters in every operation that consumes one."""
    stand_in = {id(p): values[name] for name, p in params.items()}

    def intercept(
        cls: Any, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            own, named = map_in(lambda x: stand_in.get(id(x), x), (args, kwargs or {}))
            return function(*own, **named)

    member = {"__torch_function__": classmethod(intercept)}
    switched = type("StandIn", (nn.Parameter,), member)
    try:
        for p in params.values():
            p.__class__ = switched
        yield
    finally:
        for p in params.values():
            p.__class__ = nn.Parameter
