"""Attacks on the bits of Gaussian noise: can a known record be told from one noisy sum?

Each attack sees one release of a sum that is either 0 or a known record of norm 1, and gives a
score; `auc` is the probability that the score of a sum with the record is the higher one. Float32
noise as `torch.randn` draws it loses to all of them; an attack that learns nothing scores 0.5.

The attacks know how the noise was made. `torch.randn` fills blocks of 16: entries j and j + 8 are
`√(−2 log u)·(cos 2πv, sin 2πv)` with u and v of 24 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from hushgrad.noise import gaussian, release, standard_normal
from hushgrad.rng import Rng
from hushgrad.types import Bounded

NoiseMechanism = Callable[[Tensor, int], Tensor]
"""Maps a float32 sum and the trial's number to the sum with noise of standard deviation 1."""

_LATTICE = 2.0**24  # torch.randn draws its uniforms with 24 bits
_RESOLVED = 2.0**16  # lattice steps from 0 within which float32 separates neighbouring radii


def float32_noise(total: Tensor, trial: int) -> Tensor:
    """Add noise as is common: `sum + torch.randn` in float32."""
    generator = torch.Generator().manual_seed(trial)
    return total + torch.randn(total.shape, generator=generator)


def float64_noise(total: Tensor, trial: int) -> Tensor:
    """Add noise of 52 bits in float64 without rounding to a grid: half of the remedy."""
    return total.double() + standard_normal(len(total), Rng.fixed(trial))


def hushgrad_noise(total: Tensor, trial: int) -> Tensor:
    """Add noise as hushgrad does: `noise.release`, on a public grid."""
    bounded = Bounded({"sum": total}, l2=1.0)
    return release(bounded, gaussian(1.0), rng=Rng.fixed(trial), step=0).values["sum"]


def known_record(size: int) -> Tensor:
    """Return a float32 vector of norm 1 with entries of all sizes."""
    entries: Tensor = torch.randn(size, generator=torch.Generator().manual_seed(1))
    return entries.div_(entries.norm())


@dataclass(frozen=True)
class Attack:
    """An attack: `score(release, record)` is high if the release seems to contain the record."""

    name: str
    score: Callable[[Float[ndarray, " n"], Float[ndarray, " n"]], float]

    def auc(self, mechanism: NoiseMechanism, *, trials: int = 40, size: int = 1 << 16) -> float:
        """Return the probability that the score ranks a release with the record above one without.

        It is ½ for an attack that learns nothing.
        """
        record = known_record(size)
        known = record.double().numpy()
        with_record, without = (
            [
                self.score(mechanism(total, 2 * i + there).double().numpy(), known)
                for i in range(trials)
            ]
            for there, total in ((1, record), (0, torch.zeros(size)))
        )
        pairs = np.subtract.outer(with_record, without)
        return float((pairs > 0).mean() + 0.5 * (pairs == 0).mean())


def _pairs(noise: Float[ndarray, " n"]) -> tuple[ndarray, ndarray]:
    """Return both entries of each Box-Muller pair, in the order in which torch draws them."""
    blocks = noise.reshape(-1, 2, 8)
    return blocks[:, 0].ravel(), blocks[:, 1].ravel()


def _on_radius_lattice(noise: Float[ndarray, " n"]) -> float:
    x, y = _pairs(noise)
    steps = np.exp(-(x**2 + y**2) / 2) * _LATTICE
    steps = steps[(steps > 0.5) & (steps < _RESOLVED)]
    return -float(np.abs(steps - np.rint(steps)).mean()) if len(steps) else 0.0


def _on_angle_lattice(noise: Float[ndarray, " n"]) -> float:
    x, y = _pairs(noise)
    steps = np.arctan2(y, x) / (2 * np.pi) * _LATTICE
    return -float(np.abs(steps - np.rint(steps)).mean())


def _by_hypothesis(fits: Callable[[ndarray], float]) -> Callable[[ndarray, ndarray], float]:
    """Score how much more the release looks like noise once the record is subtracted."""
    return lambda seen, record: fits(seen - record) - fits(seen)


def _low_bits(
    dtype: type[np.floating[Any]], bits: type[np.unsignedinteger[Any]]
) -> Callable[[ndarray, ndarray], float]:
    """Score zeros in the low bits: small values that result from cancellation have lost them."""

    def score(seen: ndarray, record: ndarray) -> float:
        small = np.abs(seen[np.abs(seen) < np.abs(record) / 16]).astype(dtype)
        return float(((small.view(bits) & bits(0xF)) == 0).mean()) if len(small) else 0.0

    return score


RADIUS = Attack("radius lattice", _by_hypothesis(_on_radius_lattice))
ANGLE = Attack("angle lattice", _by_hypothesis(_on_angle_lattice))
LOW_BITS = Attack("low bits", _low_bits(np.float32, np.uint32))
LOW_BITS_64 = Attack("low bits of float64", _low_bits(np.float64, np.uint64))
ATTACKS = (RADIUS, ANGLE, LOW_BITS, LOW_BITS_64)


@dataclass(frozen=True)
class Radii:
    """Statistics of many Box-Muller pairs: the largest radius, and how many are exactly (0, 0)."""

    pairs: int
    largest: float
    atoms: int

    @property
    def due_beyond(self) -> float:
        """The expected number of ideal pairs whose radius is above the largest one seen."""
        return self.pairs * float(np.exp(-(self.largest**2) / 2))


def radii(mechanism: NoiseMechanism, *, draws: int) -> Radii:
    """Draw much noise alone, to find where its tail ends and whether (0, 0) has an atom.

    Box-Muller from 24 bits ends at √(2 log 2²⁴) = 5.768 and returns (0, 0) with probability 2⁻²⁴,
    which an ideal Gaussian never does.
    """
    largest, atoms, size = 0.0, 0, min(draws, 1 << 22)
    for trial in range(draws // size):
        x, y = _pairs(mechanism(torch.zeros(size), trial).double().numpy())
        squares = x**2 + y**2
        largest, atoms = max(largest, float(squares.max())), atoms + int((squares == 0).sum())
    return Radii(draws // size * size // 2, float(np.sqrt(largest)), atoms)
