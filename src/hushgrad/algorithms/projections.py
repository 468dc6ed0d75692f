"""Projections: the nearest vector in a set, for all parameters as one vector.

They read released values alone and cost no privacy. They can cost utility: with a projection the
excess risk of clipped DP-GD depends on the dimension again.
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
    """Project the parameters onto the vectors of norm at most `radius`.

    Args:
        radius: the largest norm.

    Raises:
        ValueError: if the radius is not positive and finite.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> Ball(1.0)({"weight": weight})
        >>> weight.data
        tensor([0.6000, 0.8000])
    """

    radius: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.radius) and self.radius > 0):
            raise ValueError(f"expected radius > 0 and finite, got {self.radius}; leave it out")

    def __call__(self, params: Params) -> None:
        size = torch.linalg.vector_norm
        # At x = 0 the quotient is infinite, which clamp turns into 1.
        _moved(params, lambda x: x * torch.clamp(self.radius / size(x), max=1.0))


@dataclass(frozen=True)
class Box:
    """Project the parameters onto the vectors whose entries are between `low` and `high`.

    Args:
        low: the least entry.
        high: the largest entry.

    Raises:
        ValueError: if `low` is above `high`.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([-2.0, 0.5]))
        >>> Box(-1.0, 1.0)({"weight": weight})
        >>> weight.data
        tensor([-1.0000,  0.5000])
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"expected low <= high, got {self.low} and {self.high}; swap them")

    def __call__(self, params: Params) -> None:
        _moved(params, lambda x: x.clamp(self.low, self.high))


@dataclass(frozen=True)
class Simplex:
    """Project the parameters onto the vectors without negative entries that sum to `total`.

    Args:
        total: the sum of the entries.

    Raises:
        ValueError: if the total is not positive and finite.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 0.5, -1.0]))
        >>> Simplex()({"weight": weight})
        >>> weight.data
        tensor([0.7500, 0.2500, 0.0000])

    Reference: Duchi et al. 2008, Efficient Projections onto the l1-Ball.
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.total) and self.total > 0):
            raise ValueError(f"expected total > 0 and finite, got {self.total}; 1.0 is usual")

    def __call__(self, params: Params) -> None:
        _moved(params, self._nearest)

    def _nearest(self, x: Vector) -> Vector:
        # The largest entries are shifted by a common amount, all others become 0.
        ordered = x.sort(descending=True).values
        excess = ordered.cumsum(0) - self.total
        count = torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device)
        last = int((ordered - excess / count > 0).nonzero()[-1])
        return (x - excess[last] / count[last]).clamp(min=0.0)


@dataclass(frozen=True, eq=False)
class Affine:
    """Project the parameters onto the solutions θ of `matrix` · θ = `target`.

    Args:
        matrix: a public matrix, of any rank.
        target: a public vector, one entry for each row.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> Affine(torch.ones(1, 2).double(), torch.ones(1).double())({"weight": weight})
        >>> weight.data
        tensor([0.5000, 0.5000])
    """

    matrix: Float64[Tensor, "rows entries"]
    target: Float64[Tensor, " rows"]

    def __call__(self, params: Params) -> None:
        # The pseudo-inverse gives the nearest solution, also where rows depend on each other.
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
    """Replace the parameters by `nearest` of them, all as one vector in float64."""
    with torch.no_grad():
        # One vector: the nearest point of a set is not found parameter by parameter.
        whole = torch.cat([p.detach().double().flatten() for p in params.values()])
        pieces = nearest(whole).split([p.numel() for p in params.values()])
        for p, piece in zip(params.values(), pieces, strict=True):
            p.copy_(piece.reshape(p.shape))
