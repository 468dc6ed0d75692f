"""The loop over entries as machine code, where Numba is installed: faster, with the same bits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from hushgrad.noise import standard
from hushgrad.rng import Rng

AddNormals = Callable[[Any, Any, Any, float, float], None]
"""`standard.add_normals`, or what does the same."""


AddWeighted = Callable[[Any, Any, float], None]
"""`standard.add_weighted_normals`, or what does the same."""


@functools.cache
def compiled_add_normals() -> AddNormals | None:
    """`standard.add_normals` as machine code; None where it cannot be had or its bits differ.

    The first call takes half a second, and one or two more where Numba has not yet kept the code.
    """
    return _compiled(standard.add_normals, _agrees)


@functools.cache
def compiled_add_weighted() -> AddWeighted | None:
    """`standard.add_weighted_normals` as machine code, on the same terms."""
    return _compiled(standard.add_weighted_normals, _weighted_agrees)


_Loop = TypeVar("_Loop", bound=Callable[..., None])


def _compiled(function: _Loop, agrees: Callable[[_Loop], bool]) -> _Loop | None:
    """This loop as machine code, if there is a compiler for it and its bits agree."""
    try:
        import numba
    except ImportError:  # not installed, or not for this version of NumPy
        return None
    if getattr(numba.config, "DISABLE_JIT", False):
        return None
    _teach()
    for kept in (True, False):
        try:
            # No fast-math: a product that is fused with a sum is not rounded, and bits differ.
            loop: Any = numba.njit(nogil=True, error_model="numpy", cache=kept)(
                inspect.unwrap(function)
            )
            return cast(_Loop, loop) if agrees(loop) else None
        except (OSError, RuntimeError):  # no folder to keep the code in, or no room there
            continue
        except numba.core.errors.NumbaError:  # a version that does not understand it
            break
    return None


def is_loaded() -> bool:
    """True when the machine code has been asked for in this process."""
    asked = (compiled_add_normals, compiled_add_weighted)
    return any(loop.cache_info().currsize > 0 for loop in asked)


@functools.cache
def _teach() -> None:
    """Tell Numba, once, what the functions are that the loop calls."""
    from numba.extending import overload

    overload(standard.as_float)(lambda bits: lambda bits: np.uint64(bits).view(np.float64))
    overload(standard.as_bits)(lambda x: lambda x: np.float64(x).view(np.uint64))
    for function in (
        standard.polynomial,
        standard.logarithm,
        standard.uniform_of_words,
        standard.normal_pair,
    ):
        source = inspect.unwrap(function)
        overload(function, strict=False)(functools.partial(_itself, source))


def _itself(source: Callable[..., Any], *types: Any) -> Callable[..., Any]:
    return source


def _agrees(compiled: AddNormals) -> bool:
    """Whether a few thousand releases have the bits of plain array operations."""
    words = Rng.fixed(0).words(4098)
    for dtype in (np.float32, np.float64):
        total = (standard.uniform_of_words(words[:4097]) - 0.5).astype(dtype)
        found, expected = np.empty(4097), np.empty(4097)
        compiled(words, total, found, 1.5, 2.0**-60)
        standard.add_pairs(standard.normal_pair, words, total, expected, 1.5, 2.0**-60)
        if not np.array_equal(found, expected):
            return False
    return True


def _weighted_agrees(compiled: AddWeighted) -> bool:
    """Whether a few thousand values have the bits of plain array operations."""
    words = Rng.fixed(0).words(4098)
    found, expected = np.full(4097, 0.3), np.full(4097, 0.3)
    compiled(words, found, -1.7)
    standard.add_weighted_pairs(standard.normal_pair, words, expected, -1.7)
    return np.array_equal(found, expected)
