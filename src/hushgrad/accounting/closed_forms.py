"""The papers' closed forms, each with the conditions under which it is proved.

If a condition fails, the function raises `Refused` instead of returning an unproven figure.
Multipliers are noise ÷ the bound on one record; a paper that works under replace-one has σ' = half
of that.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian
from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr

from hushgrad.types import Refused

_UP = 1 + 1e-9  # the package's root finder stops within 1e-12; rounding up never under-states
_MOST_NOISE = 2.0**40  # with more, the package's differences cancel; less noise over-states ε


def gaussian_delta(noise_multiplier: float, *, epsilon: float) -> float:
    """Return the exact δ of one Gaussian release, σ = noise ÷ sensitivity.

    Reference: Balle and Wang 2018, Theorem 8.

    >>> f"{gaussian_delta(1.0, epsilon=4.3772):.1e}"
    '1.0e-05'
    """
    mu = 1 / noise_multiplier
    near, far = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(np.exp(near) * -np.expm1(min(far - near, 0.0)))


def gaussian_epsilon(noise_multiplier: float, *, delta: float) -> float:
    """Return the exact ε of one Gaussian release, σ = noise ÷ sensitivity.

    >>> round(gaussian_epsilon(1.0, delta=1e-5), 4)
    4.3772
    """
    with np.errstate(divide="ignore"):  # the root finder may try a δ of 0, whose log is -inf
        return float(get_epsilon_gaussian(min(noise_multiplier, _MOST_NOISE), delta)) * _UP


def gaussian_noise_multiplier(epsilon: float, *, delta: float) -> float:
    """Return the least noise ÷ sensitivity with which one Gaussian release is (ε, δ)-DP."""
    with np.errstate(divide="ignore"):
        return float(get_sigma_gaussian(epsilon, delta)) * _UP


def gradient_descent_noise_multiplier(epsilon: float, *, delta: float, steps: int) -> float:
    """Return the multiplier of clipped DP-GD's Theorem 2.2, √(2T log 1/δ)/ε, if it suffices.

    The paper divides by the number of records, which is not public under add/remove; here the
    noise is on the sum. The paper's proof gives ε + ε²/(4 log 1/δ), but for the exact mechanism
    the noise suffices up to ε ≈ 7.97 at δ = 1e-5.

    Raises:
        Refused: at a larger ε.
    """
    found = math.sqrt(2 * steps * math.log(1 / delta)) / epsilon
    real = gaussian_delta(found / math.sqrt(steps), epsilon=epsilon)
    if real > delta:
        raise Refused(
            f"expected an epsilon at which Theorem 2.2 keeps delta {delta}, got {epsilon}, where "
            f"it gives {real:.2g}; calibrate with the exact mechanism"
        )
    return found


def sampled_gaussian_rdp(alpha: float, *, rate: float, noise_multiplier: float) -> float:
    """Return ε(α) of Gaussian noise on a batch drawn without replacement: 3.5 τ² α/σ'².

    Replace-one, so σ' = noise_multiplier / 2.

    Reference: DP-SRM, Lemma 3.7, with its conditions.
    """
    variance = (noise_multiplier / 2) ** 2
    if variance < 0.7:
        raise Refused(
            f"expected σ'² = (noise_multiplier/2)² >= 0.7 for Lemma 3.7, got {variance:.3g}; "
            "use the rdp accountant, or more noise"
        )
    if not 1 < alpha <= _largest_alpha(alpha, rate, variance):
        raise Refused(
            f"expected 1 < α <= 2σ'² log(1/(τα(1+σ'²)))/3 + 1 for Lemma 3.7, got α = {alpha:.3g}; "
            "use a smaller α, or the rdp accountant"
        )
    return 3.5 * rate**2 * alpha / variance


def _largest_alpha(alpha: float, rate: float, variance: float) -> float:
    return 2 * variance * math.log(1 / (rate * alpha * (1 + variance))) / 3 + 1


def sampled_gaussian_epsilon(
    noise_multiplier: float, *, rate: float, steps: int, delta: float
) -> float:
    """Return ε of T steps by Lemmas 3.7 and 3.9 of DP-SRM, at the best order they allow."""
    variance = (noise_multiplier / 2) ** 2
    low, high = 1.0, 2.0 + variance * 100
    for _ in range(100):
        middle = (low + high) / 2
        allowed = middle <= _largest_alpha(middle, rate, variance)
        low, high = (middle, high) if allowed else (low, middle)
    if low <= 1 + 1e-6:
        raise Refused(
            f"expected a rate and noise for which Lemma 3.7 allows an order above 1, got rate "
            f"{rate} and noise_multiplier {noise_multiplier}; use the rdp accountant"
        )

    def spent(alpha: float) -> float:
        rdp = sampled_gaussian_rdp(alpha, rate=rate, noise_multiplier=noise_multiplier)
        return steps * rdp + math.log(1 / delta) / (alpha - 1)

    best = minimize_scalar(spent, bounds=(1 + 1e-9, low), method="bounded")
    return float(min(best.fun, spent(low)))


def recursive_momentum_noise_multiplier(
    epsilon: float, *, delta: float, steps: int, records: int, batch: int, beta: float = 0.5
) -> float:
    """Return DP-SRM's noise ÷ bound on one record in the sum, by its Theorem 5.1.

    σ² = 14 T α C²/(β n² ε) on the mean, α − 1 = log(1/δ)/((1 − β)ε), with its conditions.
    """
    alpha = math.log(1 / delta) / ((1 - beta) * epsilon) + 1
    found = batch * math.sqrt(14 * steps * alpha / (beta * records**2 * epsilon))
    sampled_gaussian_rdp(alpha, rate=batch / records, noise_multiplier=found)
    return found


def adaptive_clipping_multiplier(noise_multiplier: float, *, count_noise: float) -> float:
    """Return z_Δ = (z⁻² − (2σ_b)⁻²)^(-½), the sum's multiplier next to a count on the same batch.

    Quantile-adaptive clipping releases with each clipped sum a count of the records that were not
    clipped, with noise of standard deviation `count_noise` (σ_b). Each record adds ½ or -½ to the
    count, so the count's own multiplier is 2σ_b, under every relation. Both together are one event
    with multiplier z, as if there were no count.

    Reference: Andrew et al. 2021, Differentially Private Learning with Adaptive Clipping, Thm 1.

    >>> round(adaptive_clipping_multiplier(1.0, count_noise=5.0), 4)
    1.005
    """
    count = 2 * count_noise
    if not 0 < noise_multiplier < count < math.inf:
        raise Refused(
            f"expected 0 < noise_multiplier < 2 count_noise < ∞, because the count alone must cost "
            f"less than both together, got {noise_multiplier} and {count}; add noise to the count"
        )
    return 1 / math.sqrt((1 / noise_multiplier - 1 / count) * (1 / noise_multiplier + 1 / count))


def truncated_rdp(alpha: float, *, rate: float, noise_multiplier: float) -> float:
    """Return ε(α) <= 7 γ² α/σ² of Gaussian noise on a batch drawn without replacement.

    Replace-one, so σ = noise_multiplier / 2, and the noise by itself is ρ-zCDP for ρ = 1/(2σ²).
    The source proves 13 γ² ρ α, which is below 7 γ² α/σ², for α < log(1/γ)/(4ρ) = σ² log(1/γ)/2
    where γ <= 0.1, ρ <= 0.1, log(1/γ) >= 3ρ(2 + log₂(1/ρ)) and log(1/γ) >= 6ρ. The paper leaves
    out the condition on ρ, that is σ >= √5. With the first two the others hold: at ρ = 0.1 the
    right sides are 1.6 and 0.6, they grow with ρ, and log 10 = 2.3.

    Reference: DP-NSGD, Proposition E.3; Bun et al. 2018, Theorem 11.
    """
    sigma = noise_multiplier / 2
    if sigma < math.sqrt(5) or not 0 < rate < 0.1:
        raise Refused(
            f"expected noise_multiplier / 2 >= √5 and rate < 0.1 for Proposition E.3, got "
            f"{sigma:.3g} and {rate:.3g}; use the rdp accountant"
        )
    largest = sigma**2 / 2 * math.log(1 / rate)
    if not 1 < alpha < largest:
        raise Refused(
            f"expected 1 < α < {largest:.4g} for Proposition E.3, got α = {alpha:.4g}; "
            "use a smaller α, or the rdp accountant"
        )
    return 7 * rate**2 * alpha / sigma**2
