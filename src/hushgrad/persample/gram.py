"""Norms from inner products of a gradient's factors, with a bound on their rounding error."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hushgrad.numerics import inner_products, raw_square_norms, rounding
from hushgrad.persample.factors import OneHot, Outer


class GramSquare(NamedTuple):
    """Squared norms of a sum of factors, [batch], and what they can be trusted for."""

    estimate: Tensor
    slack: Tensor  # a bound on the estimate's error
    length: Tensor  # S = sum_t |a_t| |b_t|
    largest: Tensor  # no entry of a factor is above this


def gram_square(factors: tuple[Outer | OneHot, ...]) -> GramSquare:
    """Squared norms by inner products of rows.

    With chunks of c columns in a type of roundoff u, each inner product errs by at most
    c·u·|x||y|, so the square errs by at most (c_a + c_b + 2)·u·S², for c up to 2048 (16 more
    cover `square_norms`, which takes over at t = 1); products that underflow add at most the
    smallest normal number for each column.
    """
    return nothing_lost_at_zero(raw_gram_square(factors), factors)


def raw_gram_square(factors: tuple[Outer | OneHot, ...]) -> GramSquare:
    """The same without a look at any value, as a compiled program needs it."""
    if len(factors) == 1 and isinstance(factors[0], Outer) and factors[0].positions == 1:
        return _outer_product_square(factors[0])
    chunk = _chunk(sum(factor.positions for factor in factors))
    estimate = length = lost = largest = None
    columns = 0
    for i, factor in enumerate(factors):
        left, right = _grams(factor, chunk)
        term = (left * right).sum((1, 2))
        a, b = (gram.diagonal(dim1=1, dim2=2).clamp_min(0) for gram in (left, right))
        d, p, tiny = width_of(factor), factor.b.shape[-1], torch.finfo(factor.b.dtype).tiny
        a, b = (a + d * tiny).sqrt(), (b + p * tiny).sqrt()
        size, top = (a * b).sum(1), torch.maximum(a, b).sum(1)
        flushed = tiny * (d * b.sum(1).square() + p * a.sum(1).square())
        for other in factors[:i]:
            term = term + 2 * _cross(other, factor, chunk)
        estimate = term if estimate is None else estimate + term
        length = size if length is None else length + size
        lost = flushed if lost is None else lost + flushed
        largest = top if largest is None else torch.maximum(largest, top)
        columns = max(columns, min(chunk, d) + min(chunk, p) + 18)
    assert estimate is not None and length is not None
    assert lost is not None and largest is not None
    u = rounding(factors[0].b.dtype)
    # Two uses also underflow against each other; 2·count bounds the mixed terms by the own ones.
    slack = columns * u * length.square() + 2 * len(factors) * lost
    return GramSquare(estimate, slack, length, largest)


def nothing_lost_at_zero(found: GramSquare, factors: tuple[Outer | OneHot, ...]) -> GramSquare:
    """A gradient that is zero exactly has no slack."""
    if bool(found.estimate.all()):
        return found
    gone = torch.stack([_is_zero(factor) for factor in factors]).all(0)
    slack, length = (part.masked_fill(gone, 0) for part in (found.slack, found.length))
    return found._replace(slack=slack, length=length)


def _outer_product_square(factor: Outer) -> GramSquare:
    """One position: `|b (x) a|² = |b|² |a|²`, in which nothing cancels."""
    (a, slack_a), (b, slack_b) = raw_square_norms(factor.a), raw_square_norms(factor.b)
    estimate = a * b
    slack = slack_a * (b + slack_b) + a * slack_b + 4 * rounding(a.dtype) * estimate
    largest = torch.maximum(a + slack_a, b + slack_b).sqrt()
    return GramSquare(estimate, slack, estimate.sqrt(), largest)


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
    same = factor.index.unsqueeze(1) == factor.index.unsqueeze(2)
    return same.to(torch.float64), right


def _gram(x: Tensor, chunk: int) -> Tensor:
    if x.shape[1] == 1:
        return raw_square_norms(x).estimate[:, None, None]
    recent = _recent.get()
    if recent is None:
        return inner_products(x, x, chunk)
    rows = (x.data_ptr(), x.dtype, x.shape, x.stride(), chunk)
    for known, _, gram in recent:
        if known == rows:
            return gram
    gram = inner_products(x, x, chunk)
    recent.append((rows, x, gram))
    return gram


# Rows, a tensor that keeps their memory from being used again, and their inner products.
_Recent = deque[tuple[tuple[Any, ...], Tensor, Tensor]]
_recent: ContextVar[_Recent | None] = ContextVar("_recent", default=None)


@contextmanager
def sharing_rows() -> Iterator[None]:
    """Inside, rows that parameters have in common are multiplied once.

    Such are a recurrent layer's gates, or the input of queries, keys and values. The last few are
    enough, since parameters that share them follow one another.
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
        left, right = inner_products(f.a, g.a, chunk), inner_products(f.b, g.b, chunk)
        return (left * right).sum((1, 2))
    outer, table = (f, g) if isinstance(f, Outer) else (g, f)
    assert isinstance(outer, Outer) and isinstance(table, OneHot)
    # <b_s (x) a_s, e_i (x) g_t> = b_s[i] · <a_s, g_t>: one gather and one product.
    index = table.index.unsqueeze(1).expand(-1, outer.positions, -1)
    picked = outer.b.gather(2, index)
    return (inner_products(outer.a, table.b, chunk) * picked).sum((1, 2))
