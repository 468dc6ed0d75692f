"""A curve in the terminal, and the same in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

ChartCurve = Sequence[tuple[float, float]]
"""Points (x, y), x going up."""


def draw_chart(curve: ChartCurve, *, width: int = 60, height: int = 10) -> str:
    """Draw a curve that starts at (0, 0) with characters, its axes labelled.

    Args:
        curve: the points after (0, 0); an infinite y is drawn beyond the top.
        width: of the axis, in characters.
        height: in lines.

    >>> print(draw_chart([(1, 1.0), (2, 2.0)], width=8, height=2))
           2 ┤    ▁▃▅▇
           1 ┤▁▃▅▇████
             └────────
              0      2
    """
    right, top = curve[-1][0], max((y for _, y in curve if math.isfinite(y)), default=0.0) or 1.0
    curve = [(x, y if math.isfinite(y) else 2 * top) for x, y in curve]  # beyond the top
    # A column has the height of the curve above its middle.
    levels = [_at(curve, (column + 0.5) / width * right) / top * height for column in range(width)]
    lines = []
    for row in range(height, 0, -1):
        cells = "".join(_cell(level - row + 1) for level in levels)
        # Three labels are enough for a scale, and do not crowd a low chart.
        label = f"{top * row / height:.3g}" if row in (height, height // 2, 1) else ""
        lines.append(f"{label:>8} ┤{cells}".rstrip())
    lines.append(" " * 9 + "└" + "─" * width)
    lines.append(" " * 10 + "0" + f"{right:g}".rjust(width - 1))
    return "\n".join(lines)


def _cell(filled: float) -> str:
    # Eighths of a line: the chart is eight times as fine as its characters.
    return " ▁▂▃▄▅▆▇█"[round(8 * min(max(filled, 0.0), 1.0))]


def _at(curve: ChartCurve, x: float) -> float:
    before = (0.0, 0.0)
    for point in curve:
        if point[0] >= x:
            return before[1] + (point[1] - before[1]) * (x - before[0]) / (point[0] - before[0])
        before = point
    return before[1]


def save_chart(curves: dict[str, ChartCurve], path: Path, *, title: str) -> None:
    """Write curves to an image file, whose ending says of which kind.

    Args:
        curves: by the names that the legend gives them.
        path: the file.
        title: what stands above.
    """
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        # matplotlib would scale its axis by an infinite value.
        shown = [(x, y) for x, y in curve if math.isfinite(y)]
        axes.plot([x for x, _ in shown], [y for _, y in shown], label=name)
    axes.set(xlabel="steps", ylabel="ε", title=title, xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
