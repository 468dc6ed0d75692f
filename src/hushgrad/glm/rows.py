"""The feature rows x of all records, scaled once to a stated bound, with their norms.

A record's score must be bit-identical whatever the other records are. Kernels choose the order of
their sums by the shape of the matrix, so rows are padded with zeros to multiples of 64, columns of
θ to multiples of 8, and processed in parts of at most 1024; scipy's sparse products go row by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64
from numpy import ndarray
from scipy import sparse
from torch import Tensor

from hushgrad.numerics import square_norms

MULTIPLE = 64
"""Parts have a multiple of this many rows; the last ones may be zeros.

Elementwise functions such as a sigmoid process 16 entries at a time and the remaining ones
singly, with other instructions that round differently; a multiple of 8 was measured to be too few.
"""

_COLUMNS = 8  # θ is padded to a multiple of this many columns

PART = 1024
"""The largest number of records that are processed at once."""

LONGEST = 1 + 2.0**-40
"""An upper bound on the norm of a row that was scaled to norm 1."""


@runtime_checkable
class RowSource(Protocol):
    """Rows of features: `count` records, followed by rows of zeros."""

    @property
    def count(self) -> int:
        """How many records there are."""

    @property
    def width(self) -> int:
        """The number of columns, including the constant for the intercept."""

    @property
    def sq_norms(self) -> Float64[Tensor, " padded"]:
        """Upper bounds on ‖x‖², including the padding."""

    def take(self, positions: slice | ndarray) -> RowSource:
        """Return the rows at these positions; a slice must begin at a multiple of `MULTIPLE`."""

    def scores(self, theta: Float64[Tensor, "classes width"]) -> Float64[Tensor, "padded classes"]:
        """Return <θ_k, x> for every row and class."""

    def combine(
        self, weights: Float64[Tensor, "padded classes"]
    ) -> Float64[Tensor, "classes width"]:
        """Return Σ weight·x for every class."""

    def gram(self, weights: Float64[Tensor, " padded"]) -> Float64[Tensor, "width width"]:
        """Return Σ weight·xxᵀ."""


@dataclass(frozen=True)
class DenseRows:
    """Rows in a tensor, padded to a multiple of `MULTIPLE`; the last row is always zeros."""

    x: Float64[Tensor, "padded width"]
    sq_norms: Float64[Tensor, " padded"]
    count: int

    @property
    def width(self) -> int:
        return self.x.shape[1]

    def take(self, positions: slice | ndarray) -> DenseRows:
        if isinstance(positions, slice):
            start, stop, _ = positions.indices(self.count)
            if stop < self.count and (stop - start) % MULTIPLE:  # the padding would be records
                return self.take(np.arange(start, stop))
            cut = slice(start, start + _padded(stop - start))
            return DenseRows(self.x[cut], self.sq_norms[cut], stop - start)
        padded = np.full(_padded(len(positions)), len(self.x) - 1)
        padded[: len(positions)] = positions
        index = torch.from_numpy(padded)
        return DenseRows(
            self.x.index_select(0, index), self.sq_norms.index_select(0, index), len(positions)
        )

    def scores(self, theta: Tensor) -> Tensor:
        if len(self.x) <= PART:
            return scores_of(self.x, theta)
        return torch.cat([scores_of(part, theta) for part in self.x.split(PART)])

    def combine(self, weights: Tensor) -> Tensor:
        return weights.T @ self.x

    def gram(self, weights: Tensor) -> Tensor:
        return self.x.T @ (weights[:, None] * self.x)


@dataclass(frozen=True)
class SparseRows:
    """Rows in a scipy CSR matrix, which need no padding."""

    x: Any
    sq_norms: Float64[Tensor, " padded"]

    @property
    def count(self) -> int:
        return int(self.x.shape[0])

    @property
    def width(self) -> int:
        return int(self.x.shape[1])

    def take(self, positions: slice | ndarray) -> SparseRows:
        if isinstance(positions, slice):
            return SparseRows(self.x[positions], self.sq_norms[positions])
        return SparseRows(self.x[positions], self.sq_norms[torch.from_numpy(positions)])

    def scores(self, theta: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.x @ theta.numpy().T))

    def combine(self, weights: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray((self.x.T @ weights.numpy()).T))

    def gram(self, weights: Tensor) -> Tensor:
        weighted = self.x.multiply(weights.numpy()[:, None]).tocsr()
        return torch.from_numpy((self.x.T @ weighted).toarray())


def scores_of(
    x: Float[Tensor, "n width"], theta: Float[Tensor, "classes width"]
) -> Float[Tensor, "n classes"]:
    """Return <θ_k, x>, bit-identical for a row whatever the other rows are.

    One kernel serves every shape: with 3 columns, or transposed ones, the rounding would depend on
    the number of rows.
    """
    if len(theta) == 1:
        return x.mv(theta[0])[:, None]
    columns = theta.new_zeros(theta.shape[1], -(-len(theta) // _COLUMNS) * _COLUMNS)
    columns[:, : len(theta)] = theta.T
    return (x @ columns)[:, : len(theta)]


def scaled_rows(features: Any, *, feature_norm: float, intercept: float = 0.0) -> RowSource:
    """Divide rows by `feature_norm`, scale longer ones to norm 1, and append a constant.

    A row that is not finite, or whose squared norm is not, becomes 0 and contributes nothing.

    Args:
        features: an array, a tensor or a scipy sparse matrix.
        feature_norm: the user's statement of how long a row can be; never computed from the data.
        intercept: the constant to append; 0 appends none.
    """
    if not (math.isfinite(feature_norm) and feature_norm > 0):
        raise ValueError(
            f"expected feature_norm > 0 and finite, got {feature_norm}; state how long a row of "
            "features can be, without looking at the data"
        )
    if sparse.issparse(features):
        return _sparse(features, feature_norm, intercept)
    x = torch.as_tensor(features, dtype=torch.float64)
    records, width = x.shape
    padded = x.new_zeros(_padded(records + 1), width + (intercept != 0))
    for start in range(0, records, PART):
        part = x[start : start + PART] / feature_norm
        finite = part.isfinite().all(1)
        factor = torch.where(finite, _shortening(torch.where(finite[:, None], part, 0.0)), 0.0)
        row = padded[start : start + len(part)]
        row[:, :width] = torch.where(finite[:, None], part, 0.0) * factor[:, None]
        if intercept:
            row[:, width] = intercept * (factor > 0).double()  # float · bool would be a float32
    return DenseRows(padded, square_norms(padded).upper, records)


def _shortening(part: Float64[Tensor, "n p"]) -> Float64[Tensor, " n"]:
    """Return each row's factor: 1, or 1 ÷ its norm if that is above 1."""
    return square_norms(part).upper.sqrt().clamp(min=1.0).reciprocal()


def _sparse(features: Any, feature_norm: float, intercept: float) -> SparseRows:
    x = sparse.csr_array(features, dtype=np.float64, copy=True)
    x.sum_duplicates()  # norms are computed from stored entries, which must be unique
    with np.errstate(over="ignore"):
        x.data /= feature_norm
    bad = np.zeros(x.shape[0], dtype=bool)
    bad[np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))[~np.isfinite(x.data)]] = True
    x.data[~np.isfinite(x.data)] = 0.0
    factor = 1 / np.maximum(np.sqrt(_sparse_squares(x)), 1.0)
    factor[bad | ~np.isfinite(factor)] = 0.0
    x.data *= np.repeat(factor, np.diff(x.indptr))
    if intercept:
        ones = sparse.csr_array(intercept * (factor > 0)[:, None])
        x = sparse.csr_array(sparse.hstack([x, ones], format="csr"))
    return SparseRows(x, torch.from_numpy(_sparse_squares(x)))


def _sparse_squares(x: Any) -> Float64[ndarray, " n"]:
    """Return upper bounds on the rows' squared norms, added one by one and rounded up."""
    squares, places = np.zeros(x.shape[0]), np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))
    with np.errstate(over="ignore"):
        np.add.at(squares, places, np.square(x.data))
    entries = np.diff(x.indptr)  # per row, so that a bound does not depend on other records
    lost = entries * float(np.finfo(np.float64).tiny)
    upper: Float64[ndarray, " n"] = squares * (1 + (entries + 8) * 2.0**-53) + lost
    return upper


def _padded(count: int) -> int:
    return -(-count // MULTIPLE) * MULTIPLE
