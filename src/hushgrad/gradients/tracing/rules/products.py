"""Products by subscripts: einsum, and bilinear maps."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence

import torch
from torch import Tensor

from hushgrad.gradients.factors.kinds import Dense, Factor, Outer
from hushgrad.gradients.tracing.call import Call, Emitted, Saves
from hushgrad.gradients.tracing.rules.registry import torch_rule


@torch_rule("einsum")
def einsum(call: Call, equation: str, *operands: Tensor) -> Saves | None:
    return _contraction(call, equation, operands)


@torch_rule("bilinear")
def bilinear(
    call: Call, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Saves | None:
    kept: tuple[Tensor, ...] = ()
    product = None
    if call.private(input1) or call.private(input2):
        return None
    if call.private(weight):
        found = _contraction(call, "...i,...j,oij->...o", (input1, input2, weight))
        assert found is not None
        kept, product = found

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        if product is not None:
            yield from product(gradient, *kept)
        if call.private(bias):
            assert bias is not None
            yield bias, Dense(call.out.rows(gradient, call.batch).sum(1))

    return kept, emit


def _contraction(call: Call, equation: str, operands: Sequence[Tensor]) -> Saves | None:
    """One parameter among records: `Outer` where the equation is a product by a matrix."""
    terms, out, record = _spelled_out(equation, [x.dim() for x in operands])
    sizes = {
        (label, size)
        for term, x in zip(terms, operands, strict=True)
        for label, size in zip(term, x.shape, strict=True)
    }
    named = list(zip(terms, operands, strict=True))
    weights = [(term, x) for term, x in named if call.private(x)]
    others = [(term, x) for term, x in named if not call.private(x)]
    (w, weight), *more = weights
    met = set(out).union(*(term for term, _ in others))
    broadcast = any(label in w and size != weight.shape[w.index(label)] for label, size in sizes)
    if more or len(set(w)) < len(w) or not met.issuperset(w) or broadcast:
        return None  # a diagonal, a sum over the parameter alone, or a size that was stretched
    wheres = [call.layout(x) for _, x in others]
    each = [
        term if at is None else record + term for (term, _), at in zip(others, wheres, strict=True)
    ]

    def emit(gradient: Tensor, *kept: Tensor) -> Emitted:
        g = call.out.split(gradient, call.batch)
        xs = [
            x if at is None else at.split(x, call.batch) for x, at in zip(kept, wheres, strict=True)
        ]
        yield weight, _factor(w, each, out, record, xs, g)

    return tuple(x for _, x in others), emit


def _factor(w: str, terms: list[str], out: str, record: str, xs: list[Tensor], g: Tensor) -> Factor:
    into, ahead = ",".join(terms), record + "".join(label for label in out if label not in w)
    met = "".join(terms)
    summed = "".join(label for label in w if label not in out)
    made = "".join(label for label in w if label not in met)
    if not summed or not made or w not in (made + summed, summed + made):
        return Dense(torch.einsum(f"{into},{record}{out}->{record}{w}", *xs, g))
    a = _matrix(torch.einsum(f"{into}->{ahead}{summed}", *xs), len(ahead))
    b = _matrix(torch.einsum(f"{record}{out}->{ahead}{made}", g), len(ahead))
    return Outer(a, b) if w == made + summed else Outer(b, a)


def _matrix(x: Tensor, ahead: int) -> Tensor:
    """As [batch, t, d]: the first `ahead` dimensions are the records and the positions."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:ahead]), math.prod(x.shape[ahead:]))


def _spelled_out(equation: str, ranks: list[int]) -> tuple[list[str], str, str]:
    """Each operand's labels and the output's, without dots, and a label that is free."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    letters = left.replace("...", "").replace(",", "")
    if not arrow:
        out = "..." + "".join(sorted(c for c in letters if letters.count(c) == 1))
    record, *spare = (c for c in string.ascii_letters if c not in equation)
    widths = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    dots = "".join(spare[: max(widths)])
    spelled = [
        term.replace("...", dots[len(dots) - width :])
        for term, width in zip(terms, widths, strict=True)
    ]
    return spelled, out.replace("...", dots), record
