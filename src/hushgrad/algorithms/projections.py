"""Projections: the nearest point of a set, for all parameters as one vector.

They read released values alone and cost nothing. What they cost in utility is another matter: with
a projection the excess risk of clipped DP-GD depends on the dimension again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from hushgrad.types import Params

Vector = Float64[Tensor, " entries"]


@dataclass(frozen=True)
class Ball:
    """All points of norm at most `radius`."""

    radius: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.radius) and self.radius > 0):
            raise ValueError(f"expected radius > 0 and finite, got {self.radius}; leave it out")

    def __call__(self, params: Params) -> None:
        size = torch.linalg.vector_norm
        _moved(params, lambda x: x * torch.clamp(self.radius / size(x), max=1.0))


@dataclass(frozen=True)
class Box:
    """All points with every entry between `low` and `high`."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"expected low <= high, got {self.low} and {self.high}; swap them")

    def __call__(self, params: Params) -> None:
        _moved(params, lambda x: x.clamp(self.low, self.high))


@dataclass(frozen=True)
class Simplex:
    """All points with no entry below 0, whose entries add up to `total`.

    Reference: Duchi et al. 2008, Efficient Projections onto the l1-Ball.
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.total) and self.total > 0):
            raise ValueError(f"expected total > 0 and finite, got {self.total}; 1.0 is usual")

    def __call__(self, params: Params) -> None:
        _moved(params, self._nearest)

    def _nearest(self, x: Vector) -> Vector:
        ordered = x.sort(descending=True).values
        excess = ordered.cumsum(0) - self.total
        count = torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device)
        last = int((ordered - excess / count > 0).nonzero()[-1])
        return (x - excess[last] / count[last]).clamp(min=0.0)


@dataclass(frozen=True, eq=False)
class Affine:
    """All points θ with `matrix` · θ = `target`; the matrix is public, and may lose rank."""

    matrix: Float64[Tensor, "rows entries"]
    target: Float64[Tensor, " rows"]

    def __call__(self, params: Params) -> None:
        solve = torch.linalg.pinv(self.matrix)

        def nearest(x: Vector) -> Vector:
            off: Vector = solve @ (self.matrix @ x.cpu() - self.target)
            return x - off.to(x.device)

        _moved(params, nearest)

    def __repr__(self) -> str:
        data = self.matrix.numpy().tobytes() + self.target.numpy().tobytes()
        return (
            f"Affine({len(self.target)} rows, {hashlib.blake2b(data, digest_size=8).hexdigest()})"
        )


def _moved(params: Params, nearest: Callable[[Vector], Vector]) -> None:
    """Put the parameters where `nearest` says, all of them as one vector in float64."""
    with torch.no_grad():
        whole = torch.cat([p.detach().double().flatten() for p in params.values()])
        pieces = nearest(whole).split([p.numel() for p in params.values()])
        for p, piece in zip(params.values(), pieces, strict=True):
            p.copy_(piece.reshape(p.shape))
