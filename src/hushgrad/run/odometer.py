"""ε so far: what the steps taken would cost, had they been the plan."""

from __future__ import annotations

import math
from dataclasses import replace

from hushgrad.run.plan import Plan

LABEL = "so far, had this been the plan"
"""What must stand beside every such number: a run keeps its plan's ε, whenever it ends."""

_POINTS = 20


class Odometer:
    """Readings of ε at some steps of a plan, each computed when it is first asked for.

    A faster accountant is used, which overstates ε slightly, and a step counts as the next of 20
    steps: a reading is never too small.
    """

    def __init__(self, plan: Plan) -> None:
        # Progress bars ask often; the plan's own accountant may take seconds.
        self._plan = replace(plan, accountant=plan.accountant.sketch())
        self._known: dict[int, float] = {}

    @property
    def points(self) -> list[int]:
        """The steps at which ε is computed, including the last one of the plan."""
        steps = self._plan.steps
        return sorted({math.ceil(steps * k / _POINTS) for k in range(1, _POINTS + 1)})

    def epsilon(self, steps: int) -> float:
        """Return the most that a plan of so many steps would cost; 0 before the first step."""
        if steps == 0:
            return 0.0
        # Rounded up to a computed step: ε grows with the steps.
        point = next(p for p in self.points if p >= steps)
        if point not in self._known:
            self._known[point] = self._plan.epsilon_after(point)
        return self._known[point]

    def curve(self, steps: int) -> list[tuple[int, float]]:
        """Return the readings up to the first computed step from `steps` on."""
        passed = [p for p in self.points if p < steps]
        return [(p, self.epsilon(p)) for p in [*passed, *([steps] if steps else [])]]
