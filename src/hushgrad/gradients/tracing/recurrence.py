"""One recurrent layer in one direction: its steps forward, and back through time.

The steps run with the weights detached. On the way back a step's gate gradients are the state's
gradient times slopes that are known for all steps at once; only the chain itself is a loop. It
leaves the gradients of the products with each weight, at all steps in one tensor.

Tensors are [batch, t, features], with the gates of a step side by side as torch orders them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hushgrad.numerics import linear_product

_sigmoid_slope, _tanh_slope = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


class Weights(NamedTuple):
    """What a step multiplies its state by, as plain tensors."""

    hidden: Tensor  # [gates, state]
    bias: Tensor | None
    projection: Tensor | None  # [state, cell]


class Unroll(NamedTuple):
    """What a run over all steps leaves."""

    y: Tensor
    c: Tensor | None  # an LSTM's cells
    m: Tensor | None  # its output before a projection
    hidden: Tensor  # of the shape of the states' products with the weights
    kept: tuple[Tensor, ...]  # for the way back, the weight first


class UnrollBack(NamedTuple):
    """The gradients of the products with each weight, and of the first state."""

    inputs: Tensor
    hidden: Tensor
    h: Tensor
    c: Tensor | None = None
    projected: Tensor | None = None


def before(x: Tensor, start: Tensor, *, reverse: bool) -> Tensor:
    """The state that each step starts from."""
    first = start.unsqueeze(1)
    return torch.cat([x[:, 1:], first] if reverse else [first, x[:, :-1]], 1)


def _in_order(*tensors: Tensor, reverse: bool) -> list[tuple[Tensor, ...]]:
    """The steps of several tensors side by side, in the order in which they are taken."""
    steps = list(zip(*(x.unbind(1) for x in tensors), strict=True))
    return steps[::-1] if reverse else steps


@dataclass(frozen=True)
class Rnn:
    """`h' = tanh(gates)`, or relu."""

    reverse: bool
    relu: bool

    def run(self, gates: Tensor, h: Tensor, c: Tensor | None, w: Weights) -> Unroll:
        """All steps, from the inputs' products with the weights, which are written over."""
        gates = gates if w.bias is None else gates.add_(w.bias)
        y = torch.empty_like(gates)
        for gate, out in _in_order(gates, y, reverse=self.reverse):
            gate.add_(linear_product(h, w.hidden))
            h = torch.clamp(gate, min=0, out=out) if self.relu else torch.tanh(gate, out=out)
        return Unroll(y, None, None, gates, (w.hidden, y))

    def back(self, dy: Tensor, dc: Tensor | None, w: Tensor, *kept: Tensor) -> UnrollBack:
        (y,) = kept
        slopes = (y > 0).to(y.dtype) if self.relu else 1 - y * y
        _, gates, h = _chain(dy, slopes, None, w, reverse=self.reverse)
        return UnrollBack(gates, gates, h)


@dataclass(frozen=True)
class Gru:
    """`h' = (1 - z) n + z h`, where n is told by r how much of the state's product to take."""

    reverse: bool

    def run(self, gates: Tensor, h: Tensor, c: Tensor | None, w: Weights) -> Unroll:
        size, start = h.shape[-1], h
        y, hidden = gates.new_empty(*gates.shape[:2], size), torch.empty_like(gates)
        for gate, product, out in _in_order(gates, hidden, y, reverse=self.reverse):
            product.copy_(linear_product(h, w.hidden, w.bias))
            gate[:, : 2 * size].add_(product[:, : 2 * size]).sigmoid_()
            r, z, n = gate.chunk(3, 1)
            n.addcmul_(r, product[:, 2 * size :]).tanh_()
            h = torch.lerp(n, h, z, out=out)
        return Unroll(y, None, None, hidden, (w.hidden, y, gates, hidden, start))

    def back(self, dy: Tensor, dc: Tensor | None, w: Tensor, *kept: Tensor) -> UnrollBack:
        y, gates, hidden, start = kept
        r, z, n = gates.chunk(3, -1)
        slope = _tanh_slope(1 - z, n)
        by_r = _sigmoid_slope(slope * hidden.chunk(3, -1)[2], r)
        by_z = _sigmoid_slope(before(y, start, reverse=self.reverse) - n, z)
        slopes = torch.cat([by_r, by_z, slope * r], -1)
        states, products, h = _chain(dy, slopes, z, w, reverse=self.reverse)
        gates = torch.cat([*products.chunk(3, -1)[:2], slope * states], -1)
        return UnrollBack(gates, products, h)


def _chain(
    dy: Tensor, slopes: Tensor, carry: Tensor | None, w: Tensor, *, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of all states, of the gates (over the slopes), and of the first state.

    `carry` is what a state hands on to the next beside its products.
    """
    states = dy.clone()
    later = None
    for state, gate, kept in _in_order(
        states, slopes, states if carry is None else carry, reverse=not reverse
    ):
        if later is not None:
            state.add_(later)
        gate.unflatten(1, (-1, state.shape[1])).mul_(state.unsqueeze(1))
        later = (
            linear_product(gate, w.mT)
            if carry is None
            else linear_product(gate, w.mT).addcmul_(kept, state)
        )
    assert later is not None
    return states, slopes, later


@dataclass(frozen=True)
class Lstm:
    """`c' = f c + i g` and `h' = o tanh(c')`, projected or not."""

    reverse: bool

    def run(self, gates: Tensor, h: Tensor, c: Tensor | None, w: Weights) -> Unroll:
        assert c is not None
        size, start, p = c.shape[-1], c, w.projection
        gates = gates if w.bias is None else gates.add_(w.bias)
        cells, after, m = (gates.new_empty(*gates.shape[:2], size) for _ in range(3))
        y = m if p is None else gates.new_empty(*gates.shape[:2], h.shape[-1])
        steps = _in_order(gates, cells, after, m, y, reverse=self.reverse)
        for gate, cell, squashed, out, end in steps:
            gate.add_(linear_product(h, w.hidden))
            gate[:, : 2 * size].sigmoid_()
            i, f, g, o = gate.chunk(4, 1)
            c = torch.mul(f, c, out=cell).addcmul_(i, g.tanh_())
            h = torch.mul(torch.tanh(c, out=squashed), o.sigmoid_(), out=out)
            h = h if p is None else end.copy_(linear_product(h, p))
        kept = (w.hidden, gates, cells, after, start, *([] if p is None else [p]))
        return Unroll(y, cells, None if p is None else m, gates, kept)

    def back(self, dy: Tensor, dc: Tensor | None, w: Tensor, *kept: Tensor) -> UnrollBack:
        gates, cells, after, start, *projection = kept
        assert dc is not None
        i, f, g, o = gates.chunk(4, -1)
        slopes = torch.empty_like(gates)
        by_i, by_f, by_g, by_o = slopes.chunk(4, -1)
        _sigmoid_slope(g, i, grad_input=by_i)
        _sigmoid_slope(before(cells, start, reverse=self.reverse), f, grad_input=by_f)
        _tanh_slope(i, g, grad_input=by_g)
        _sigmoid_slope(after, o, grad_input=by_o)
        states, later = torch.empty_like(dy) if projection else dy, None
        for d, state, gate, cell, forget in _in_order(
            dy, states, slopes, _tanh_slope(o, after), f, reverse=not self.reverse
        ):
            dm = d if later is None else linear_product(later, w.mT).add_(d)
            if projection:
                dm = linear_product(state.copy_(dm), projection[0].mT)
            dc = torch.addcmul(dc, dm, cell)
            each = gate.unflatten(1, (4, -1))
            each[:, :3].mul_(dc.unsqueeze(1))
            each[:, 3].mul_(dm)
            later, dc = gate, dc * forget
        assert later is not None
        return UnrollBack(
            slopes, slopes, linear_product(later, w.mT), dc, states if projection else None
        )


CellKind = Rnn | Gru | Lstm


class Unrolled(torch.autograd.Function):
    """The result of a run, as a function of its products with the weights and its first state.

    The products are those of all steps: what one step does to those of the next is part of their
    gradients here, so they must come from states without a graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: CellKind,
        ran: Unroll,
        inputs: Tensor,
        hidden: Tensor,
        projected: Tensor | None,
        h: Tensor,
        c: Tensor | None,
    ) -> Any:
        ctx.kind = kind
        ctx.save_for_backward(*ran.kept)
        return ran.y if ran.c is None else (ran.y, ran.c[:, 0 if kind.reverse else -1].clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dy, dc = gradients if len(gradients) == 2 else (gradients[0], None)
        with torch.no_grad(), torch.autocast(dy.device.type, enabled=False):
            back: UnrollBack = ctx.kind.back(dy, dc, *ctx.saved_tensors)
        return None, None, back.inputs, back.hidden, back.projected, back.h, back.c
