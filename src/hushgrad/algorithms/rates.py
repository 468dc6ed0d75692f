"""The papers' choices of parameters, as functions of what is known about the problem.

None of these numbers may be computed from the private data: bounds on smoothness and on the spread
of gradients are stated by the user, or estimated from public data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hushgrad.accounting.closed_forms import recursive_momentum_noise_multiplier
from hushgrad.types import Refused


@dataclass(frozen=True)
class Problem:
    """What DP-NSGD assumes: smoothness L0 + L1|∇f|, and records' gradients within τ0 + τ1|∇f| of
    ∇f.

    Args:
        smoothness: L0.
        relative_smoothness: L1.
        spread: τ0.
        relative_spread: τ1, below 1.

    Raises:
        ValueError: if a number is negative or infinite, τ1 is not below 1, or L0 + L1 is 0.

    Example:
        >>> Problem(1.0, 0.0, 0.001, 0.0).smoothness
        1.0

    Reference: DP-NSGD, Assumptions of Theorem 3.2.
    """

    smoothness: float
    relative_smoothness: float
    spread: float
    relative_spread: float

    def __post_init__(self) -> None:
        named = vars(self)
        if not all(math.isfinite(v) and v >= 0 for v in named.values()):
            raise ValueError(f"expected numbers of 0 or more, got {named}; state upper bounds")
        if self.relative_spread >= 1 or self.smoothness + self.relative_smoothness == 0:
            raise ValueError(
                f"expected relative_spread (τ1) < 1 and some smoothness, got {named}; the theory "
                "says nothing otherwise"
            )


def normalised_rate(
    problem: Problem,
    *,
    gamma: float,
    steps: int,
    dimension: int,
    noise_multiplier: float,
    batch: float,
) -> float:
    """Return η of DP-NSGD, √(2/((L1(r + τ0) + L0) T d σ_B²)), with r = `gamma` of `automatic`, R =
    1.

    σ_B = σ/b: the paper's σ is the noise on the mean of the batch, not the multiplier.

    Args:
        problem: the assumptions.
        gamma: r, the stability constant of `automatic`.
        steps: T.
        dimension: d, the number of parameters.
        noise_multiplier: σ.
        batch: b, the expected size of a batch.

    Raises:
        Refused: if r is not above τ0, which Theorem 3.2 needs.

    Example:
        >>> problem = Problem(1.0, 0.0, 0.001, 0.0)
        >>> normalised_rate(
        ...     problem, gamma=0.01, steps=200, dimension=100, noise_multiplier=1.0, batch=100
        ... )
        1.0

    Reference: DP-NSGD, Theorem 3.2, equation (4).
    """
    # The theorem proves no rate for a smaller r.
    if gamma <= problem.spread:
        raise Refused(
            f"expected gamma (r) above the spread τ0 = {problem.spread} for Theorem 3.2, got "
            f"{gamma}; use a larger gamma"
        )
    smooth = problem.relative_smoothness * (gamma + problem.spread) + problem.smoothness
    return math.sqrt(2 / (smooth * steps * dimension)) * batch / noise_multiplier


def clipped_rate(
    problem: Problem,
    *,
    clip_norm: float,
    steps: int,
    dimension: int,
    noise_multiplier: float,
    batch: float,
) -> float:
    """Return η of DP-SGD, √(2/((L1(c + τ0) + L0) T d c² σ_B²)), with σ_B = σ/b.

    Args:
        problem: the assumptions.
        clip_norm: c.
        steps: T.
        dimension: d, the number of parameters.
        noise_multiplier: σ.
        batch: b, the expected size of a batch.

    Raises:
        Refused: if c is not above 2τ0/(1 − τ1), which Theorem 3.4 needs.

    Example:
        >>> problem = Problem(1.0, 0.0, 0.001, 0.0)
        >>> clipped_rate(
        ...     problem, clip_norm=0.1, steps=200, dimension=100, noise_multiplier=1.0, batch=100
        ... )
        10.0

    Reference: DP-NSGD, Theorem 3.4, equation (8).
    """
    # The theorem proves no rate for a smaller c.
    least = 2 * problem.spread / (1 - problem.relative_spread)
    if clip_norm <= least:
        raise Refused(
            f"expected clip_norm (c) above 2τ0/(1 − τ1) = {least:g} for Theorem 3.4, got "
            f"{clip_norm}; use a larger one"
        )
    smooth = problem.relative_smoothness * (clip_norm + problem.spread) + problem.smoothness
    return math.sqrt(2 / (smooth * steps * dimension)) * batch / (clip_norm * noise_multiplier)


def largest_normalised_rate(
    problem: Problem, *, gamma: float, dimension: int, noise: float, alpha: float
) -> float:
    """Return the largest η for which Lemma C.1 of DP-NSGD holds, its condition (22); σ_B is
    `noise`.
    """
    smooth, relative = problem.smoothness, problem.relative_smoothness
    return min(
        _over((gamma - problem.spread) * alpha, 4 * smooth),
        _over((1 - problem.relative_spread) * alpha, 4 * relative),
        _over(alpha, 6 * relative * dimension * noise**2),
    )


def largest_clipped_rate(
    problem: Problem, *, clip_norm: float, dimension: int, noise: float, alpha: float
) -> float:
    """Return the largest η for which Lemma D.1 of DP-NSGD holds, its condition (33); σ_B is
    `noise`.
    """
    smooth, relative = problem.smoothness, problem.relative_smoothness
    spread, kept = problem.spread, 1 - problem.relative_spread
    return min(
        _over(alpha, 6 * relative * dimension * clip_norm * noise**2),
        _over(alpha * kept, 2 * smooth * kept + 4 * relative * spread),
        _over(alpha * spread * kept, 4 * clip_norm * (smooth * kept + 2 * relative * spread)),
    )


def _over(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.inf


@dataclass(frozen=True)
class Choice:
    """DP-SRM's parameters: steps T, accuracy ζ, batches b0 and b, n0 and γ."""

    steps: float
    accuracy: float
    first_batch: float
    batch: float
    n0: float
    gamma: float


def recursive_momentum_choice(
    *,
    records: int,
    dimension: int,
    epsilon: float,
    delta: float,
    lipschitz: float,
    smoothness: float,
    gap: float,
    constants: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0),
) -> Choice:
    """Return DP-SRM's parameters by its Theorem 5.4, for G = `lipschitz`, L = `smoothness`, D_F =
    `gap`.

    T = c1 (nεLD)^(4/3)/(G^(8/3)(d log 1/δ)^(2/3)), ζ = c2 (GLD d log 1/δ)^(1/3)/(nε)^(2/3),
    b0 = c3 G³/(ζLD), b = c4 G/(n0 ζ), n0 = LD/G², γ² = c5 ζ²/(n0²G²). The theorem does not state
    its `constants` c1 to c5: 1 is a placeholder, and only the rates are proved.
    """
    c1, c2, c3, c4, c5 = constants
    private = dimension * math.log(1 / delta)
    scale = smoothness * gap
    accuracy = c2 * (lipschitz * scale * private) ** (1 / 3) / (records * epsilon) ** (2 / 3)
    n0 = scale / lipschitz**2
    steps = (records * epsilon * scale) ** (4 / 3) / (lipschitz ** (8 / 3) * private ** (2 / 3))
    return Choice(
        steps=c1 * steps,
        accuracy=accuracy,
        first_batch=c3 * lipschitz**3 / (accuracy * scale),
        batch=c4 * lipschitz / (n0 * accuracy),
        n0=n0,
        gamma=math.sqrt(c5) * accuracy / (n0 * lipschitz),
    )


def recursive_momentum_batch(
    *, records: int, epsilon: float, delta: float, steps: int, constant: float = 1.0
) -> tuple[int, float]:
    """Return DP-SRM's batch n√(ε/T) = b0 = b by its Corollary 5.3, and the noise multiplier it
    needs.

    The corollary requires T above a `constant` times log⁴(1/δ)/ε³ without stating it. So the
    conditions of Theorem 5.1, from which it follows at β = ½, are checked as well.
    """
    least = constant * math.log(1 / delta) ** 4 / epsilon**3
    if steps <= least:
        raise Refused(
            f"expected more than {least:.4g} steps for Corollary 5.3, got {steps}; take more, or "
            "calibrate with the tight accountant"
        )
    batch = math.ceil(records * math.sqrt(epsilon / steps))
    # Raises if the conditions of Theorem 5.1 do not hold.
    noise = recursive_momentum_noise_multiplier(
        epsilon, delta=delta, steps=steps, records=records, batch=batch
    )
    return batch, noise
