"""The bounds that theorems on clipped DP-GD prove, as numbers to compare runs with.

All functions are about T full-batch steps θ − η(ḡ + noise) from θ_0, where ḡ is the mean of
gradients of norm at most L (`clip_norm`), divided by a public number of records n. `noise` is the
standard deviation of the noise in each entry of the mean. `rank` is the rank of the features for a
linear model without projection, and the number of parameters with one. The risk is that of the
clipped objective, which equals the original one if L bounds all gradients.

If a printed theorem omits constants or terms, the functions use those that its proof gives.

Reference: clipped DP-GD, Theorems 2.3, 4.1 and 4.2, and Corollary D.3.
"""

from __future__ import annotations

import math

from hushgrad.accounting.closed_forms import gradient_descent_noise_multiplier


def central_noise(
    *, clip_norm: float, records: int, epsilon: float, delta: float, steps: int
) -> float:
    """Return σ of Theorem 2.2, L√(2T log 1/δ)/(nε), for adding or removing a record.

    It holds for a public n. It raises `Refused` at an ε where the noise does not suffice.
    """
    multiplier = gradient_descent_noise_multiplier(epsilon, delta=delta, steps=steps)
    return multiplier * clip_norm / records


def local_noise(
    *, clip_norm: float, records: int, epsilon: float, delta: float, steps: int
) -> float:
    """Return the noise in the mean under local DP, when each of n records is noised at its source.

    Local DP compares any two records, so the sensitivity is 2L. Theorem D.2 prints L, which gives
    an ε of 1.63 where 1 is claimed.
    """
    multiplier = gradient_descent_noise_multiplier(epsilon, delta=delta, steps=steps)
    return 2 * multiplier * clip_norm / math.sqrt(records)


def best_rate(*, distance: float, clip_norm: float, rank: int, noise: float, steps: int) -> float:
    """Return the η that minimises `average_risk`; `distance` is ‖θ* − θ_0‖ in their span."""
    return distance / math.sqrt((steps + 1) * _square(clip_norm, rank, noise))


def average_risk(
    *,
    distance: float,
    clip_norm: float,
    rank: int,
    noise: float,
    steps: int,
    rate: float | None = None,
) -> float:
    """Bound the expected excess risk of the mean of θ_1, …, θ_T, at `rate` or at the best one.

    d²/(2Tη) + η(L² + rank·σ²)(T + 1)/(2T). The proof's (12) has T in the place of T + 1: it counts
    from θ_1 and takes the distance of θ_0.
    """
    chosen = rate or best_rate(
        distance=distance, clip_norm=clip_norm, rank=rank, noise=noise, steps=steps
    )
    drift = chosen * _square(clip_norm, rank, noise) * (steps + 1) / (2 * steps)
    return distance**2 / (2 * steps * chosen) + drift


def central_risk(
    *, distance: float, clip_norm: float, rank: int, records: int, epsilon: float, delta: float
) -> float:
    """Theorem 4.1: L·d·√(1 + 2·rank·log 1/δ)/(εn) after T = n²ε² steps at the best rate.

    With the number of parameters as the rank it is Theorem 2.3, which also holds with a projection
    onto a convex set; its printed form omits the 1 and the 2.
    """
    steps = math.ceil((records * epsilon) ** 2)
    noise = central_noise(
        clip_norm=clip_norm, records=records, epsilon=epsilon, delta=delta, steps=steps
    )
    return average_risk(distance=distance, clip_norm=clip_norm, rank=rank, noise=noise, steps=steps)


def local_risk(
    *, distance: float, clip_norm: float, rank: int, records: int, epsilon: float, delta: float
) -> float:
    """Corollary D.3: L·d·√(1 + 8·rank·log 1/δ)/(ε√n) after T = nε² steps at the best rate.

    The paper prints 1 for 8: a factor 4 is the sensitivity of 2L, and a 2 is lost in its proof.
    """
    steps = math.ceil(records * epsilon**2)
    noise = local_noise(
        clip_norm=clip_norm, records=records, epsilon=epsilon, delta=delta, steps=steps
    )
    return average_risk(distance=distance, clip_norm=clip_norm, rank=rank, noise=noise, steps=steps)


def stationary_gradient(
    *,
    gap: float,
    smoothness: float,
    rank: int,
    noise: float,
    steps: int,
    failure: float,
    choice: float = 0.0,
) -> float:
    """Theorem 4.2: a bound on the gradient at the chosen iterate among θ_0, …, θ_(T−1).

    It assumes η = 1/β (`smoothness`), `gap` = L(θ_0) − min L, and L above all gradients, so that
    none is clipped. The chosen iterate minimises gradient norm plus Laplace noise of scale
    `choice` (2L/(nε') under add/remove, twice that under replace-one; 0 chooses without noise).
    The bound holds with probability 1 − `failure`, half of which goes to each kind of noise.

    The printed bound decreases as 1/n for T growing as n². That does not follow: (15) omits the
    factor T of σ². With it, the noise term grows with T, and the best T gives 1/√n.
    """
    if not 0 < failure < 1:
        raise ValueError(f"expected 0 < failure < 1, got {failure}; 0.05 is usual")
    # Laurent and Massart 2000, (4.3): the upper tail of a χ² of rank·T degrees of freedom.
    freedom, tail = rank * steps, math.log(2 / failure)
    energy = noise**2 * (freedom + 2 * math.sqrt(freedom * tail) + 2 * tail) / steps
    least = math.sqrt(2 * smoothness * gap / steps + energy)
    return least + 2 * choice * math.log(2 * steps / failure)


def _square(clip_norm: float, rank: int, noise: float) -> float:
    """Return L² + rank·σ², the mean square of a noisy gradient in the features' span."""
    return clip_norm**2 + rank * noise**2
