"""Every other operation: its own derivative, taken record by record."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hushgrad.gradients.factors.kinds import Dense
from hushgrad.gradients.tracing.call import Call, Emitted, Saves
from hushgrad.gradients.tracing.calls import map_in, tensors_in, writes_in_place
from hushgrad.types import NotCovered


def by_derivative(call: Call, name: str) -> Saves:
    """Any operation that treats each record alone, through `torch.func`; exact, materialised."""
    if writes_in_place(name):
        raise NotCovered(f"no rule for {name} with a parameter; use the form that is not in place")
    # It runs again on the way back: random draws would be others then.
    call.trusted = False
    leaves = tensors_in(call.arguments)
    operands = [x for x in leaves if call.private(x)]
    rest = [x for x in leaves if not call.private(x)]
    layouts = [call.layout(x) for x in rest]
    values = [call.value(x) for x in operands]

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        g = call.out.split(gradient, call.batch)
        each = [
            x if where is None else where.split(x, call.batch)
            for x, where in zip(kept, layouts, strict=True)
        ]

        def one(g: Tensor, *inputs: Tensor) -> Any:
            def forward(*ws: Tensor) -> Any:
                ours, theirs = iter(ws), iter(inputs)
                args, kwargs = map_in(
                    lambda x: next(ours) if call.private(x) else next(theirs), call.arguments
                )
                return call.function(*args, **kwargs)

            pull = torch.func.vjp(forward, *(value.to(g.dtype) for value in values))[1]
            return pull(g)

        in_dims = (0, *(None if where is None else 0 for where in layouts))
        try:
            pulled = torch.func.vmap(one, in_dims=in_dims)(g, *each)
        except RuntimeError as error:
            raise NotCovered(
                f"no rule for {name}, and torch.func cannot take its derivative record by record "
                "(a custom kernel?); give it a rule (hushgrad.gradients.rule), write it with torch "
                "operations, or use form=loop"
            ) from error
        for operand, dense in zip(operands, pulled, strict=True):
            yield operand, Dense(dense)

    return tuple(rest), emit
