"""Adding noise: a bounded sum in, a release out, with the event that made it.

Noise that is drawn and added in float32 gives a known record away in one step: its tail ends at
5.77 standard deviations, and its bits lie on lattices that the sum shifts. So noise is made in
float64 from 52 bits each of radius and angle, added in float64, and the result is rounded to a
public grid, on which every output can come from every sum.

Reference: `docs/noise.md` shows the attacks; Mironov 2012, On Significance of the Least
Significant Bits for Differential Privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import dp_accounting
import numpy as np
import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from dp_accounting import DpEvent
from jaxtyping import Float64
from torch import Tensor

from hushgrad.rng import Rng
from hushgrad.types import Bounded, Refused, Released

_CHUNK = 1 << 20  # entries that are worked on at once
_GRID_BITS = 14  # the grid's step is at most 2⁻¹⁴ of the noise's standard deviation


@dataclass(frozen=True)
class Noise:
    """A kind of noise.

    `scale` is its size for a given bound on one record, `draw(count, rng, start)` its standard
    values, and `event` what adding it to such a sum is to an accountant.
    """

    name: str
    noise_multiplier: float
    event: DpEvent
    scale: Callable[[Bounded], float]
    draw: Callable[[int, Rng, int], Tensor]

    def __repr__(self) -> str:
        return f"{self.name}({self.noise_multiplier})"


def gaussian(noise_multiplier: float) -> Noise:
    """Gaussian noise of standard deviation σ times the sum's `l2`.

    σ is noise ÷ the bound on one record, under every relation. With σ = 0 nothing is private, and
    the event says so.
    """
    _require_multiplier(noise_multiplier)
    event = (
        dp_accounting.GaussianDpEvent(noise_multiplier)
        if noise_multiplier
        else dp_accounting.NonPrivateDpEvent()
    )
    return Noise(
        "gaussian",
        noise_multiplier,
        event,
        lambda bounded: noise_multiplier * bounded.l2,
        standard_normal,
    )


def laplace(noise_multiplier: float) -> Noise:
    """Laplace noise of scale b = multiplier × the sum's `l1`; refused where no `l1` is stated.

    Scaled by a Euclidean bound it would not be private.
    """
    _require_multiplier(noise_multiplier)
    if noise_multiplier == 0:
        raise ValueError("expected a Laplace multiplier above 0, got 0; use gaussian(0.0)")

    def scale(bounded: Bounded) -> float:
        if bounded.l1 is None:
            raise Refused(
                "Laplace noise needs a bound on the sum of absolute values, and this sum states a "
                "Euclidean one only; use gaussian, or clip in the l1 norm and state l1"
            )
        return noise_multiplier * bounded.l1

    event = dp_accounting.LaplaceDpEvent(noise_multiplier)
    return Noise("laplace", noise_multiplier, event, scale, standard_laplace)


def _require_multiplier(value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"expected a noise multiplier >= 0 and finite, got {value}")


def release(bounded: Bounded, noise: Noise, *, rng: Rng, step: int) -> Released:
    """Add noise to a sum, once, and round the result to a public grid.

    Guarantees: each value is `Δ·rint((sum + noise)/Δ)`, computed in float64, with Δ a power of two
    that depends on the noise's scale alone. The noise is a function of (key, step, tensor, digest
    of the sum): the same sum at the same step gets the same noise, any other sum fresh noise.
    """
    scale = noise.scale(bounded)
    values, digests = {}, []
    for name, total in bounded.sum.items():
        digest = _digest(total, rng.derive("digest", step, name))
        digests.append(digest)
        own = rng.derive("noise", step, name, digest)
        values[name] = _with_noise(total, noise, scale, own)
    overall = rng.derive("release", step, *digests).words(2).tobytes()
    return Released(values, noise.event, bounded.l2, overall)


def grid(scale: float) -> float:
    """The step Δ of the grid that releases with noise of this scale lie on.

    >>> grid(1.0) == 2.0**-14 and grid(1.9) == 2.0**-14 and grid(2.0) == 2.0**-13
    True
    """
    return 2.0 ** (math.frexp(scale)[1] - 1 - _GRID_BITS)


def _with_noise(total: Tensor, noise: Noise, scale: float, rng: Rng) -> Tensor:
    if scale == 0:
        return total.double()
    step = grid(scale)
    released = torch.empty(total.numel(), dtype=torch.float64, device=total.device)
    for start, part in enumerate_chunks(total.flatten()):
        drawn = noise.draw(len(part), rng, start).to(total.device)
        value = (part.double() + scale * drawn).div_(step).round_().mul_(step)
        released[start : start + len(part)] = value
    return released.view(total.shape)


def enumerate_chunks(flat: Tensor) -> list[tuple[int, Tensor]]:
    """The pieces of a vector and where they start; what is drawn for one depends on none other."""
    return [(start, flat[start : start + _CHUNK]) for start in range(0, len(flat), _CHUNK)]


def standard_normal(count: int, rng: Rng, start: int = 0) -> Float64[Tensor, " count"]:
    """Normal numbers by Box and Muller: `√(−2 log u)·(cos 2πv, sin 2πv)`.

    u and v have 52 bits each and are never 0 or 1, so the largest is 8.57 and none is exactly 0.
    `start` must be even: radius and angle of a pair are two words of the stream.
    """
    half = -(-count // 2)
    u = torch.from_numpy(rng.uniforms(2 * half, start=start))
    radius = u[:half].log_().mul_(-2).sqrt_()
    angle = u[half:].mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


def standard_laplace(count: int, rng: Rng, start: int = 0) -> Float64[Tensor, " count"]:
    """Laplace numbers of scale 1, `±log u`, the sign from the same word's lowest bit."""
    words = rng.words(count, start=start)
    u = ((words >> np.uint64(12)) + 0.5) * 2.0**-52
    sign = 1.0 - 2.0 * (words & np.uint64(1))
    return torch.from_numpy(sign * np.log(u))


def _digest(total: Tensor, rng: Rng) -> bytes:
    """A keyed digest of a tensor's bits: two sums share one with probability below 2⁻⁷⁰.

    Poly1305 under a key of this step and tensor: a universal hash, ten times as fast as a SHA.
    """
    plain = total.detach().cpu().contiguous()
    mac = Poly1305(rng.words(4).tobytes())
    mac.update(f"{plain.dtype} {tuple(plain.shape)} ".encode())
    mac.update(plain.flatten().view(torch.uint8).numpy().data)
    return mac.finalize()
