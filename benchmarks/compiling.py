"""What `torch.compile` gives, privately and not: python -m benchmarks.compiling --help.

Four steps take turns in one process: plain and private, each as it is and compiled.
"""

import logging
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.libraries import LIBRARIES, sgd
from benchmarks.measure import seconds
from benchmarks.run import chosen
from benchmarks.workloads import SCALE, WORKLOADS, Batch, Workload, build

WARMUP = 9  # hushgrad tests a model at steps 1, 2, 4, 8, …


def plain(workload: Workload, loss: Callable[[Batch], Tensor]) -> Callable[[], None]:
    """A non-private step by any form of the workload's loss."""
    optimizer = sgd(workload.model)

    def step() -> None:
        optimizer.zero_grad()
        loss(workload.batch).mean().backward()
        optimizer.step()

    return step


def breaks(workload: Workload) -> int:
    """How often `torch.compile` leaves the plain loss for Python."""
    explained = torch._dynamo.explain(workload.loss)(workload.batch)
    torch._dynamo.reset()
    return explained.graph_break_count


def measure(name: str, repeats: int) -> list[str]:
    """A row of the table."""
    broken = breaks(build(name))
    usual, fused = build(name), build(name)
    steps = {
        "plain": plain(usual, usual.loss),
        "plain, compiled": plain(fused, torch.compile(fused.loss)),
        "private": LIBRARIES["hushgrad"](build(name), noise_multiplier=0.0).step,
    }
    private = LIBRARIES["hushgrad-compiled"](build(name), noise_multiplier=0.0)
    started = time.perf_counter()
    private.step()
    first = time.perf_counter() - started
    steps["private, compiled"] = private.step
    for _ in range(WARMUP):
        for step in steps.values():
            step()
    rounds = [{key: seconds(step) for key, step in steps.items()} for _ in range(repeats)]
    ratios = [
        median(r[one] / r[other] for r in rounds)
        for one, other in (
            ("private", "plain"),
            ("private, compiled", "plain"),
            ("plain, compiled", "plain"),
            ("private, compiled", "plain, compiled"),
        )
    ]
    base = f"{median(r['plain'] for r in rounds) * 1e3:.1f} ms"
    return [name, base, *(f"{x:.2f}×" for x in ratios), str(broken), f"{first:.0f} s"]


def main(
    workloads: Annotated[
        str, typer.Option(help="Comma-separated names.")
    ] = "resnet20,bert,logistic",
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 15,
) -> None:
    """Measure steps with and without `torch.compile`, relative to the plain step."""
    logging.basicConfig(format="%(message)s")
    table = Table(title="Steps ÷ the plain step, noise left out")
    for heading in (
        "workload",
        "plain",
        "private",
        "private, compiled",
        "plain, compiled",
        "both compiled",
        "graph breaks",
        "first step",
    ):
        table.add_column(heading, justify="right")
    for name in chosen(workloads, WORKLOADS | SCALE):
        table.add_row(*measure(name, repeats))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
