"""Standard values from random words, and adding them: the same bits everywhere.

Everything is +, −, ×, ÷, √ and rounding of float64, in one order, and each of these has one right
result on every machine. So the functions give the same bits on NumPy arrays, where they are plain
array operations, and as loops in machine code, where `hushgrad.noise.compiled` makes them so.
Library functions for logarithm, sine and cosine would not: their last bits differ.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Float64, UInt64
from numpy import ndarray
from torch import Tensor

from hushgrad.rng import Rng

Pair = Callable[
    [UInt64[ndarray, " pairs"], UInt64[ndarray, " pairs"]],
    tuple[Float64[ndarray, " pairs"], Float64[ndarray, " pairs"]],
]
"""Two standard values from two random words."""

# Least relative error over the range, by Remez's exchange in 60 digits, lowest power first:
_LOG = (  # 2·atanh(s)/s in s², for |s| ≤ 3 − 2√2, within 2⁻⁵⁹
    2.0,
    0.6666666666666765,
    0.39999999999298885,
    0.28571428761346607,
    0.2222219698825046,
    0.18183635094192896,
    0.15312443756902233,
    0.14810529836287667,
)
_SIN = (  # sin(π/2·v)/v in v², for |v| ≤ ½, within 2⁻⁵⁸
    1.5707963267948966,
    -0.6459640975062443,
    0.07969262624603957,
    -0.00468175413228242,
    0.00016044115029166428,
    -3.598641754487236e-06,
    5.633721016484235e-08,
)
_COS = (  # cos(π/2·v) in v², for |v| ≤ ½, within 2⁻⁶⁴
    1.0,
    -1.2337005501361697,
    0.2536695079010466,
    -0.020863480763308004,
    0.00091926027414677,
    -2.52020365582037e-05,
    4.7106035811494286e-07,
    -6.320557322387727e-09,
)
_LN_2 = 0.6931471805599453
_ROOT_HALF = np.uint64(0x3FE6A09E667F3BCD)  # the bits of √½
_ONE = np.uint64(0x3FF0000000000000)  # the bits of 1.0
_UP = _ONE - _ROOT_HALF
_TWO_52 = np.uint64(0x4330000000000000)  # the bits of 2⁵²
_MANTISSA = np.uint64(0x000FFFFFFFFFFFFF)
_SIGN = np.uint64(1 << 63)
_0, _1, _2, _12, _52, _62, _63 = (np.uint64(n) for n in (0, 1, 2, 12, 52, 62, 63))


def as_float(bits: UInt64[ndarray, " n"]) -> Float64[ndarray, " n"]:
    """The numbers that have these bits."""
    return bits.view(np.float64)


def as_bits(x: Float64[ndarray, " n"]) -> UInt64[ndarray, " n"]:
    """The bits of these numbers."""
    return x.view(np.uint64)


def polynomial(
    coefficients: tuple[float, ...], x: Float64[ndarray, " n"]
) -> Float64[ndarray, " n"]:
    """Horner's rule, the lowest power's coefficient first; a product is rounded before its sum."""
    value: Float64[ndarray, " n"] = x * coefficients[-1]
    for k in range(2, len(coefficients)):
        value = (value + coefficients[-k]) * x
    return value + coefficients[0]


def logarithm(u: Float64[ndarray, " n"]) -> Float64[ndarray, " n"]:
    """log u of a normal positive number: u = 2ᵉ·m with √½ ≤ m < √2, and log m = 2·atanh(s)."""
    shifted = as_bits(u) + _UP
    e = as_float((shifted >> _52) | _TWO_52) - (2.0**52 + 1023)
    m = as_float((shifted & _MANTISSA) + _ROOT_HALF)
    s = (m - 1.0) / (m + 1.0)
    result: Float64[ndarray, " n"] = e * _LN_2 + s * polynomial(_LOG, s * s)
    return result


def uniform_of_words(words: UInt64[ndarray, " n"]) -> Float64[ndarray, " n"]:
    """`(k + ½)·2⁻⁵²` with k the word's first 52 bits: never 0, never 1."""
    return as_float((words >> _12) | _ONE) - 1.0 + 2.0**-53


def normal_pair(
    radius: UInt64[ndarray, " pairs"], angle: UInt64[ndarray, " pairs"]
) -> tuple[Float64[ndarray, " pairs"], Float64[ndarray, " pairs"]]:
    """Two normal numbers by Box and Muller: `√(−2 log u)` times a point of the unit circle.

    The angle has 54 bits: two choose one of the quarters around the four half-axes, 52 the place
    `(k + ½)·2⁻⁵²` in it. So no number is exactly 0, and the largest is 8.57.
    """
    r = np.sqrt(-2.0 * logarithm(uniform_of_words(radius)))
    v = uniform_of_words(angle << _2) - 0.5
    square = v * v
    across, along = as_bits(v * polynomial(_SIN, square)), as_bits(polynomial(_COS, square))
    swapped = (across ^ along) & (_0 - ((angle >> _62) & _1))
    r = as_float(as_bits(r) | (angle & _SIGN))
    return r * as_float(along ^ swapped), r * as_float(across ^ swapped)


def laplace_pair(
    one: UInt64[ndarray, " pairs"], other: UInt64[ndarray, " pairs"]
) -> tuple[Float64[ndarray, " pairs"], Float64[ndarray, " pairs"]]:
    """Two Laplace numbers of scale 1, `±log u`, the sign from the same word's lowest bit."""
    x, y = logarithm(uniform_of_words(one)), logarithm(uniform_of_words(other))
    return as_float(as_bits(x) ^ (one << _63)), as_float(as_bits(y) ^ (other << _63))


def add_pairs(
    pair: Pair,
    words: UInt64[ndarray, " even"],
    total: Float[ndarray, " n"],
    out: Float64[ndarray, " n"],
    scale: float,
    step: float,
) -> None:
    """Write `step·rint((total + scale·value)/step)` to `out`; `step` is a power of two.

    Entries 2i and 2i + 1 get the two values that words 2i and 2i + 1 make.
    """
    values = np.stack(pair(words[0::2], words[1::2]), axis=1).ravel()[: len(total)]
    values *= scale
    values += total
    values *= 1.0 / step
    np.rint(values, out=values)
    np.multiply(values, step, out=out)


def add_normals(
    words: UInt64[ndarray, " even"],
    total: Float[ndarray, " n"],
    out: Float64[ndarray, " n"],
    scale: float,
    step: float,
) -> None:
    """What `add_pairs(normal_pair, …)` does, entry by entry. Slow, unless it is compiled."""
    per_step = 1.0 / step
    for i in range(len(total) // 2):
        x, y = normal_pair(words[2 * i], words[2 * i + 1])
        out[2 * i] = np.rint((scale * x + total[2 * i]) * per_step) * step
        out[2 * i + 1] = np.rint((scale * y + total[2 * i + 1]) * per_step) * step
    if len(total) % 2:
        x, _ = normal_pair(words[len(total) - 1], words[len(total)])
        out[len(total) - 1] = np.rint((scale * x + total[len(total) - 1]) * per_step) * step


def add_weighted_pairs(
    pair: Pair,
    words: UInt64[ndarray, " even"],
    out: Float64[ndarray, " n"],
    weight: float,
) -> None:
    """Add `weight·value` to `out`, which has values of other steps in it already."""
    values = np.stack(pair(words[0::2], words[1::2]), axis=1).ravel()[: len(out)]
    values *= weight
    out += values


def add_weighted_normals(
    words: UInt64[ndarray, " even"], out: Float64[ndarray, " n"], weight: float
) -> None:
    """What `add_weighted_pairs(normal_pair, …)` does, entry by entry. Slow, unless compiled."""
    for i in range(len(out) // 2):
        x, y = normal_pair(words[2 * i], words[2 * i + 1])
        out[2 * i] += weight * x
        out[2 * i + 1] += weight * y
    if len(out) % 2:
        x, _ = normal_pair(words[len(out) - 1], words[len(out)])
        out[len(out) - 1] += weight * x


def standard_normal(count: int, rng: Rng, start: int = 0) -> Float64[Tensor, " count"]:
    """Return independent standard normal numbers in float64, bit-identical on every machine.

    Args:
        count: how many.
        rng: the key that they follow from.
        start: the first word of the key's stream to use; even, as a pair of numbers takes two
            words.

    Example:
        >>> standard_normal(3, Rng.fixed(0)).shape
        torch.Size([3])

    Reference: Box and Muller 1958, A Note on the Generation of Random Normal Deviates.
    """
    words = rng.words(count + count % 2, start=start)
    return torch.from_numpy(np.stack(normal_pair(words[0::2], words[1::2]), axis=1).ravel()[:count])
