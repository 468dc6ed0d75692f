"""Factors: what one use of a parameter leaves of its per-sample gradients.

A linear map's per-sample gradient is a sum of outer products over the positions t it was applied
at, so it need not be written out to be measured or summed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hushgrad.gradients.factors.slots import Places
from hushgrad.gradients.factors.sums import DOUBLE, is_cheap, sum_of_products, sum_of_rows


@dataclass(frozen=True)
class Dense:
    """A gradient that is written out: one tensor of the parameter's shape for each record.

    Args:
        values: the records' gradients.

    Example:
        >>> Dense(torch.ones(3, 2)).batch
        3
    """

    values: Float[Tensor, batch * shape]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def with_parts(self, parts: list[Tensor]) -> Dense:
        return Dense(*parts)

    @property
    def batch(self) -> int:
        return self.values.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def to(self, dtype: torch.dtype) -> Dense:
        return Dense(self.values.to(dtype))

    def scaled(self, factor: float) -> Dense:
        return Dense(self.values * factor)

    def at(self, places: Places) -> Dense:
        """The records at these places."""
        return Dense(self.values[places])

    def record(self, index: int) -> Tensor:
        """One record's gradient in float64."""
        return self.values[index].double()

    def materialised(self) -> Tensor:
        return self.values

    @property
    def terms(self) -> int:
        """How many rows its weighted sum adds up."""
        return self.batch

    @property
    def cheap(self) -> bool:
        """Is its weighted sum in float64 cheap? To write these out takes longer than to add."""
        return is_cheap(64, self.batch, self.values[0].numel()) if self.batch else True

    def weighted_sum(self, weights: Float[Tensor, " batch"], rows: int) -> Tensor:
        """The sum, by products of at most so many of its terms; see `rows_per_product`."""
        if self.values.dim() == 2:
            return sum_of_rows(weights, self.values, rows=rows)
        flat = self.values.reshape(self.batch, -1)
        return sum_of_rows(weights, flat, rows=rows).reshape(self.values.shape[1:])

    def masked(self, keep: Tensor) -> Dense:
        """Replace the dropped records' gradients by zero, nan included."""
        return Dense(_mask(self.values, keep))


@dataclass(frozen=True)
class Outer:
    """`sum_t b_t (x) a_t`: the gradient, of shape [p, d], of a linear map applied at positions t.

    Args:
        a: the map's inputs at each position.
        b: the gradient of the loss in the map's outputs at each position.

    Example:
        >>> Outer(torch.ones(3, 1, 2), torch.ones(3, 1, 5)).positions
        1
    """

    a: Float[Tensor, "batch t d"]
    b: Float[Tensor, "batch t p"]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.a, self.b)

    def with_parts(self, parts: list[Tensor]) -> Outer:
        return Outer(*parts)

    @property
    def batch(self) -> int:
        return self.a.shape[0]

    @property
    def positions(self) -> int:
        return self.a.shape[1]

    @property
    def transposed(self) -> Outer:
        return Outer(self.b, self.a)

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype

    def to(self, dtype: torch.dtype) -> Outer:
        return Outer(self.a.to(dtype), self.b.to(dtype))

    def scaled(self, factor: float) -> Outer:
        return Outer(self.a, self.b * factor)

    def at(self, places: Places) -> Outer:
        return Outer(self.a[places], self.b[places])

    def record(self, index: int) -> Tensor:
        return self.b[index].double().mT @ self.a[index].double()

    def materialised(self) -> Tensor:
        return torch.bmm(self.b.mT, self.a)

    @property
    def terms(self) -> int:
        return self.batch * self.positions

    @property
    def cheap(self) -> bool:
        return is_cheap(self.terms, self.b.shape[-1], self.a.shape[-1])

    def weighted_sum(self, weights: Float[Tensor, " batch"], rows: int) -> Tensor:
        # The narrower factor takes the weights: that copy is the smaller one.
        a, b = (self.a.double(), self.b.double()) if rows == DOUBLE else (self.a, self.b)
        w = weights.to(a.dtype).view(-1, 1, 1)
        a, b = (a * w, b) if a.shape[-1] < b.shape[-1] else (a, b * w)
        return sum_of_products(b.flatten(0, 1), a.flatten(0, 1), rows=rows)

    def masked(self, keep: Tensor) -> Outer:
        return Outer(_mask(self.a, keep), _mask(self.b, keep))


@dataclass(frozen=True)
class OneHot:
    """`sum_t e_index_t (x) b_t`: the gradient, of shape [rows, p], of rows looked up in a table.

    Args:
        index: the row that is looked up at each position.
        b: the gradient of the loss in the looked-up row at each position.
        rows: the number of rows of the table.

    Example:
        >>> OneHot(torch.tensor([[4, 0]]), torch.ones(1, 2, 3), rows=5).batch
        1
    """

    index: Int[Tensor, "batch t"]
    b: Float[Tensor, "batch t p"]
    rows: int

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.index, self.b)

    def with_parts(self, parts: list[Tensor]) -> OneHot:
        index, b = parts
        return replace(self, index=index, b=b)

    @property
    def batch(self) -> int:
        return self.index.shape[0]

    @property
    def positions(self) -> int:
        return self.index.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype

    def to(self, dtype: torch.dtype) -> OneHot:
        return replace(self, b=self.b.to(dtype))

    def scaled(self, factor: float) -> OneHot:
        return replace(self, b=self.b * factor)

    def at(self, places: Places) -> OneHot:
        return replace(self, index=self.index[places], b=self.b[places])

    def record(self, index: int) -> Tensor:
        table = self.b.new_zeros(self.rows, self.b.shape[-1], dtype=torch.float64)
        return table.index_add_(0, self.index[index], self.b[index].double())

    def materialised(self) -> Tensor:
        table = self.b.new_zeros(self.batch, self.rows, self.b.shape[-1])
        index = self.index.unsqueeze(-1).expand_as(self.b)
        return table.scatter_add_(1, index, self.b)

    @property
    def terms(self) -> int:
        return 1  # they are added in float64, and their sum is rounded once

    @property
    def cheap(self) -> bool:
        return False

    def weighted_sum(self, weights: Float[Tensor, " batch"], rows: int) -> Tensor:
        dtype = torch.float64 if rows == DOUBLE else self.dtype
        b = self.b.to(dtype) * weights.to(dtype)[:, None, None]
        entries, place = torch.unique(self.index.flatten(), return_inverse=True)
        # A frequent entry is added up term by term, and float32 would lose digits.
        sums = b.new_zeros(len(entries), b.shape[-1], dtype=torch.float64)
        sums.index_add_(0, place, b.flatten(0, 1).double())
        total = b.new_zeros(self.rows, b.shape[-1], dtype=dtype)
        return total.index_copy_(0, entries, sums.to(dtype))

    def masked(self, keep: Tensor) -> OneHot:
        return replace(self, b=_mask(self.b, keep))


Factor = Dense | Outer | OneHot


@dataclass(frozen=True)
class Rows:
    """The gradient of some rows of a parameter that has `total`; the others have none."""

    inner: Factor
    rows: range
    total: int

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.inner.parts

    def with_parts(self, parts: list[Tensor]) -> Rows:
        return replace(self, inner=self.inner.with_parts(parts))

    @property
    def batch(self) -> int:
        return self.inner.batch

    def scaled(self, factor: float) -> Rows:
        return replace(self, inner=self.inner.scaled(factor))

    def at(self, places: Places) -> Rows:
        return replace(self, inner=self.inner.at(places))

    def materialised(self) -> Tensor:
        return self.whole().materialised()

    def whole(self) -> Factor:
        """The same as a gradient of the whole parameter, zero in the other rows."""
        inner = self.inner
        if isinstance(inner, OneHot):
            return OneHot(inner.index + self.rows.start, inner.b, self.total)
        if isinstance(inner, Outer):  # a row of the parameter may be several of the product's
            size = inner.b.shape[-1] // len(self.rows)
            pads = (self.rows.start * size, (self.total - self.rows.stop) * size)
            return Outer(inner.a, F.pad(inner.b, pads))
        whole = inner.values.new_zeros(self.batch, self.total, *inner.values.shape[2:])
        whole[:, self.rows.start : self.rows.stop] = inner.values
        return Dense(whole)


Use = Factor | Rows
"""What one use of a parameter leaves: a factor of all of it, or of some of its rows."""


def rows_of(use: Use, start: int, count: int, total: int) -> Use:
    """What a use of `count` rows, from `start` on, is to a parameter of `total`."""
    if count == total:
        return use
    if isinstance(use, Rows):  # rows of rows
        return Rows(use.inner, range(start + use.rows.start, start + use.rows.stop), total)
    return Rows(use, range(start, start + count), total)


def _mask(x: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.view(-1, *[1] * (x.dim() - 1)), x, x.new_zeros(()))


def merge(factors: tuple[Factor, ...]) -> list[Factor]:
    """Join factors of one kind: outer products and look-ups along t, dense ones by adding."""
    joined: list[Factor] = []
    # The widest type of all: a factor in bfloat16 beside one in float32 loses nothing.
    dtype = functools.reduce(torch.promote_types, (factor.dtype for factor in factors))
    factors = tuple(factor if factor.dtype == dtype else factor.to(dtype) for factor in factors)
    outers = [f for f in factors if isinstance(f, Outer)]
    tables = [f for f in factors if isinstance(f, OneHot)]
    denses = [f for f in factors if isinstance(f, Dense)]
    if len(outers) > 1:
        a = torch.cat([f.a for f in outers], 1)
        outers = [Outer(a, torch.cat([f.b for f in outers], 1))]
    if len(tables) > 1:
        index = torch.cat([f.index for f in tables], 1)
        tables = [OneHot(index, torch.cat([f.b for f in tables], 1), tables[0].rows)]
    if len(denses) > 1:
        denses = [Dense(torch.stack([f.values for f in denses]).sum(0))]
    joined.extend((*outers, *tables, *denses))
    return joined
