"""The matrix C of a matrix mechanism: how the noise of a step is mixed from draws of many steps.

The sums of a run, one row x_t for each step, are released as x + C⁻¹z with z standard Gaussian:
what a function of C·x + z could tell, and no more. C is lower triangular, so that the noise of a
step needs no later draws, and Toeplitz, so that a few coefficients say all of it.

Reference: Denisov et al. 2022, Improved Differential Privacy for SGD via Optimal Private Linear
Operators on Adaptive Streams, for why sums may depend on earlier releases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from numpy import ndarray
from scipy.signal import lfilter

from hushgrad.types import Refused

_LARGEST = 2.0**16
"""Leaves a draw 36 of float64's 52 bits."""

Column = Float64[ndarray, "_"]


@dataclass(frozen=True)
class Strategy:
    """A lower-triangular Toeplitz matrix C, which has few bands, or whose inverse has.

    Make one by `banded` or `banded_inverse`.

    Args:
        coefficients: the first entries of the first column of C, or of C⁻¹; all others in it are 0.
        inverse: whether they are those of C⁻¹.

    Raises:
        ValueError: if a coefficient is not finite, or the first is not positive.

    Example:
        >>> Strategy((1.0, 0.5)).column(3).tolist()
        [1.0, 0.5, 0.0]
    """

    coefficients: tuple[float, ...]
    inverse: bool = False

    def __post_init__(self) -> None:
        values = self.coefficients
        if not (values and all(map(math.isfinite, values)) and values[0] > 0):
            raise ValueError(
                "expected finite coefficients, the first above 0, since the noise of a step must "
                f"have a share that is drawn for it alone, got {values}; pass those of the "
                "diagonal and of the bands below it, in this order"
            )

    @property
    def bands(self) -> int:
        """How many diagonals (b) of C, or of C⁻¹, are not 0."""
        return len(self.coefficients)

    def memory(self, step: int) -> int:
        """How many releases before this step its noise depends on."""
        if self.bands == 1:
            return 0
        return min(step, self.bands - 1) if self.inverse else step

    def column(self, steps: int) -> Column:
        """The first column of C for a run of so many steps (T)."""
        return _inverted(self.coefficients, steps) if self.inverse else self._padded(steps)

    def noising(self, steps: int) -> Column:
        """The first column of C⁻¹: the weights of this step's draw, the one before it, …"""
        return self._padded(steps) if self.inverse else _inverted(self.coefficients, steps)

    def sensitivity(self, steps: int, *, cycle: int = 1) -> float:
        """How far C·x moves if one record joins: a bound that is reached where CᵀC has no signs.

        The record takes part at every `cycle`-th step, from any first one, by a vector of norm 1
        at most each time: √Σ|CᵀC| over such steps, the largest for any first one.

        Reference: Choquette-Choo et al. 2023, Multi-Epoch Matrix Factorization Mechanisms.

        >>> banded([1.0]).sensitivity(9)
        3.0
        """
        column = self.column(steps)
        totals = np.zeros(cycle)  # Σ|CᵀC| by the first step
        first = np.arange(steps) % cycle
        for lag in range(0, steps, cycle):
            # (CᵀC)[s, s + lag] for s = 0, 1, …: a sum that ends earlier, the later s is.
            products = np.cumsum(column[lag:] * column[: steps - lag])[::-1]
            sums = np.bincount(first[: steps - lag], np.abs(products), minlength=cycle)
            totals += sums if lag == 0 else 2 * sums
        return math.sqrt(totals.max())

    def require_stable(self, steps: int) -> None:
        """Refuse a C by which noise, or what it is accounted for, outgrows float64's precision.

        A step's own draw is what protects it. Beside far larger noise of the steps before, which
        the releases of those steps tell nearly, it would be rounded off.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            sizes = np.abs([self.column(steps), self.noising(steps)]).max(axis=1)
            own = abs(self.noising(1)[0])
        if not (sizes[0] * own <= _LARGEST and sizes[1] <= _LARGEST * own):
            raise Refused(
                f"expected coefficients whose matrix and inverse stay below {_LARGEST:g} times "
                f"their diagonals over {steps} steps, got up to {max(sizes):.3g}; use bands that "
                "get smaller, such as those of least_error"
            )

    def column_norm(self, steps: int) -> float:
        """The largest norm of a column of C: how far C·x moves if a record takes part once."""
        return float(np.linalg.norm(self.column(steps)))

    def error(self, steps: int, workload: Column | None = None) -> float:
        """The root mean square error of the running sums, for noise of scale 1.

        Compare it at equal privacy: times the noise multiplier that a run with this C needs.
        `workload` is what becomes of a step's noise in the steps after it; 1, 1, … for sums.
        """
        sums = np.ones(steps) if workload is None else workload[:steps]
        left = np.convolve(sums, self.noising(steps))[:steps]
        return math.sqrt(float(np.arange(steps, 0, -1) / steps @ left**2))

    def _padded(self, steps: int) -> Column:
        column = np.zeros(steps)
        kept = self.coefficients[:steps]
        column[: len(kept)] = kept
        return column


def banded(coefficients: Iterable[float]) -> Strategy:
    """C with these bands. Its noise is a recurrence over that of the steps before.

    Args:
        coefficients: the diagonal of C and the bands below it.

    >>> banded([1.0, 0.5]).noising(3).tolist()
    [1.0, -0.5, 0.25]
    """
    return Strategy(tuple(map(float, coefficients)))


def banded_inverse(coefficients: Iterable[float]) -> Strategy:
    """C whose inverse has these bands. Its noise needs the draws of the last b − 1 steps only.

    Args:
        coefficients: the weights of a step's own draw, of the one before it, and so on.

    >>> banded_inverse([1.0, -0.5]).column(3).tolist()
    [1.0, 0.5, 0.25]
    """
    return Strategy(tuple(map(float, coefficients)), inverse=True)


def _inverted(coefficients: tuple[float, ...], steps: int) -> Column:
    """The first column of the inverse matrix: the power series 1 / Σ c_k xᵏ."""
    impulse = np.zeros(steps)
    impulse[:1] = 1.0
    found: Column = lfilter([1.0], coefficients, impulse)
    return found
