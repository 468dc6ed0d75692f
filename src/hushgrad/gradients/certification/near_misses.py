"""Near misses: gradients that are off by so little that a flipped ReLU may have done it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from hushgrad.gradients.comparison import ROUGHLY, differs
from hushgrad.types import NotCovered

_Result = TypeVar("_Result")
Point = TypeVar("Point", int, int | None)

POINTS = range(3)
"""Where gradients are compared, at the later ones after a near miss."""


class NearMiss(NotCovered):
    """A gradient that is off by little, as where rounding flips a ReLU of one run.

    At another point it flips no longer, and what is wrong there stays so.
    """


def is_nearly_right(wrong: dict[str, float]) -> bool:
    """Is no gradient off by more than a flipped ReLU explains?"""
    return all(off <= ROUGHLY for off in wrong.values())  # not so where one is nan


def refusal_of(wrong: dict[str, float], where: str = "") -> NotCovered:
    """What to raise for these gradients that are off."""
    kind = NearMiss if is_nearly_right(wrong) else NotCovered
    return kind(f"{where}{differs(wrong)}")


def retry_near_misses(points: Sequence[Point], test: Callable[[Point], _Result]) -> _Result:
    """What the test returns at the first of these points where it is no near miss."""
    for point in points[:-1]:
        with suppress(NearMiss):
            return test(point)
    return test(points[-1])
