"""The curves of a run as a picture: private metrics as they were released, and ε so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hushgrad.files import open_atomically
from hushgrad.run.metrics import Reading
from hushgrad.run.odometer import LABEL, Odometer
from hushgrad.run.plan import Plan

_SPAN = 50


def save_curves(plan: Plan, readings: Sequence[Reading], path: Path, *, steps: int) -> None:
    """Draw the metrics of each step and their means over 50 steps, and ε, into an image file.

    Args:
        plan: the run's.
        readings: the metrics as they were released, one reading for each step.
        path: the file, whose ending says of which kind it is.
        steps: how many were taken.
    """
    from matplotlib.figure import Figure  # takes a second to import

    watched = plan.metrics.watched if plan.metrics else ()
    shown = [(("loss",), "loss"), (("clipped", *watched), "share of the batch")]
    # Without metrics there is still ε to draw.
    panels = shown if readings else []
    figure = Figure(figsize=(6, 3 * (len(panels) + 1)), layout="constrained")
    axes = figure.subplots(len(panels) + 1, 1, squeeze=False)[:, 0]
    for axis, (names, label) in zip(axes, panels, strict=False):
        for name in names:
            # Steps are counted from 1 for readers, from 0 in the run.
            places = [reading.step + 1 for reading in readings]
            raw = [reading.values[name] for reading in readings]
            (line,) = axis.plot(places, means(raw), label=name)
            # Single readings are mostly noise, and drawn faintly behind their means.
            axis.plot(places, raw, ".", markersize=2, alpha=0.4, color=line.get_color())
        axis.set(ylabel=f"{label}, with noise", xlim=(0, plan.steps))
        axis.legend()
    _draw_epsilon(axes[-1], plan, steps)
    for axis in axes:
        axis.grid(alpha=0.3)
    with open_atomically(path) as file:
        figure.savefig(file, format=path.suffix[1:])


def means(values: Sequence[float], *, span: int = _SPAN) -> list[float]:
    """The mean over the last `span` values, at each of them.

    Args:
        values: numbers in their order.
        span: over how many; fewer at the beginning.

    >>> means([1.0, 3.0, 5.0], span=2)
    [1.0, 2.0, 4.0]
    """
    return [
        math.fsum(values[max(0, i + 1 - span) : i + 1]) / min(i + 1, span)
        for i in range(len(values))
    ]


def _draw_epsilon(axis: Any, plan: Plan, steps: int) -> None:
    axis.set(xlabel="steps", ylabel=f"ε at δ = {plan.delta:g}", xlim=(0, plan.steps))
    if plan.noise_multiplier == 0:
        axis.text(0.5, 0.5, "no noise: not private", transform=axis.transAxes, ha="center")
        return
    curve = [(0, 0.0), *Odometer(plan).curve(steps)]
    # Drawn as steps: a straight line between two points would run below the true curve.
    axis.step([x for x, _ in curve], [y for _, y in curve], where="pre", label=LABEL)
    axis.axhline(plan.epsilon, linestyle=":", color="black", label="the plan's, whenever it ends")
    axis.set_ylim(0, None)
    axis.legend()
