"""Norms from inner products of a gradient's factors, with a bound on their rounding error."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hushgrad.gradients.factors.kinds import OneHot, Outer
from hushgrad.numerics import Square, inner_products, raw_square_norms, rounding, smallest_normal


class Rough(NamedTuple):
    """Squared norms, [batch], before any was looked at, and what can be said against them."""

    estimate: Tensor
    slack: Tensor  # a bound on the estimate's error
    length: Tensor | None = None  # S = sum_t |a_t| |b_t|, where factors may cancel
    largest: Tensor | None = None  # the square of no entry of a factor is above this

    @property
    def square(self) -> Square:
        return Square(self.estimate, self.slack)

    @property
    def lengths(self) -> Tensor:
        """S, which is the norm where nothing can cancel."""
        return self.square.upper.sqrt() if self.length is None else self.length


def gram_square(factors: tuple[Outer | OneHot, ...]) -> Rough:
    """Squared norms by inner products of rows.

    With chunks of c columns in a type of roundoff u, each inner product errs by at most
    c·u·|x||y|, so the square errs by at most (c_a + c_b + 2)·u·S², for c up to 2048 (16 more
    cover `square_norms`, which takes over at t = 1); products that underflow add at most the
    smallest normal number for each column.
    """
    # Most layers of most models: then the square is a product of two, and nothing cancels.
    if len(factors) == 1 and isinstance(factors[0], Outer) and factors[0].positions == 1:
        return _outer_product_square(factors[0])
    chunk = _chunk(sum(factor.positions for factor in factors))
    estimate = length = lost = largest = None
    columns = 0
    for i, factor in enumerate(factors):
        left, right = _grams(factor, chunk)
        # Σ_st <a_s, a_t><b_s, b_t>, the square of Σ_t b_t ⊗ a_t without its matrix.
        term = (left * right).sum((1, 2))
        a, b = (gram.diagonal(dim1=1, dim2=2).clamp_min(0) for gram in (left, right))
        d, p, tiny = width_of(factor), factor.b.shape[-1], smallest_normal(factor.b.dtype)
        # Rounded up: a length that underflows to zero would hide what its products have lost.
        a, b = (a + d * tiny).sqrt(), (b + p * tiny).sqrt()
        size, top = (a * b).sum(1), torch.maximum(a, b).sum(1)
        flushed = tiny * (d * b.sum(1).square() + p * a.sum(1).square())
        # A parameter that is used twice has mixed terms, each once above and once below.
        for other in factors[:i]:
            term = term + 2 * _cross(other, factor, chunk)
        estimate = term if estimate is None else estimate + term
        length = size if length is None else length + size
        lost = flushed if lost is None else lost + flushed
        largest = top if largest is None else torch.maximum(largest, top)
        # 18: the 2 of the bound above, and the 16 that cover `square_norms`.
        columns = max(columns, min(chunk, d) + min(chunk, p) + 18)
    assert estimate is not None and length is not None
    assert lost is not None and largest is not None
    u = rounding(factors[0].b.dtype)
    # Two uses also underflow against each other; 2·count bounds the mixed terms by the own ones.
    slack = columns * u * length.square() + 2 * len(factors) * lost
    return Rough(estimate, slack, length, largest.square())


def exact_where_zero(rough: Rough, factors: tuple[Outer | OneHot, ...]) -> Rough:
    """A gradient that is zero exactly has no slack."""
    if bool(rough.estimate.all()):
        return rough
    # Only a product with an exact zero on either side is zero without rounding.
    gone = torch.stack([_is_zero(factor) for factor in factors]).all(0)
    length = None if rough.length is None else rough.length.masked_fill(gone, 0)
    return rough._replace(slack=rough.slack.masked_fill(gone, 0), length=length)


def _outer_product_square(factor: Outer) -> Rough:
    """One position: `|b (x) a|² = |b|² |a|²`, in which nothing cancels."""
    (a, slack_a), (b, slack_b) = norms_of(factor.a), norms_of(factor.b)
    estimate, most_a, most_b = a * b, a + slack_a, b + slack_b
    most = most_a * most_b
    # Each of these five results is rounded once.
    slack = (most - estimate).add_(most, alpha=8 * rounding(most.dtype))
    return Rough(estimate, slack, None, most_a + most_b)


def _chunk(positions: int) -> int:
    """Columns to a chunk: with κ² up to T, as seen on transformers, the slack stays near 1 %."""
    columns = 80_000 // max(positions, 1)
    return min(256, max(32, 1 << columns.bit_length() - 1 if columns else 32))


def width_of(factor: Outer | OneHot) -> int:
    """The columns of a factor's left side; an index has one."""
    return factor.a.shape[-1] if isinstance(factor, Outer) else 1


def _is_zero(factor: Outer | OneHot) -> Tensor:
    zero = (factor.b == 0).flatten(1).all(1)
    return zero | (factor.a == 0).flatten(1).all(1) if isinstance(factor, Outer) else zero


def _grams(factor: Outer | OneHot, chunk: int) -> tuple[Tensor, Tensor]:
    right = _gram(factor.b, chunk)
    if isinstance(factor, Outer):
        return _gram(factor.a, chunk), right
    # Rows of a table are orthogonal unless they are the same row.
    same = factor.index.unsqueeze(1) == factor.index.unsqueeze(2)
    return same.to(torch.float64), right


def _gram(x: Tensor, chunk: int) -> Tensor:
    # One position: its Gram matrix is one number, which other parameters may share.
    if x.shape[1] == 1:
        return norms_of(x).estimate[:, None, None]
    gram: Tensor = _once(lambda x: inner_products(x, x, chunk), x, chunk)
    return gram


def norms_of(x: Tensor) -> Square:
    """Squared norms of vectors that parameters may have in common; they are not to be written."""
    square: Square = _once(raw_square_norms, x.reshape(x.shape[0], -1), 0)
    return square


def _once(function: Callable[[Tensor], Any], x: Tensor, chunk: int) -> Any:
    recent = _recent.get()
    if recent is None:
        return function(x)
    # By address: views of one tensor are made anew for each parameter that shares it.
    rows = (x.data_ptr(), x.dtype, x.shape, x.stride(), chunk)
    for known, _, result in recent:
        if known == rows:
            return result
    result = function(x)
    recent.append((rows, x, result))
    return result


# Rows, a tensor that keeps their memory from being used again, and what was made of them.
_Recent = deque[tuple[tuple[Any, ...], Tensor, Any]]
_recent: ContextVar[_Recent | None] = ContextVar("_recent", default=None)


@contextmanager
def share_rows() -> Iterator[None]:
    """Inside, rows that parameters have in common are multiplied once.

    Such are a recurrent layer's gates, the input of queries, keys and values, or the gradients of a
    layer's output, which a bias has by itself. The last few are enough, since parameters that share
    them follow one another.
    """
    token = _recent.set(deque(maxlen=4))
    try:
        yield
    finally:
        _recent.reset(token)


def _cross(f: Outer | OneHot, g: Outer | OneHot, chunk: int) -> Tensor:
    """The inner product of two gradients of one parameter."""
    if isinstance(f, OneHot) and isinstance(g, OneHot):
        same = f.index.unsqueeze(2) == g.index.unsqueeze(1)
        return (inner_products(f.b, g.b, chunk) * same).sum((1, 2))
    if isinstance(f, Outer) and isinstance(g, Outer):
        # <Σ_s b_s ⊗ a_s, Σ_t b'_t ⊗ a'_t> = Σ_st <a_s, a'_t><b_s, b'_t>.
        left, right = inner_products(f.a, g.a, chunk), inner_products(f.b, g.b, chunk)
        return (left * right).sum((1, 2))
    outer, table = (f, g) if isinstance(f, Outer) else (g, f)
    assert isinstance(outer, Outer) and isinstance(table, OneHot)
    # <b_s (x) a_s, e_i (x) g_t> = b_s[i] · <a_s, g_t>: one gather and one product.
    index = table.index.unsqueeze(1).expand(-1, outer.positions, -1)
    picked = outer.b.gather(2, index)
    return (inner_products(outer.a, table.b, chunk) * picked).sum((1, 2))
