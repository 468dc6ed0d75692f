"""Recurrent layers and cells, taken apart into products whose rules are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from hushgrad.gradients.tracing.call import Call, Saves
from hushgrad.gradients.tracing.recurrence import (
    CellKind,
    Gru,
    Lstm,
    Rnn,
    Unrolled,
    Weights,
    before,
)
from hushgrad.gradients.tracing.rules.linear import linear
from hushgrad.gradients.tracing.rules.registry import REGISTERED, decomposition
from hushgrad.types import NotCovered


def known_linear(input: Tensor, weight: Tensor, bias: Tensor | None, stand_in: Tensor) -> Tensor:
    """`linear(input, weight, bias)` that was computed elsewhere: only its gradient is of use."""
    if has_torch_function((weight, bias)):
        result: Tensor = handle_torch_function(
            known_linear, (weight, bias), input, weight, bias, stand_in
        )
        return result
    return stand_in


def _as_linear(
    call: Call, input: Tensor, weight: Tensor, bias: Tensor | None, stand_in: Tensor
) -> Saves | None:
    return linear(call, input, weight, bias)


REGISTERED[known_linear] = _as_linear


# --- layers -------------------------------------------------------------------------------------


def _layer(
    kind: CellKind, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool
) -> tuple[Tensor, ...]:
    """One layer in one direction: the outputs of all steps, then the last states."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    w_hr = rest[-1] if len(rest) % 2 else None
    inputs = F.linear(x, w_ih, b_ih)
    narrow, dtype = inputs.dtype, torch.promote_types(inputs.dtype, state[0].dtype)
    inputs, (h, *c) = inputs.to(dtype), (s.to(dtype) for s in state)
    cell = c[0] if c else None
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        bias, projection = (w if w is None else w.detach().to(dtype) for w in (b_hh, w_hr))
        plain = Weights(w_hh.detach().to(dtype), bias, projection)
        ran = kind.run(inputs.detach(), h, cell, plain)
        states = before(ran.y, h, reverse=kind.reverse)
    hidden = known_linear(states, w_hh, b_hh, ran.hidden)
    projected = None
    if w_hr is not None:
        assert ran.m is not None
        projected = known_linear(ran.m, w_hr, None, ran.y.clone())
    operands = (inputs, hidden, projected, h, cell)
    if has_torch_function(operands):
        raise NotCovered("a recurrent layer runs over what has no records; use form=dense")
    result = Unrolled.apply(kind, ran, *operands)  # type: ignore[no-untyped-call]
    y, *cells = result if cell is not None else (result,)
    # As torch has it under autocast: only what is never multiplied by the state stays narrow.
    y = y if isinstance(kind, Gru) else y.to(narrow)
    cells = cells if w_hr is not None else [c.to(narrow) for c in cells]
    return y, y[:, 0 if kind.reverse else -1], *cells


def _layers(
    make: Callable[[bool], CellKind],
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> Any:
    """All layers in all directions, each layer's outputs side by side into the next."""
    state = (hx,) if isinstance(hx, Tensor) else hx
    if has_torch_function((input, *state)):
        return NotImplemented
    x = input if batch_first else input.transpose(0, 1)
    kinds = [make(reverse) for reverse in ((False, True) if bidirectional else (False,))]
    count = len(params) // (num_layers * len(kinds))
    weights = (params[i : i + count] for i in range(0, len(params), count))
    states = zip(*(s.unbind(0) for s in state), strict=True)
    last = []
    for layer in range(num_layers):
        if layer and dropout and train:
            x = F.dropout(x, dropout)
        outputs = []
        for kind in kinds:
            y, *ends = _layer(kind, x, next(states), next(weights), has_biases)
            outputs.append(y)
            last.append(ends)
        x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
    finals = (torch.stack(ends) for ends in zip(*last, strict=True))
    return x if batch_first else x.transpose(0, 1), *finals


def _recurrent(
    make: Callable[[bool], CellKind], input: Tensor, second: Any, *others: Any, **named: Any
) -> Any:
    """Either spelling: with the first states second, or a packed sequence's batch sizes."""
    if isinstance(second, Tensor) and second.dim() == 1:
        raise NotCovered(
            "a packed sequence orders its rows by the lengths of all records, so whose they are "
            "cannot be told from it; pass the padded sequence and pick each record's own steps, "
            "or use form=loop"
        )
    return _layers(make, input, second, *others, **named)


decomposition(torch.lstm)(partial(_recurrent, Lstm))
decomposition(torch.gru)(partial(_recurrent, Gru))
decomposition(torch.rnn_tanh)(partial(_recurrent, partial(Rnn, relu=False)))
decomposition(torch.rnn_relu)(partial(_recurrent, partial(Rnn, relu=True)))


# --- cells: one step, whose loop is the user's ---------------------------------------------------


def _products(
    x: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh)


@decomposition(torch.lstm_cell)
def lstm_cell(input: Tensor, hx: Sequence[Tensor], *weights: Any) -> tuple[Tensor, Tensor]:
    h, c = hx
    inputs, hidden = _products(input, h, *weights)
    i, f, g, o = (inputs + hidden).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@decomposition(torch.gru_cell)
def gru_cell(input: Tensor, hx: Tensor, *weights: Any) -> Tensor:
    inputs, hidden = (x.chunk(3, 1) for x in _products(input, hx, *weights))
    r, z = (torch.sigmoid(x + y) for x, y in zip(inputs[:2], hidden[:2], strict=True))
    n = torch.tanh(inputs[2] + r * hidden[2])
    return (hx - n) * z + n


@decomposition(torch.rnn_tanh_cell)
def rnn_tanh_cell(input: Tensor, hx: Tensor, *weights: Any) -> Tensor:
    inputs, hidden = _products(input, hx, *weights)
    return torch.tanh(inputs + hidden)


@decomposition(torch.rnn_relu_cell)
def rnn_relu_cell(input: Tensor, hx: Tensor, *weights: Any) -> Tensor:
    inputs, hidden = _products(input, hx, *weights)
    return torch.relu(inputs + hidden)
