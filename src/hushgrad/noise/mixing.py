"""The noise of a release that is mixed from draws of several steps, made again from their tags.

A draw is a function of (key, step, tag), so no draw is kept: the tags are, in the ledger, and
without the key they tell nothing. Where C⁻¹ is banded, a step's noise is a weighted sum of the last
b draws. Where C is banded it is a recurrence over the noise of the last b − 1 steps, which a
`NoiseBuffer` keeps in memory; without it, all steps are made again from the first on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from hushgrad.noise import threads
from hushgrad.noise.compiled import AddWeighted, compiled_add_weighted, is_loaded
from hushgrad.noise.standard import add_weighted_pairs, normal_pair
from hushgrad.noise.strategy import Strategy
from hushgrad.rng import Rng

WORTH_COMPILING = 1 << 16
"""Entries; Numba takes half a second to load and saves 15 ns an entry."""

Vectors = list[Float64[ndarray, "_"]]
"""The entries of a whole sum, as vectors that follow each other."""


class NoiseBuffer:
    """The noise of a run's last steps, kept so that it need not be made again at each step.

    Secret: whoever has it can take the noise off. It belongs to a run's memory, never to a
    checkpoint, an algorithm's state or a file. It changes no release: one that stands at another
    step, or in another run, is not used, and is filled anew.

    >>> NoiseBuffer()
    NoiseBuffer(empty)
    """

    def __init__(self) -> None:
        self._tag, self._last = b"", list[Vectors]()

    def after(self, tag: bytes) -> list[Vectors] | None:
        """The noise of the last steps, the latest first, if the latest is the one of this tag."""
        return self._last if self._tag == tag else None

    def keep(self, tag: bytes, last: list[Vectors]) -> None:
        """Keep the noise of the last steps, the latest first and of this tag."""
        self._tag, self._last = tag, last

    def __repr__(self) -> str:
        return f"NoiseBuffer({f'{len(self._last)} steps' if self._last else 'empty'})"


def draw_key(rng: Rng, step: int, tag: bytes) -> Rng:
    """The key of the standard values that one release draws for itself."""
    return rng.derive("noise", step, tag)


def mixed(
    strategy: Strategy,
    tags: Sequence[bytes],
    places: Sequence[tuple[int, int]],
    *,
    rng: Rng,
    step: int,
    buffer: NoiseBuffer | None = None,
) -> Vectors:
    """The standardised noise of a step: row `step` of C⁻¹z.

    Args:
        strategy: the matrix C.
        tags: of the releases up to this step's, the oldest first; as many as it depends on.
        places: the length of each vector, and where it begins in a key stream.
        rng: the key.
        step: this step (t).
        buffer: what is kept of the steps before, where C is banded.
    """
    if strategy.inverse or strategy.bands == 1:
        noise = _zeros(places)
        weights = strategy.noising(strategy.bands)
        for back in reversed(range(len(tags))):
            key = draw_key(rng, step - back, tags[-1 - back])
            _add_draw(noise, places, key, float(weights[back]))
        return noise
    last = buffer.after(tags[-2]) if buffer is not None and step else None
    first = step if last is not None else 0
    last = list(last or [])
    for at in range(first, step + 1):
        last = [_recurred(strategy, last, places, draw_key(rng, at, tags[at])), *last]
        del last[strategy.bands - 1 :]
    if buffer is not None:
        buffer.keep(tags[-1], last)
    return last[0]


def _recurred(
    strategy: Strategy, last: list[Vectors], places: Sequence[tuple[int, int]], key: Rng
) -> Vectors:
    """y_t = (z_t − Σ c_k y_{t−k}) / c_0, for the noise y of the steps before, the latest first."""
    own, *rest = strategy.coefficients
    noise = _zeros(places)
    for coefficient, before in zip(rest, last, strict=False):  # there are fewer at the start
        _add_scaled(noise, before, -coefficient / own)
    _add_draw(noise, places, key, 1 / own)
    return noise


def _zeros(places: Sequence[tuple[int, int]]) -> Vectors:
    return [np.zeros(length) for length, _ in places]


def _add_scaled(noise: Vectors, other: Vectors, factor: float) -> None:
    def work(piece: tuple[int, slice]) -> None:
        k, part = piece
        noise[k][part] += factor * other[k][part]

    threads.in_threads(work, threads.pieces_of(map(len, noise)))


def _add_draw(noise: Vectors, places: Sequence[tuple[int, int]], key: Rng, weight: float) -> None:
    """Add the standard values of one key, times a weight."""
    add = _adder(sum(map(len, noise)))

    def work(piece: tuple[int, slice]) -> None:
        k, part = piece
        out, start = noise[k][part], places[k][1] + part.start
        stream = key.stream(start=start, room=threads.even(min(len(out), threads.CHUNK)))
        for chunk in threads.chunks(len(out)):
            some = out[chunk]
            add(stream.take(threads.even(len(some))), some, weight)

    threads.in_threads(work, threads.pieces_of(map(len, noise)))


def _adder(entries: int) -> AddWeighted:
    """What adds draws: the same bits compiled or plain, so that is a matter of time alone."""
    plain = partial(add_weighted_pairs, normal_pair)
    if entries >= WORTH_COMPILING or is_loaded():
        return compiled_add_weighted() or plain
    return plain
