"""The probabilities themselves, counted on the grid of uniforms and not estimated."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from numpy import ndarray

from hushgrad.rng import Rng
from hushgrad.sampling.draws import independent_draws, slice_of_shuffle, subset

WINDOW = 64
GRID = 2**52


class Given(Rng):
    """A generator that gives these uniforms, and then ones that are as small as can be."""

    def __init__(self, uniforms: ndarray) -> None:
        super().__init__(b"", reproducible=True)
        self.given = uniforms

    def uniforms(self, count: int, *, start: int = 0) -> ndarray:
        return self.given if start == 0 else np.full(count, 2.0**-53)


class GivenWords(Rng):
    """A generator that gives these words, and then 0, 1, 2 and so on."""

    def __init__(self, words: list[int]) -> None:
        super().__init__(b"", reproducible=True)
        self.given = words

    def words(self, count: int, *, start: int = 0) -> ndarray:
        rest = range(count - len(self.given))
        return np.array([*self.given, *rest][:count], dtype=np.uint64)


def chance_of_a_record_within(distance: int, rate: float) -> Fraction:
    """The exact share of uniforms for which one of the next `distance` positions is taken.

    Only the uniforms about the border need be tried: those above it take a position.
    """
    border = int((1 - Fraction(rate)) ** distance * GRID)
    below, above = max(border - WINDOW, 0), min(border + WINDOW, GRID)
    tried = (np.arange(below, above) + 0.5) * 2.0**-52
    jump = int(1 / rate)
    taken = independent_draws(4 * WINDOW * jump, rate=rate, rng=Given(tried))
    near = len(taken)  # a distance beyond the jump takes no position
    if distance < jump:
        near = int((np.diff(taken, prepend=-1) <= distance).sum())
    assert 0 < near < len(tried)
    return Fraction(GRID - above + near, GRID)


@pytest.mark.parametrize("rate", [1e-4, 1e-3, 0.03, 0.2, 0.3334, 0.5, 0.51, 0.7, 0.97])
def test_a_record_is_taken_with_its_rate_given_those_before(rate: float) -> None:
    jump = int(1 / rate)
    places = {1, 2, 3, jump // 2, jump - 1, jump} & set(range(1, jump + 1))
    for place in places:
        before = chance_of_a_record_within(place - 1, rate) if place > 1 else Fraction(0)
        within = chance_of_a_record_within(place, rate)
        error = abs((within - before) / (1 - before) - Fraction(rate))
        assert error < Fraction(1, 2**49)


def test_no_position_is_favoured_by_the_remainder() -> None:
    """2⁶⁴ is 1 above a multiple of 3: its last word must be drawn again."""
    last = 2**64 - 1
    assert subset(1, num_records=3, rng=GivenWords([last, 2])).tolist() == [2]
    assert subset(1, num_records=3, rng=GivenWords([last - 1, 0])).tolist() == [2]
    assert subset(1, num_records=4, rng=GivenWords([last, 0])).tolist() == [3]


def test_a_set_is_the_first_different_positions_drawn() -> None:
    assert subset(3, num_records=10, rng=GivenWords([7, 7, 2, 17, 9, 1])).tolist() == [2, 7, 9]


def test_a_set_is_drawn_on_until_it_is_full() -> None:
    assert subset(2, num_records=9, rng=GivenWords([5] * 40)).tolist() == [0, 5]


def test_equal_tickets_put_no_record_into_two_batches() -> None:
    tickets = GivenWords([4, 9, 4, 4, 1, 9])
    batches = [slice_of_shuffle(6, start=start, stop=start + 2, rng=tickets) for start in (0, 2, 4)]
    assert sorted(np.concatenate(batches).tolist()) == list(range(6))
