"""The loss that clipped gradient descent minimises, when the model is linear.

A clipping rule turns a gradient ℓ'(z)x into φ(ℓ'(z)‖x‖)·x/‖x‖, with φ(u) = w(|u|)·u and w the
rule's weight. That is the gradient of another loss of the same score,

    g(z) = ∫ φ(ℓ'(t)‖x‖)/‖x‖ dt,

and g is convex whenever ℓ is convex and φ increasing. For Abadi's rule it is the Huberised loss:
ℓ between two knots and linear beyond. For AUTO-S φ(u) = Ru/(|u| + γ), for AUTO-V R·sign(u). So you
can see what a rule and a clipping norm really optimise before spending any privacy. For several
classes there is no such loss: the field of clipped softmax gradients is not a gradient field.

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
_HALVINGS = 120  # bisections from ±2⁶⁰ down to the last bit
_STRAIGHT = ("abadi", "reparameterized")  # φ is linear in u up to R and constant beyond


@dataclass(frozen=True)
class Huberised:
    """The loss that a clipping rule really minimises, for a convex loss of one score.

    Args:
        loss: the original loss ℓ.
        clip: the clipping rule.

    Raises:
        ValueError: for a loss that is not convex or has several scores, or several clipping norms.

    Example:
        >>> from hushgrad.clipping import abadi
        >>> from hushgrad.glm.losses import squared
        >>> g = Huberised(squared(), abadi(1.0))
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> g.value(3 * one, 0 * one, one)  # ½ up to |z| = 1, and slope 1 beyond
        tensor([2.5000], dtype=torch.float64)

    Reference: clipped DP-GD, Lemma 3.1.
    """

    loss: ScoreLoss
    clip: Clip

    def __post_init__(self) -> None:
        if self.loss.vector or not self.loss.convex:
            raise ValueError(
                f"expected a convex loss of one score, got {self.loss}; clipped gradients of "
                "several scores are not the gradient of a loss, and non-convex losses have no knots"
            )
        if not isinstance(self.clip.clip_norm, int | float):
            raise ValueError(
                f"expected one clipping norm, got {self.clip.clip_norm}; a score has one group"
            )

    def phi(self, u: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
        """Return φ(u) = w(|u|)·u, the rule on signed norms u = ℓ'(z)‖x‖."""
        return self.clip.weights(u.abs()[:, None])[:, 0] * u

    @property
    def convex(self) -> bool:
        """Whether φ increases, tested on a grid; that of `discard` does not."""
        sizes = 2.0 ** torch.arange(-40, 40, 0.25, dtype=torch.float64)
        return bool((self.phi(sizes).diff() >= -1e-12 * self.clip.bound(1)).all())

    def derivative(
        self, z: Float64[Tensor, " n"], y: Tensor, norms: Float64[Tensor, " n"]
    ) -> Float64[Tensor, " n"]:
        """Return g'(z) for records of these norms: ℓ'(z) after clipping."""
        slope = self.loss.derivative(z, y)
        weights = self.clip.weights((slope.abs() * norms)[:, None])[:, 0]
        return torch.where(weights == 0, 0.0, weights * slope)  # 0 · inf would be NaN

    def knots(
        self, y: Tensor, norms: Float64[Tensor, " n"]
    ) -> tuple[Float64[Tensor, " n"], Float64[Tensor, " n"]]:
        """Return y1 and y2, between which |ℓ'(z)|·‖x‖ is at most R; infinite if it always is.

        Under Abadi's rule g is ℓ between the knots and linear outside. Other rules also change the
        gradient inside.
        """
        # A scalar R / norms would make torch multiply by a rounded 1 / norms.
        level = torch.full_like(norms, self._level) / norms
        return -self._reach(y, level, -1.0), self._reach(y, level, 1.0)

    def value(
        self, z: Float64[Tensor, " n"], y: Tensor, norms: Float64[Tensor, " n"]
    ) -> Float64[Tensor, " n"]:
        """Return g(z), normalised so that g = ℓ at the score between the knots that is nearest 0.

        Under Abadi's rule g = ℓ at all scores between the knots, and `reparameterized` gives 1/R
        times that. For rules without linear parts it is a quadrature, tested to 1e-7.
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
        """R, the norm above which a gradient is clipped."""
        return self.clip.clip_norms(1)[0]

    def _along(self, t: Tensor, y: Tensor, norms: Tensor) -> Tensor:
        """Return g' at several scores of each record."""
        count = t.shape[1]
        many = self.derivative(t.reshape(-1), _each(y, count), _each(norms, count))
        return many.reshape(t.shape)

    def _reach(self, y: Tensor, level: Tensor, side: float) -> Tensor:
        """Return the largest s >= −2⁶⁰ with side·ℓ'(side·s) <= `level`, by bisection."""
        low, high = torch.full_like(level, -_FAR), torch.full_like(level, _FAR)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            within = side * self.loss.derivative(side * middle, y) <= level
            low, high = torch.where(within, middle, low), torch.where(within, high, middle)
        return torch.where(high == _FAR, math.inf, torch.where(low == -_FAR, -math.inf, low))


@dataclass(frozen=True)
class ClippedObjective:
    """The mean of a loss over a data set, before and after clipping.

    It reads records without noise, so it is **not private**: use it on public or simulated data.

    Args:
        huberised: the loss and the clipping rule.
        features: the rows x.
        labels: the labels, as the loss takes them.

    Example:
        >>> from hushgrad.clipping import abadi
        >>> from hushgrad.glm.losses import squared
        >>> x, y = torch.ones(3, 1).double(), torch.tensor([0.0, 0.0, 9.0]).double()
        >>> data = ClippedObjective(Huberised(squared(), abadi(1.0)), x, y)
        >>> data.minimiser(clipped=False), data.minimiser()  # the mean, and near the median
        (tensor([3.0000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))

    Reference: clipped DP-GD, section 3.
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
        """Return the mean of ℓ at θ."""
        return float(self.huberised.loss.value(self.features @ theta, self.labels).mean())

    def clipped(self, theta: Float64[Tensor, " p"]) -> float:
        """Return the mean of g at θ; a record with x = 0 contributes the constant ℓ(0)."""
        z, moved = self.features @ theta, self.norms > 0
        total = self.huberised.value(z[moved], self.labels[moved], self.norms[moved]).sum()
        still = self.huberised.loss.value(z[~moved], self.labels[~moved]).sum()
        return float(total + still) / len(z)

    def curve(self, thetas: Float64[Tensor, " m"]) -> Float64[Tensor, " m"]:
        """Return the clipped mean at many values of one parameter, for a plot."""
        moved = self.norms > 0
        x, y, norms = self.features[moved, 0], self.labels[moved], self.norms[moved]
        z = (x[:, None] * thetas).reshape(-1)
        values = self.huberised.value(z, _each(y, len(thetas)), _each(norms, len(thetas)))
        still = self.labels[~moved]
        rest = self.huberised.loss.value(torch.zeros(len(still), dtype=torch.float64), still)
        return (values.reshape(len(x), len(thetas)).sum(0) + rest.sum()) / len(self.features)

    def gradient(self, theta: Float64[Tensor, " p"], *, clipped: bool) -> Float64[Tensor, " p"]:
        """Return the gradient of the clipped or the original mean."""
        z = self.features @ theta
        slope = (
            self.huberised.derivative(z, self.labels, self.norms)
            if clipped
            else self.huberised.loss.derivative(z, self.labels)
        )
        return self.features.T @ slope / len(z)

    def minimiser(self, *, clipped: bool = True, radius: float = 1e3) -> Float64[Tensor, " p"]:
        """Return the minimiser of the clipped or the original mean, within |θ_j| <= `radius`.

        One parameter is found by bisection, to the last bits and despite corners; several by
        L-BFGS-B, which needs a smooth loss and rule.
        """
        if clipped and not self.huberised.convex:
            raise ValueError(
                f"expected a rule that keeps the loss convex, got {self.huberised.clip!r}, whose "
                "objective may have many minima; plot it with `curve` instead"
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
        """Return the original objective at the clipped minimiser, minus its own minimum.

        This bias of the clipping rule does not vanish with more records or less noise.
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
    """Integrate f from the first end to the last, interval by interval; corners are at the ends."""
    cuts = torch.linspace(0, 1, _PANELS + 1, dtype=torch.float64)
    starts, widths = ends[:, :-1, None], ends.diff(dim=1)[:, :, None]
    edges = starts + widths * cuts
    left, half = edges[:, :, :-1, None], edges.diff(dim=2)[..., None] / 2
    nodes, weights = torch.from_numpy(_NODES), torch.from_numpy(_WEIGHTS)
    at = left + half * (1 + nodes)
    values = f(at.reshape(len(ends), -1)).reshape(at.shape)
    return (values * half * weights).sum((1, 2, 3))
