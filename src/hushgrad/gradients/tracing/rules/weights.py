"""Weights made from parameters: how a factor that reached one goes back to what it was made of.

`G = sum_t b_t (x) a_t` stays factored through a cast, a transpose, a sum, a number and a product:
for `W = L R` the gradients are `G R^T = sum_t b_t (x) (R a_t)` and `L^T G`. So the two factors of a
low-rank update are never paid for at the size of the weight that they update.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hushgrad.gradients.factors.kinds import Dense, Factor, OneHot, Outer, Rows, Use, rows_of
from hushgrad.gradients.tracing.call import Back, Call
from hushgrad.gradients.tracing.calls import first_row
from hushgrad.gradients.tracing.rules.lookup import fixed_lookup
from hushgrad.numerics import wide

_CASTS = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"}
)
_PRODUCTS = frozenset({"matmul", "mm", "rmatmul"})


def keep_as_factors(call: Call, args: Any, kwargs: Any) -> tuple[Tensor, Back] | None:
    """A function of parameters that is kept as factors of its operands, or None."""
    if call.function is F.linear:
        return _linear(call, *args, **kwargs)
    return fixed_lookup(call, args, kwargs)


def _linear(
    call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Back]:
    """A table that the records meet only later, as relative positions are projected."""
    x, w, b = (_value(call, operand) for operand in (input, weight, bias))

    def back(factor: Use) -> list[tuple[Tensor, Use]]:
        g = factor.materialised().reshape(call.batch, -1, weight.shape[0])
        found: list[tuple[Tensor, Use]] = []
        if call.private(weight):
            rows = wide(x).reshape(-1, weight.shape[1])
            found.append((weight, Outer(rows.expand(call.batch, -1, -1), g)))
        if call.private(bias):
            assert bias is not None
            found.append((bias, Dense(g.sum(1))))
        if call.private(input):
            found.append((input, Dense((g @ w.to(g.dtype)).reshape(call.batch, *input.shape))))
        return found

    return F.linear(x, w, b), back


def back(call: Call, name: str, result: Tensor) -> Back | None:
    """The way back through an operation on parameters that keeps a factor factored."""
    args, kwargs = call.arguments
    bare = name.strip("_")
    if call.private(args[0] if args else None):
        value = call.value(args[0])
        if (name in _CASTS and result.shape == value.shape) or _same_rows(result, value):
            return lambda factor: [(args[0], _reshape(factor, value))]
        # A slice of rows: the factor is of those rows, and of no others.
        start = first_row(result, value)
        if start is not None:
            return lambda factor: [(args[0], rows_of(factor, start, len(result), len(value)))]
        if value.dim() == 2 and _same_rows(result, value.mT):
            return lambda f: [(args[0], f.transposed)] if isinstance(f, Outer) else None
    if len(args) != 2 or kwargs.keys() - {"alpha"}:
        return None
    if bare in _PRODUCTS and all(isinstance(x, Tensor) and x.dim() == 2 for x in args):
        left, right = reversed(args) if bare == "rmatmul" else args
        return lambda factor: _product(call, left, right, factor)
    terms = _terms(bare, args, kwargs.get("alpha", 1))
    operands = [(x, scale) for x, scale in terms if call.private(x)]
    if not operands or any(x.shape != result.shape for x, _ in operands):
        return None
    return lambda factor: [(x, factor.scaled(scale)) for x, scale in operands]


def _terms(bare: str, args: Any, alpha: float) -> list[tuple[Any, float]]:
    """The operands of a sum, or of a product with a number, each with what it is multiplied by."""
    one, other = args
    if bare in ("add", "radd"):
        return [(one, 1), (other, alpha)]
    if bare in ("sub", "subtract"):
        return [(one, 1), (other, -alpha)]
    if bare == "rsub":
        return [(one, -alpha), (other, 1)]
    number = other if isinstance(one, Tensor) else one
    if not isinstance(number, int | float):
        return []
    if bare in ("mul", "multiply", "rmul"):
        return [(one, number), (other, number)]
    return [(one, 1 / number)] if bare in ("div", "divide", "truediv", "true_divide") else []


def _product(
    call: Call, left: Tensor, right: Tensor, factor: Use
) -> list[tuple[Tensor, Use]] | None:
    """What a factor of `left @ right` says of both."""
    # A product would make it as large as the weight: better written out once, and pulled.
    if isinstance(factor, Dense | Rows):
        return None
    ls, rs = (_value(call, x).to(factor.dtype) for x in (left, right))
    of_left: Factor
    if isinstance(factor, OneHot):  # the rows of the left operand that were looked up
        of_left = OneHot(factor.index, factor.b @ rs.mT, factor.rows)
        of_right = Outer(factor.b, ls[factor.index])
    else:
        of_left, of_right = Outer(factor.a @ rs.mT, factor.b), Outer(factor.a, factor.b @ ls)
    both = ((left, of_left), (right, of_right))
    return [(operand, of_it) for operand, of_it in both if call.private(operand)]


def _value(call: Call, x: Any) -> Any:
    return call.value(x) if call.private(x) else x


def _same_rows(result: Tensor, value: Tensor) -> bool:
    """Is `result` this very tensor, its rows perhaps in another shape?"""
    if result.dim() < 2 or result.data_ptr() != value.data_ptr():
        return False
    if result.shape == value.shape:
        return result.stride() == value.stride()
    whole = result.is_contiguous() and value.is_contiguous() and result.numel() == value.numel()
    return whole and value.dim() >= 2 and result.shape[0] == value.shape[0]


def _reshape(factor: Use, value: Tensor) -> Use:
    return Dense(factor.values.reshape(-1, *value.shape)) if isinstance(factor, Dense) else factor
