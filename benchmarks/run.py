"""Compare private training with plain training: python -m benchmarks.run --help.

The plain and the private step are measured in a process each, which take turns in blocks of steps
(`benchmarks/turns.py`). Nothing is set that a user has not set: the number of threads, how they
wait and how memory is freed are the defaults of torch and of the system. A second column, labelled
so, is timed with freed memory kept by glibc.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from datetime import date
from functools import cache
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import psutil
import torch
import typer
from rich.console import Console

from benchmarks import tables, whole, workloads
from benchmarks.libraries import BASE, LIBRARIES
from benchmarks.tables import Row
from benchmarks.turns import Failed, Worker, take_turns
from benchmarks.whole import RUNS, TRAINERS
from benchmarks.workloads import BY_NAME, WORKLOADS

ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    # glibc returns a large tensor's pages to the system, and faults them in again at the next step.
    "memory kept": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)},
}
"""What is set in the children's environment, for each column of times."""

ALL = (*WORKLOADS, "mnist_run")
QUICK = ("tiny", "tiny_run")
BUSY = 20.0  # percent; a plain step of two threads that wait for a third took 90 times as long
# What changes figures, if whoever runs this has set it; it is left as it is, and written down.
TELLING = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_", "LD_PRELOAD", "TORCH", "PYTORCH")

progress = Console(stderr=True, highlight=False, soft_wrap=True).print


class Effort(NamedTuple):
    """How often, how long and with which allocators is measured."""

    repeats: int
    block_seconds: float
    allocators: Sequence[str]


def child(task: str, workload: str, library: str, allocator: str = "default") -> Worker:
    """A process that does one of the tasks of `benchmarks.measure`."""
    command = [sys.executable, "-m", "benchmarks.measure", task, workload, library]
    return Worker(command, environment=ALLOCATORS[allocator])


@cache
def answer(task: str, workload: str, library: str) -> Row:
    """What such a process finds out, where it is one line; found once."""
    with child(task, workload, library) as worker:
        return worker.ready


def conditions(effort: Effort) -> Row:
    """What must be known to read a figure."""
    busy = psutil.cpu_percent(interval=0.5)
    if busy > BUSY:
        progress(f"  the machine is {busy:.0f} % busy with other work, which disturbs the figures")
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "repeats": effort.repeats,
        "block_seconds": effort.block_seconds,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(TELLING)},
        "busy_percent": busy,
    }


def timed(workload: str, library: str, allocator: str, effort: Effort) -> Row:
    """The figures of one column: a plain process and another, which take turns."""
    with ExitStack() as both:
        plain = both.enter_context(child("steps", workload, BASE, allocator))
        other = both.enter_context(child("steps", workload, library, allocator))
        turns = take_turns(plain, other, pairs=effort.repeats, block_seconds=effort.block_seconds)
        return turns.facts() | {"threads": other.ready["threads"]}


def of_steps(workload: str, library: str, effort: Effort, *, memory: bool) -> Row:
    """A row of the table of steps."""
    row: Row = {"workload": workload, "title": workloads.title(workload), "library": library}
    row["about"] = conditions(effort)
    try:
        row |= answer("error", workload, library)
        row["allocators"] = {}
        for allocator in effort.allocators:
            row["allocators"][allocator] = found = timed(workload, library, allocator, effort)
            progress(f"  {library:18} {allocator:12} {tables.ratio(found)} of {tables.base(found)}")
        if memory:
            row["plain_peak_bytes"] = answer("memory", workload, BASE)["peak_bytes"]
            row |= answer("memory", workload, library)
    except Failed as failure:
        row["refuses"] = str(failure)
        progress(f"  {library:18} refuses: {failure}")
    return row


def of_runs(name: str, trainers: Sequence[str], effort: Effort) -> Iterable[Row]:
    """The rows of a whole run: each trainer once in every round, each time in a new process."""
    about = conditions(effort)
    found: dict[tuple[str, str], list[Row | str]] = {}
    for allocator in effort.allocators:
        for turn in range(effort.repeats):
            order = [BASE, *trainers]
            for trainer in order if turn % 2 == 0 else reversed(order):
                one = whole_run(name, trainer, allocator)
                found.setdefault((trainer, allocator), []).append(one)
                said = one if isinstance(one, str) else tables.duration(one["seconds"])
                progress(f"  {trainer:18} {allocator:12} {said}")
    for trainer in trainers:
        row: Row = {"workload": name, "title": whole.title(name), "library": trainer}
        row |= {"about": about, "allocators": {}}
        for allocator in effort.allocators:
            pairs = list(zip(found[BASE, allocator], found[trainer, allocator], strict=True))
            failures = [x for pair in pairs for x in pair if isinstance(x, str)]
            if failures:
                row["refuses"] = failures[0]
                break
            row["allocators"][allocator] = facts_of_runs(pairs)
        yield row


def whole_run(name: str, trainer: str, allocator: str) -> Row | str:
    """Seconds of the run, and of its process from the start; or why there is none."""
    start = time.perf_counter()
    try:
        with child("run", name, trainer, allocator) as worker:
            return worker.ready | {"process_seconds": time.perf_counter() - start}
    except Failed as failure:
        return str(failure)


def facts_of_runs(pairs: list[tuple[Row, Row]]) -> Row:
    """The figures of one column of a trainer, from its runs beside plain ones."""
    ratios = [other["seconds"] / plain["seconds"] for plain, other in pairs]
    return {
        "ratio": median(ratios),
        "least": min(ratios),
        "largest": max(ratios),
        "ratios": ratios,
        "seconds": median(other["seconds"] for _, other in pairs),
        "plain_seconds": median(plain["seconds"] for plain, _ in pairs),
        "process_ratio": median(o["process_seconds"] / p["process_seconds"] for p, o in pairs),
        "process_seconds": median(other["process_seconds"] for _, other in pairs),
        "plain_process_seconds": median(plain["process_seconds"] for plain, _ in pairs),
        "threads": pairs[0][1]["threads"],
    }


def chosen(text: str, every: Sequence[str], known: Iterable[str]) -> list[str]:
    """The names in a comma-separated list, `every` for all."""
    names, known = list(every) if text == "all" else text.split(","), list(known)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"expected names from {', '.join(known)}, got {unknown}")
    return names


def allocators_here() -> list[str]:
    """Both where the C library is glibc, whose settings they are."""
    return list(ALLOCATORS) if platform.libc_ver()[0] == "glibc" else ["default"]


def main(
    workloads: Annotated[str, typer.Option(help="Comma-separated names, or all.")] = "all",
    libraries: Annotated[str, typer.Option(help="Comma-separated names, or all.")] = "all",
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of blocks, or whole runs.")] = 7,
    block: Annotated[float, typer.Option(min=0.001, help="Least seconds of a block.")] = 0.5,
    allocators: Annotated[str, typer.Option(help="default, memory kept, or all.")] = "all",
    memory: Annotated[bool, typer.Option(help="Measure the peak of memory too.")] = True,
    quick: Annotated[bool, typer.Option(help="Try everything on something tiny.")] = False,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Add the figures to this file; measured anew they replace."),
    ] = None,
) -> None:
    """Measure time and memory of private training, relative to the same model's plain training."""
    effort = Effort(repeats, block, chosen(allocators, allocators_here(), ALLOCATORS))
    if quick:
        effort = Effort(1, 0.01, ["default"])
    compared = [name for name in LIBRARIES | TRAINERS if name != BASE]
    compared = chosen(libraries, ["hushgrad"] if quick else compared, compared)
    rows: list[Row] = []
    for workload in chosen(workloads, QUICK if quick else ALL, BY_NAME | RUNS):
        progress(workload)
        if workload in RUNS:
            found = of_runs(workload, [t for t in compared if t in TRAINERS], effort)
        else:
            steps = [name for name in compared if name in LIBRARIES]
            found = (of_steps(workload, name, effort, memory=memory) for name in steps)
        for row in found:
            rows.append(row)
            if json_path:
                tables.save(json_path, row)
    sys.stdout.write(tables.pages(rows))


if __name__ == "__main__":
    typer.run(main)
