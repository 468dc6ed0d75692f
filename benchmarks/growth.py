"""How time and memory grow with batch, sequence and depth: python -m benchmarks.growth --help.

One encoder of torch's own, of which one size at a time is varied. Each point is measured by
processes that take turns, as in `benchmarks.run`; the pictures are the result.
"""

import math
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer

from benchmarks import tables
from benchmarks.libraries import BASE, LIBRARIES
from benchmarks.run import Effort, chosen, of_steps, progress
from benchmarks.tables import Row
from benchmarks.workloads import SIZES

Curves = dict[str, list[tuple[float, float]]]
"""Of each library time and memory, ÷ the non-private step, at one size after the other."""


def point(row: Row) -> tuple[float, float]:
    """Time and memory ÷ the non-private step; NaN where there is no figure."""
    time, _ = tables.columns(row)
    memory = row.get("peak_bytes", math.nan) / row.get("plain_peak_bytes", math.nan)
    return math.nan if time is None else time["ratio"], memory


def main(
    libraries: Annotated[str, typer.Option(help="Comma-separated names.")] = (
        "hushgrad,hushgrad-frugal"
    ),
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of blocks for each point.")] = 5,
    block: Annotated[float, typer.Option(min=0.001, help="Least seconds of a block.")] = 0.5,
    output: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("growth"),
) -> None:
    """Measure and draw: private ÷ non-private, against each size."""
    output.mkdir(parents=True, exist_ok=True)
    effort = Effort(repeats, block, ["default"])
    known = [name for name in LIBRARIES if name != BASE]
    for what, sizes in SIZES.items():
        curves: Curves = {}
        for library in chosen(libraries, known, known):
            curves[library] = points = []
            for size in sizes:
                progress(f"{what} {size}")
                points.append(point(of_steps(f"{what}-{size}", library, effort, memory=True)))
        draw(what, curves, output / f"growth-{what}.png")


def draw(what: str, curves: Curves, path: Path) -> None:
    """Draw time and memory of all libraries against one size."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for column, (axis, title) in enumerate(zip(axes, ("time", "peak memory"), strict=True)):
        for library, points in curves.items():
            axis.plot(SIZES[what], [p[column] for p in points], marker="o", label=library)
        axis.set(title=f"{title} ÷ non-private", xlabel=what, xscale="log", ylim=(0, None))
        axis.set_xticks(SIZES[what], map(str, SIZES[what]))
        axis.minorticks_off()
        axis.axhline(1, color="grey", linewidth=0.8)
    axes[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    typer.run(main)
