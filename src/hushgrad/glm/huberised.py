"""The loss that clipped gradient descent minimises, when the model is linear.

A clipping rule turns a gradient ℓ'(z)x into φ(ℓ'(z)‖x‖)·x/‖x‖, with φ(u) = w(|u|)·u and w the
rule's weight. That is the gradient of another loss of the same score,

    g(z) = ∫ φ(ℓ'(t)‖x‖)/‖x‖ dt,

and g is convex whenever ℓ is convex and φ increasing. For Abadi's rule it is the Huberised loss:
ℓ between two knots and straight beyond. For AUTO-S φ(u) = Ru/(|u| + γ), for AUTO-V R·sign(u). So
what a rule and a norm really optimise can be seen before anything is spent. For several classes
there is no such loss: the field of clipped softmax gradients is no gradient field.

Reference: clipped DP-GD, Lemma 3.1 for Abadi's rule, and Theorem 3.3 for softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from scipy.optimize import minimize
from torch import Tensor

from hushgrad.clipping.rules import Clip
from hushgrad.glm.losses import ScoreLoss

_FAR = 2.0**60  # a knot beyond this counts as infinite
_HALVINGS = 120  # from ±2⁶⁰ down to the last bit
_STRAIGHT = ("abadi", "reparameterized")  # φ is a multiple of u up to R and constant beyond


@dataclass(frozen=True)
class Huberised:
    """A convex loss of a score, as a clipping rule changes it for a record of norm ‖x‖."""

    loss: ScoreLoss
    clip: Clip

    def __post_init__(self) -> None:
        if self.loss.vector or not self.loss.convex:
            raise ValueError(
                f"expected a convex loss of one score, got {self.loss}; clipped gradients of "
                "several scores are no gradient of anything, and other losses have no knots"
            )
        if not isinstance(self.clip.clip_norm, int | float):
            raise ValueError(
                f"expected one clipping norm, got {self.clip.clip_norm}; a score has one group"
            )

    def phi(self, u: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
        """φ(u) = w(|u|)·u, the rule on signed norms u = ℓ'(z)‖x‖."""
        return self.clip.weights(u.abs()[:, None])[:, 0] * u

    @property
    def convex(self) -> bool:
        """Whether φ increases, looked up on a grid; `discard` does not."""
        sizes = 2.0 ** torch.arange(-40, 40, 0.25, dtype=torch.float64)
        return bool((self.phi(sizes).diff() >= -1e-12 * self.clip.bound(1)).all())

    def derivative(
        self, z: Float64[Tensor, " n"], y: Tensor, norms: Float64[Tensor, " n"]
    ) -> Float64[Tensor, " n"]:
        """g'(z) for records of these norms: what clipping leaves of ℓ'(z)."""
        slope = self.loss.derivative(z, y)
        weights = self.clip.weights((slope.abs() * norms)[:, None])[:, 0]
        return torch.where(weights == 0, 0.0, weights * slope)  # an infinite slope counts nothing

    def knots(
        self, y: Tensor, norms: Float64[Tensor, " n"]
    ) -> tuple[Float64[Tensor, " n"], Float64[Tensor, " n"]]:
        """y1 and y2, between which |ℓ'(z)|·‖x‖ is at most R; infinite where it always is.

        Under Abadi's rule g is ℓ between them and straight outside. Other rules change the
        gradient inside as well.
        """
        # Not R / norms, for which torch multiplies by a rounded 1 / norms.
        level = torch.full_like(norms, self._level) / norms
        return -self._reach(y, level, -1.0), self._reach(y, level, 1.0)

    def value(
        self, z: Float64[Tensor, " n"], y: Tensor, norms: Float64[Tensor, " n"]
    ) -> Float64[Tensor, " n"]:
        """g(z), with g = ℓ at the score between the knots that is nearest to 0.

        Under Abadi's rule g = ℓ at all of them, and `reparameterized` gives 1/R times that. For
        rules without straight parts it is a quadrature, tested to 1e-7.
        """
        y1, y2 = self.knots(y, norms)
        if self.clip.name in _STRAIGHT:
            inside = torch.minimum(torch.maximum(z, y1), y2)
            slope = torch.where(z == inside, 0.0, self._level / norms)
            scale = self.clip.bound(1) / self._level  # 1, or 1/R
            return scale * (self.loss.value(inside, y) + slope * (z - inside).abs())
        corner = self._reach(y, torch.zeros_like(norms), 1.0)  # where the sign of ℓ' changes
        start = torch.minimum(torch.maximum(torch.zeros_like(z), y1), y2)
        corners = [y1, y2, corner, *(c.to(z.dtype) for c in self.loss.corners(y))]
        ends = torch.stack(corners, 1).sort(1).values
        low, high = torch.minimum(start, z)[:, None], torch.maximum(start, z)[:, None]
        ends = torch.cat([low, torch.minimum(torch.maximum(ends, low), high), high], 1)
        parts = _integrate(lambda t: self._along(t, y, norms), ends)
        return self.loss.value(start, y) + torch.sign(z - start) * parts

    @property
    def _level(self) -> float:
        """R, by which a gradient is judged to be long."""
        return self.clip.clip_norms(1)[0]

    def _along(self, t: Tensor, y: Tensor, norms: Tensor) -> Tensor:
        """g' at several scores of each record."""
        count = t.shape[1]
        many = self.derivative(t.reshape(-1), _each(y, count), _each(norms, count))
        return many.reshape(t.shape)

    def _reach(self, y: Tensor, level: Tensor, side: float) -> Tensor:
        """The largest s >= −2⁶⁰ at which side·ℓ'(side·s) is at most `level`, by halving."""
        low, high = torch.full_like(level, -_FAR), torch.full_like(level, _FAR)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            within = side * self.loss.derivative(side * middle, y) <= level
            low, high = torch.where(within, middle, low), torch.where(within, high, middle)
        return torch.where(high == _FAR, math.inf, torch.where(low == -_FAR, -math.inf, low))


@dataclass(frozen=True)
class ClippedObjective:
    """The mean of a loss over a data set, before clipping and after.

    `features` are rows x, `labels` what the loss takes. This reads records and is not private: it
    is for public or simulated data.
    """

    huberised: Huberised
    features: Float64[Tensor, "n p"]
    labels: Tensor

    @property
    def norms(self) -> Float64[Tensor, " n"]:
        """‖x‖ of each record."""
        norms: Tensor = torch.linalg.vector_norm(self.features, dim=1)
        return norms

    def original(self, theta: Float64[Tensor, " p"]) -> float:
        """The mean of ℓ at θ."""
        return float(self.huberised.loss.value(self.features @ theta, self.labels).mean())

    def clipped(self, theta: Float64[Tensor, " p"]) -> float:
        """The mean of g at θ; a record with x = 0 counts with ℓ(0), which nothing moves."""
        z, moved = self.features @ theta, self.norms > 0
        total = self.huberised.value(z[moved], self.labels[moved], self.norms[moved]).sum()
        still = self.huberised.loss.value(z[~moved], self.labels[~moved]).sum()
        return float(total + still) / len(z)

    def curve(self, thetas: Float64[Tensor, " m"]) -> Float64[Tensor, " m"]:
        """The clipped mean at many values of one parameter, to be drawn."""
        moved = self.norms > 0
        x, y, norms = self.features[moved, 0], self.labels[moved], self.norms[moved]
        z = (x[:, None] * thetas).reshape(-1)
        values = self.huberised.value(z, _each(y, len(thetas)), _each(norms, len(thetas)))
        still = self.labels[~moved]
        rest = self.huberised.loss.value(torch.zeros(len(still), dtype=torch.float64), still)
        return (values.reshape(len(x), len(thetas)).sum(0) + rest.sum()) / len(self.features)

    def gradient(self, theta: Float64[Tensor, " p"], *, clipped: bool) -> Float64[Tensor, " p"]:
        """The gradient of either mean."""
        z = self.features @ theta
        slope = (
            self.huberised.derivative(z, self.labels, self.norms)
            if clipped
            else self.huberised.loss.derivative(z, self.labels)
        )
        return self.features.T @ slope / len(z)

    def minimiser(self, *, clipped: bool = True, radius: float = 1e3) -> Float64[Tensor, " p"]:
        """Where either mean is least, among |θ_j| <= `radius`.

        For one parameter by halving, to the last bits and also where there are corners; for more
        by L-BFGS-B, which needs a smooth loss and rule.
        """
        if clipped and not self.huberised.convex:
            raise ValueError(
                f"expected a rule that keeps the loss convex, got {self.huberised.clip!r}, whose "
                "objective may have many minima; draw it by `clipped` instead"
            )
        parameters = self.features.shape[1]
        if parameters == 1:
            return self._by_halving(clipped, radius)

        def at(theta: np.ndarray) -> tuple[float, np.ndarray]:
            point = torch.from_numpy(theta)
            value = self.clipped(point) if clipped else self.original(point)
            return value, self.gradient(point, clipped=clipped).numpy()

        found = minimize(
            at,
            np.zeros(parameters),
            jac=True,
            method="L-BFGS-B",
            bounds=[(-radius, radius)] * parameters,
            options={"maxiter": 10_000, "maxfun": 100_000, "ftol": 1e-15, "gtol": 1e-9},
        )
        return torch.from_numpy(np.asarray(found.x))

    def _by_halving(self, clipped: bool, radius: float) -> Float64[Tensor, " p"]:
        low, high = -radius, radius
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            point = torch.tensor([middle], dtype=torch.float64)
            rising = float(self.gradient(point, clipped=clipped)[0]) > 0
            low, high = (low, middle) if rising else (middle, high)
        return torch.tensor([high], dtype=torch.float64)

    def excess_risk(self, *, radius: float = 1e3) -> float:
        """How much more the original objective is at the clipped one's minimiser than at its own.

        No number of records takes this away: it is what the rule costs, whatever the noise.
        """
        biased = self.original(self.minimiser(clipped=True, radius=radius))
        return biased - self.original(self.minimiser(clipped=False, radius=radius))


def _each(x: Tensor, count: int) -> Tensor:
    return x[:, None].expand(-1, count).reshape(-1)


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_PANELS = 8  # in each piece between two ends


def _integrate(
    f: Callable[[Tensor], Tensor], ends: Float64[Tensor, "n k"]
) -> Float64[Tensor, " n"]:
    """∫ f from the first end to the last, piece by piece: f has its corners at the ends."""
    cuts = torch.linspace(0, 1, _PANELS + 1, dtype=torch.float64)
    starts, widths = ends[:, :-1, None], ends.diff(dim=1)[:, :, None]
    edges = starts + widths * cuts
    left, half = edges[:, :, :-1, None], edges.diff(dim=2)[..., None] / 2
    nodes, weights = torch.from_numpy(_NODES), torch.from_numpy(_WEIGHTS)
    at = left + half * (1 + nodes)
    values = f(at.reshape(len(ends), -1)).reshape(at.shape)
    return (values * half * weights).sum((1, 2, 3))
