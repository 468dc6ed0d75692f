"""Output and objective perturbation: one release of the minimiser of a convex objective.

Both minimise F(θ) = Σᵢ ℓ(<θ, xᵢ>, yᵢ) + Λ‖θ‖²/2 over records with ‖ℓ'‖·‖x‖ <= L. Output
perturbation adds noise to the minimiser, objective perturbation a random linear term to F. No
computer finds a minimiser exactly, and both proofs allow for that here.

The privacy loss of objective perturbation. Let b ~ N(0, σ²I), θ the minimiser of F + <b, θ>, and D'
= D with a record (x, y) more. Given D, b = −∇F_D(θ) is a bijection, so θ has the density
ν(b_D(θ))·det ∇²F_D(θ), and between D and D'

- the determinants differ by a factor of at most Π_j (1 + h_j/Λ), h_j the eigenvalues of the
  record's own Hessian: at most (1 + β‖x‖²/Λ)^K for a loss of smoothness β and K scores;
- the exponents differ by (‖g‖² + 2<b, g>)/(2σ²), up to the sign of g = ℓ'(z) ⊗ x, the record's
  gradient. g depends on b, but lies in the K dimensions that x spans, in which the norm of b/σ is
  χ_K. So |<b, g>| <= L·σ·χ_K.

Hence the loss is at most c + m²/2 + m·χ_K with c = K log(1 + β‖x‖²/Λ) and m = L/σ, and δ(ε) is at
most the mean of (1 − e^(ε − c − m²/2 − mχ))₊. When a record is replaced, two gradients change:
m = 2L/σ, in 2K dimensions, with the same c. For K = 1 and add/remove this is 2·δ of the Gaussian
mechanism at ε − c.

Reference: Chaudhuri et al. 2011; Kifer et al. 2012, whose (ε, δ) this improves; Redberg et al.
2023 for the χ; Iyengar et al. 2019 for approximate minimisers.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from dp_accounting import DpEvent
from jaxtyping import Float64
from scipy.special import xlogy
from scipy.stats import chi2
from torch import Tensor

from hushgrad.accounting.closed_forms import gaussian_noise_multiplier
from hushgrad.events import ApproximateDpEvent, repeated
from hushgrad.glm.gradients import NAME
from hushgrad.glm.losses import ScoreLoss
from hushgrad.glm.minimising import minimiser
from hushgrad.glm.rows import RowSource
from hushgrad.ledger import Budget, Spend
from hushgrad.noise import Noise, gaussian, standard_normal
from hushgrad.parallel.single import require_one_process
from hushgrad.rng import Rng
from hushgrad.run.charging import refuse_reproducible
from hushgrad.run.query import BatchPass, answerable
from hushgrad.run.resuming import Fingerprint, none
from hushgrad.run.step import release_once
from hushgrad.types import Bounded, Refused, Relation

TOLERANCE = 1e-4
"""The gradient that may remain at a minimiser, ÷ L."""

OUTPUT_SHARE = 0.01
"""The share of ε and δ that objective perturbation spends on hiding that remaining gradient."""

_UP = 1 + 1e-9  # covers the rounding of a row's norm; longer rows are refused

_NODES, _ONCE = np.polynomial.legendre.leggauss(24)
_WEIGHTS = np.tile(_ONCE, 128)


@dataclass(frozen=True)
class PerturbationProblem:
    """What the guarantee of a perturbation depends on; all of it is public.

    Args:
        loss: a convex loss of bounded slope and curvature.
        classes: K, the number of scores.
        row_norm: the bound on ‖x‖, intercept included.
        strength: Λ, the penalty of the sum.
        epsilon: ε of the release.
        delta: δ of the release.
        relation: add/remove or replace one record.

    Raises:
        Refused: if the loss or the relation is not covered by the proofs.
        ValueError: if a number is out of range.
    """

    loss: ScoreLoss
    classes: int
    row_norm: float
    strength: float
    epsilon: float
    delta: float
    relation: Relation = Relation.ADD_REMOVE

    def __post_init__(self) -> None:
        if not self.loss.convex or not math.isfinite(self.loss.lipschitz):
            raise Refused(
                f"expected a convex loss of bounded slope, got {self.loss}; use algorithm "
                '"sgd", which clips'
            )
        if not (math.isfinite(self.loss.smoothness)):
            raise Refused(
                f"expected a loss of bounded curvature, got {self.loss}; smooth it, or use "
                'algorithm "sgd"'
            )
        if (self.classes > 1) is not self.loss.vector or self.classes < 1:
            raise Refused(
                f"expected one row of parameters for a loss of one score, and two or more for one "
                f"of several, got {self.classes} with {self.loss}; state the loss's own number"
            )
        if self.relation is Relation.ZERO_OUT:
            raise Refused("expected add/remove or replace-one, got zero-out; use replace-one")
        positive = (self.row_norm, self.strength, self.epsilon)
        if not all(math.isfinite(v) and v > 0 for v in positive) or not 0 < self.delta < 1:
            raise ValueError(
                f"expected row_norm, strength, epsilon > 0 and 0 < delta < 1, got {positive} and "
                f"{self.delta}; pass a strength of 1 or more"
            )

    @property
    def gradient_norm(self) -> float:
        """L: the largest norm of a record's gradient."""
        return self.loss.lipschitz * self.row_norm * _UP

    @property
    def determinant(self) -> float:
        """c: how far a record can move the logarithm of the Hessian's determinant."""
        # β‖x‖², a bound on the eigenvalues of a record's Hessian.
        bend = self.loss.smoothness * (self.row_norm * _UP) ** 2
        return self.classes * math.log1p(bend / self.strength)


@dataclass(frozen=True)
class Perturbed:
    """A released minimiser, the standard deviation of its noise, and its event.

    For objective perturbation the noise is that of the linear term.
    """

    theta: Float64[Tensor, "classes width"]
    noise: float
    event: DpEvent


def objective_delta(epsilon: float, *, ratio: float, determinant: float, dimensions: int) -> float:
    """Return δ(ε) of objective perturbation: the mean of (1 − e^(ε − c − m²/2 − mχ_k))₊, rounded
    up.

    `ratio` is m, sensitivity ÷ noise, `determinant` c, and `dimensions` k.

    Example:
        With c = 0 and k = 1 it is twice δ of the Gaussian mechanism:

        >>> from hushgrad.accounting.closed_forms import gaussian_delta
        >>> found = objective_delta(1.0, ratio=0.5, determinant=0.0, dimensions=1)
        >>> math.isclose(found, 2 * gaussian_delta(2.0, epsilon=1.0), rel_tol=1e-6)
        True
    """
    # The loss exceeds ε where mχ is above this.
    left = epsilon - determinant - ratio**2 / 2
    start = max(0.0, left / ratio)
    stop = max(start, math.sqrt(dimensions)) + 40.0
    edges = np.linspace(start, stop, 129)
    half = (edges[1] - edges[0]) / 2
    t = (edges[:-1, None] + half * (1 + _NODES)).ravel()
    norming = (dimensions / 2 - 1) * math.log(2) + math.lgamma(dimensions / 2)
    density = np.exp(xlogy(dimensions - 1, t) - t**2 / 2 - norming)
    mean = half * np.dot(density * -np.expm1(np.minimum(left - ratio * t, 0.0)), _WEIGHTS)
    # Smooth between the edges: the quadrature is exact to 1e-12. Beyond `stop` χ has no mass.
    return min(1.0, float(mean) * (1 + 1e-9) + float(chi2.sf(stop**2, dimensions)))


def objective_noise(problem: PerturbationProblem) -> float:
    """Return the least σ of the linear term, to 1e-6, that keeps (ε, δ)."""
    c, epsilon, delta = problem.determinant, problem.epsilon, problem.delta
    if c >= epsilon:
        raise Refused(
            f"expected a strength at which the Hessian costs less than epsilon = {epsilon}, "
            f"got {problem.strength:.4g}, at which it costs {c:.4g}; raise it to "
            f"{least_strength(problem.loss, problem.classes, problem.row_norm, epsilon):.4g}"
        )
    replaced = problem.relation is Relation.REPLACE_ONE
    sensitivity = (2 if replaced else 1) * problem.gradient_norm
    dimensions = (2 if replaced else 1) * problem.classes

    def kept(ratio: float) -> bool:
        found = objective_delta(epsilon, ratio=ratio, determinant=c, dimensions=dimensions)
        return found <= delta

    # A bisection on m = sensitivity ÷ noise: δ grows with m.
    low, high = 2.0**-40, 2.0**10
    if not kept(low):
        raise Refused(
            f"expected a strength that leaves some of epsilon = {epsilon} to the noise, got "
            f"{problem.strength:.4g}; raise it"
        )
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if kept(middle) else (low, middle)
    return sensitivity / low


def least_strength(
    loss: ScoreLoss, classes: int, row_norm: float, epsilon: float, share: float = 0.5
) -> float:
    """Return the Λ at which the Hessian's determinant takes this share of ε."""
    return loss.smoothness * row_norm**2 / math.expm1(share * epsilon / classes)


def objective_perturbation(
    rows: RowSource,
    labels: Tensor,
    problem: PerturbationProblem,
    *,
    rng: Rng,
    budget: Budget | None = None,
    fingerprint: Fingerprint = none,
) -> Perturbed:
    """Minimise F + <b, θ> and release the minimiser, with a little noise for its inexactness.

    Guarantees: (ε, δ) of the problem. The remaining gradient has norm at most γ = 1e-4·L, so the
    computed θ is within γ/Λ of the minimiser, for every data set. The difference is hidden by a
    Gaussian release of sensitivity 2γ/Λ, which takes 1 % of ε and of δ. The linear term is never
    released. It is drawn in float64 from 52-bit numbers; its rounding moves the minimiser by far
    less than γ/Λ.

    Args:
        rows: the records' features, within the problem's `row_norm`.
        labels: the records' labels.
        problem: the loss, the bounds, ε and δ.
        rng: the key of the noise.
        budget: the account that is charged before the release.
        fingerprint: maps a key to a digest of the data.

    Raises:
        Refused: if the strength leaves too little of ε to the noise, or a row is too long.

    Reference: Kifer et al. 2012, Private Convex Empirical Risk Minimization; the module's docstring
    has the proof.
    """
    key = _key(rng, budget)
    # Basic composition of the two parts, so their shares add up to one.
    main = _with_share(problem, 1 - OUTPUT_SHARE)
    sigma = objective_noise(main)
    size = (problem.classes, rows.width)
    drawn = standard_normal(math.prod(size), key.derive("objective")).reshape(size)
    rest = _with_share(problem, OUTPUT_SHARE)
    theta = _released(
        PerturbedMinimiser(rows, labels, problem, tilt=sigma * drawn),
        noise=gaussian(gaussian_noise_multiplier(rest.epsilon, delta=rest.delta)),
        event=(event := ApproximateDpEvent(problem.epsilon, problem.delta)),
        key=key,
        budget=budget,
        fingerprint=fingerprint,
    )
    return Perturbed(theta, sigma, event)


def output_perturbation(
    rows: RowSource,
    labels: Tensor,
    problem: PerturbationProblem,
    *,
    rng: Rng,
    budget: Budget | None = None,
    fingerprint: Fingerprint = none,
) -> Perturbed:
    """Minimise F and release the minimiser with Gaussian noise, calibrated exactly.

    Guarantees: (ε, δ) of the problem. One record moves the minimiser of a Λ-strongly convex sum by
    at most L/Λ, by 2L/Λ if it is replaced; with n records and λ = Λ/n that is 2L/(nλ). The computed
    θ is within γ/Λ of the minimiser. The arguments are those of `objective_perturbation`.

    Reference: Chaudhuri et al. 2011, Differentially Private Empirical Risk Minimization, Algorithm
    1.
    """
    key = _key(rng, budget)
    multiplier = gaussian_noise_multiplier(problem.epsilon, delta=problem.delta)
    if problem.relation is Relation.REPLACE_ONE:
        multiplier *= 2
    query, noise = PerturbedMinimiser(rows, labels, problem), gaussian(multiplier)
    theta = _released(
        query, noise=noise, event=noise.event, key=key, budget=budget, fingerprint=fingerprint
    )
    return Perturbed(theta, multiplier * query.l2, noise.event)


@answerable
@dataclass(frozen=True)
class PerturbedMinimiser:
    """The minimiser of F, or of F + <tilt, θ> where a random linear term hides the records.

    With a tilt only the distance to the exact minimiser must be hidden, 2γ/Λ. Without one a record
    moves the minimiser of a Λ-strongly convex sum by at most L/Λ, to which 2γ/Λ is added. γ is the
    gradient that the search may leave.
    """

    rows: RowSource
    labels: Tensor
    problem: PerturbationProblem
    tilt: Tensor | None = None
    of_each_record: ClassVar[bool] = False

    @property
    def tolerance(self) -> float:
        """γ: the gradient that may remain."""
        return TOLERANCE * self.problem.gradient_norm

    @property
    def l2(self) -> float:
        """How far one record moves the computed minimiser."""
        moved = 0.0 if self.tilt is not None else self.problem.gradient_norm
        return (moved + 2 * self.tolerance) / self.problem.strength

    def bounded(self, work: BatchPass | None = None) -> Bounded:
        """The computed minimiser, and how far one record moves it."""
        return Bounded({NAME: self._found}, l2=self.l2)

    @cached_property
    def _found(self) -> Tensor:
        tilt = self.tilt
        if tilt is None:
            tilt = torch.zeros(self.problem.classes, self.rows.width, dtype=torch.float64)
        return minimiser(
            self.rows,
            self.labels,
            loss=self.problem.loss,
            strength=self.problem.strength,
            tilt=tilt,
            tolerance=self.tolerance,
        )

    def event(self, noise_multiplier: float) -> DpEvent:
        """One Gaussian release."""
        return gaussian(noise_multiplier).event


def _with_share(problem: PerturbationProblem, share: float) -> PerturbationProblem:
    """Return the same problem for a share of ε and δ."""
    return replace(problem, epsilon=share * problem.epsilon, delta=share * problem.delta)


def _key(rng: Rng, budget: Budget | None) -> Rng:
    """Return a key for one fit: two fits with one key must not share their noise."""
    if budget is not None:
        refuse_reproducible(rng)
    fresh = () if rng.reproducible else (secrets.token_bytes(16),)
    return rng.derive("perturbation", *fresh)


def _released(
    query: PerturbedMinimiser,
    *,
    noise: Noise,
    event: DpEvent,
    key: Rng,
    budget: Budget | None,
    fingerprint: Fingerprint,
) -> Float64[Tensor, "classes width"]:
    """Return the minimiser with noise, charged to the budget before it is released.

    A search that fails is charged too, because whether it fails may depend on a record.
    """
    require_one_process()
    problem = query.problem
    _require_short(query.rows, problem)
    entry = None
    if budget is not None:
        entry = budget.open(
            Spend(event, problem.relation, problem.epsilon, problem.delta),
            label="perturbation",
            plan={"loss": problem.loss.name, "strength": problem.strength, "l2": query.l2},
            fingerprint=fingerprint(budget.salt),
        )
    if entry is not None:
        entry.reserve(1)
    try:
        # The search runs before the release, so that its failure can be charged.
        query.bounded()
    except BaseException:
        if entry is not None:
            entry.settle(steps=1, event=repeated(1, event))
        raise
    released = release_once(query, noise, rng=key)
    if entry is not None:
        entry.note(0, released.digest)
        entry.settle(steps=1, event=repeated(1, event))
    return released.values[NAME]


def _require_short(rows: RowSource, problem: PerturbationProblem) -> None:
    longest = float(rows.sq_norms.max()) if len(rows.sq_norms) else 0.0
    if not longest <= (problem.row_norm * _UP) ** 2:
        raise Refused(
            f"expected rows of norm at most {problem.row_norm:.6g}, the bound that the noise is "
            "for, got a longer one; make them by scaled_rows, and include the intercept"
        )
