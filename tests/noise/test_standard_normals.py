"""Logarithm, sine, cosine and the pairs made of them, against 40 digits."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from hushgrad.noise import standard
from hushgrad.noise.standard import laplace_pair, logarithm, normal_pair, uniform_of_words

RANDOM = np.random.default_rng(0).integers(0, 2**64, 1500, dtype=np.uint64)
POWERS = np.uint64(1) << np.arange(64, dtype=np.uint64)
WORDS = np.concatenate([RANDOM, POWERS, ~POWERS, POWERS - np.uint64(1), np.zeros(1, np.uint64)])
LOWEST, HIGHEST = 0, 2**64 - 1
# The borders of the quarters, their middles, and the words on either side.
ANGLES = [(k << 61) + d for k in range(8) for d in (0, 1 << 10, (1 << 61) - 1)]


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def errors(found: np.ndarray, exact: list[mpmath.mpf]) -> float:
    """The largest error in units of the last place."""
    units = np.spacing(np.abs(found)).tolist()
    pairs = zip(found.tolist(), exact, units, strict=True)
    return max(float(abs(x - y) / unit) for x, y, unit in pairs)


@pytest.fixture(autouse=True)
def _digits():
    with mpmath.workdps(40):
        yield


def test_uniform_is_exact() -> None:
    for word, u in zip(WORDS.tolist(), uniform_of_words(WORDS).tolist(), strict=True):
        assert mpmath.mpf(u) == mpmath.mpf(2 * (word >> 12) + 1) / 2**53
        assert 0 < u < 1


@pytest.mark.parametrize("near", [1.0, 0.5, math.sqrt(0.5), math.sqrt(0.125), 2.0**-53])
def test_the_logarithm_is_right_to_three_units_at_its_seams(near: float) -> None:
    u = near * (1 + np.arange(-300, 301) * 2.0**-52)
    u = u[u != 1]
    assert errors(logarithm(u), [mpmath.log(x) for x in u.tolist()]) < 3


def test_the_logarithm_is_right_to_three_units() -> None:
    u = uniform_of_words(WORDS)
    assert errors(logarithm(u), [mpmath.log(x) for x in u.tolist()]) < 3
    assert (logarithm(u) < 0).all()


@pytest.mark.parametrize(
    ("coefficients", "exact", "odd"),
    [(standard._SIN, mpmath.sin, True), (standard._COS, mpmath.cos, False)],
    ids=["sin", "cos"],
)
def test_sine_and_cosine_are_right_to_two_units(coefficients, exact, odd: bool) -> None:
    v = uniform_of_words(WORDS) - 0.5
    found = standard.polynomial(coefficients, v * v) * (v if odd else 1.0)
    assert errors(found, [exact(mpmath.pi / 2 * x) for x in v.tolist()]) < 2


def exact_pair(radius: int, angle: int) -> tuple[mpmath.mpf, mpmath.mpf]:
    """Box and Muller: the angle's first two bits are sign and exchange of the axes."""
    u = mpmath.mpf(2 * (radius >> 12) + 1) / 2**53
    v = mpmath.mpf(2 * (angle >> 10 & (1 << 52) - 1) + 1) / 2**53 - mpmath.mpf(1) / 2
    r = mpmath.sqrt(-2 * mpmath.log(u)) * (-1 if angle >> 63 else 1)
    x, y = r * mpmath.cos(mpmath.pi / 2 * v), r * mpmath.sin(mpmath.pi / 2 * v)
    return (y, x) if angle >> 62 & 1 else (x, y)


def test_pairs_are_right_to_four_units() -> None:
    angles = np.random.default_rng(1).permutation(WORDS)
    exact = [exact_pair(*p) for p in zip(WORDS.tolist(), angles.tolist(), strict=True)]
    for found, expected in zip(normal_pair(WORDS, angles), zip(*exact, strict=True), strict=True):
        assert errors(found, list(expected)) < 4


@pytest.mark.parametrize("angle", [*ANGLES, HIGHEST])
@pytest.mark.parametrize("radius", [LOWEST, 1 << 12, 1 << 63, HIGHEST - (1 << 13), HIGHEST])
def test_pairs_are_right_at_the_ends_and_borders(radius: int, angle: int) -> None:
    """None is 0 and none is infinite, and the one that is small is as right as the other."""
    pair = np.concatenate(normal_pair(words(radius), words(angle)))
    assert errors(pair, list(exact_pair(radius, angle))) < 4
    assert np.isfinite(pair).all()
    assert (pair != 0).all()


def test_the_tail_reaches_8_57_and_the_least_radius_is_2_to_minus_26() -> None:
    far, near = (np.hypot(*normal_pair(words(w), words(0)))[0] for w in (LOWEST, HIGHEST))
    assert far == pytest.approx(math.sqrt(2 * 53 * math.log(2)), rel=1e-14)
    assert near == pytest.approx(2.0**-26, rel=1e-14)


def test_the_angle_goes_around_once_evenly() -> None:
    """As many words in each of 4096 arcs: 12 bits in order are the arcs, up to reflection."""
    angles = (np.arange(4096, dtype=np.uint64) << np.uint64(52)) + np.uint64(1 << 51)
    x, y = normal_pair(np.full(4096, 1 << 63, np.uint64), angles)
    arcs = np.floor(np.arctan2(y, x) / (2 * np.pi) * 4096)
    assert len(np.unique(arcs)) == 4096


def test_the_54th_bit_of_the_angle_and_the_52nd_of_the_radius_count() -> None:
    here, there = (normal_pair(words(1 << 63), words(a)) for a in (1 << 61, (1 << 61) + (1 << 10)))
    assert here[1] != there[1]
    here, there = (normal_pair(words(r), words(0)) for r in (0, 1 << 12))
    assert here[0] != there[0]


def test_laplace_at_its_ends() -> None:
    x, y = laplace_pair(words(0), words(HIGHEST))
    assert x.item() == pytest.approx(-53 * math.log(2), rel=1e-14)
    assert y.item() == pytest.approx(2.0**-53, rel=1e-14)


def test_laplace_is_the_logarithm_with_a_sign() -> None:
    one, other = WORDS, WORDS[::-1].copy()
    for word, found in zip((one, other), laplace_pair(one, other), strict=True):
        sign = np.where(word & np.uint64(1), -1.0, 1.0)
        assert np.array_equal(found, sign * logarithm(uniform_of_words(word)))
