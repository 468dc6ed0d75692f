"""How time and memory grow with batch, sequence and depth: python -m benchmarks.growth --help.

One encoder of torch's own, of which one size at a time is varied. Each point is measured in
processes of its own, as in `benchmarks.run`; the pictures are the result.
"""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import torch
import typer
from rich.console import Console
from torch import nn

from benchmarks import workloads
from benchmarks.run import THREADS, measure
from benchmarks.workloads import Workload, classifier

SIZES: dict[str, Sequence[int]] = {
    "batch": (8, 16, 32, 64, 128),
    "sequence": (16, 32, 64, 128, 256),
    "depth": (1, 2, 4, 8, 12),
}
USUAL = {"batch": 32, "sequence": 64, "depth": 4}
WIDTH = 128

Curves = dict[str, list[tuple[float, float]]]
"""Of each library time and memory, ÷ the non-private step, at one size after the other."""


class Encoder(nn.Module):
    """A transformer encoder with a linear head on the mean of its outputs."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


def sized(name: str) -> Callable[..., Workload]:
    """The workload that a name such as `depth-8` stands for."""
    what, _, size = name.partition("-")
    sizes = USUAL | {what: int(size)}

    def built(*, dropout: bool) -> Workload:
        x = torch.rand(sizes["batch"], sizes["sequence"], WIDTH)
        return classifier(Encoder(sizes["depth"]), x, 10)

    return built


workloads.SCALE.update(
    {f"{what}-{n}": sized(f"{what}-{n}") for what, sizes in SIZES.items() for n in sizes}
)


def main(
    libraries: Annotated[str, typer.Option(help="Comma-separated names.")] = (
        "hushgrad,hushgrad-frugal"
    ),
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds for each point.")] = 5,
    output: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("growth"),
) -> None:
    """Measure and draw: private ÷ non-private, against each size."""
    show = Console(highlight=False).print
    output.mkdir(parents=True, exist_ok=True)
    for what, sizes in SIZES.items():
        curves: Curves = {}
        for library in libraries.split(","):
            curves[library] = points = []
            for size in sizes:
                name = f"{what}-{size}"
                settings = {"repeats": repeats, "environment": THREADS, "module": __spec__.name}
                plain = measure("memory", name, "plain", **settings)
                row = measure("time", name, library, **settings)
                row |= measure("memory", name, library, **settings)
                memory = row.get("peak_bytes", math.nan) / plain["peak_bytes"]
                points.append((row.get("without_noise", math.nan), memory))
                figures = "time {:.2f}  memory {:.2f}".format(*points[-1])
                show(f"{name:13} {library:16} {row.get('refuses', figures)}")
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
    if len(sys.argv) > 1 and sys.argv[1] in ("time", "memory"):
        from benchmarks.measure import run

        run(sys.argv[1:])
    else:
        typer.run(main)
