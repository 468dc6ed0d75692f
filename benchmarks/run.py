"""Compare private steps with the plain step: python -m benchmarks.run --help.

Each library and workload is measured in processes of its own (`benchmarks/measure.py`).
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.libraries import LIBRARIES
from benchmarks.workloads import SCALE, WORKLOADS

ROOT = Path(__file__).parents[1]
TOLERANCE = 0.01  # hushgrad's norms are upper bounds, at most 1 % above their estimate
TIMEOUT_SECONDS = 1800
# Waiting threads that spin take the core from the working one once anything else runs: on two
# busy cores the plain step of the MLP then took 0.22 s in place of 0.05 s.
THREADS = {"OMP_WAIT_POLICY": "passive"}
# glibc returns a large tensor's pages to the system and faults them in again at the next step.
# For a library that stores every gradient that is most of the time, and a cost of the machine.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}

MEASURABLE = 2**20  # bytes; less is lost among the pages that a process happens to touch

Row = dict[str, Any]


def measure(
    task: str,
    workload: str,
    library: str,
    *,
    repeats: int,
    environment: dict[str, str],
    module: str = "benchmarks.measure",
) -> Row:
    """Run one child process and return its line of JSON."""
    command = [sys.executable, "-m", module, task, workload, library, str(repeats)]
    try:
        child = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"refuses": f"not done after {TIMEOUT_SECONDS} s"}
    if child.returncode == 0:
        return json.loads(child.stdout.splitlines()[-1])
    lines = child.stderr.strip().splitlines() or ["no message"]
    return {"refuses": "killed" if child.returncode < 0 else lines[-1][:60]}


def rows_of(workload: str, libraries: list[str], repeats: int, *, keep_memory: bool) -> list[Row]:
    """One row per library, and first that of the plain step, in seconds and bytes."""
    timed = THREADS | (KEEP_MEMORY if keep_memory else {})

    def peak(library: str) -> Row:
        return measure("memory", workload, library, repeats=repeats, environment=THREADS)

    plain: Row = {"workload": workload, "library": "non-private"} | peak("plain")
    rows = []
    for library in libraries:
        row: Row = {"workload": workload, "library": library}
        row |= measure("time", workload, library, repeats=repeats, environment=timed)
        if "refuses" not in row:
            row |= peak(library)
        if "peak_bytes" in row and plain.get("peak_bytes", 0) >= MEASURABLE:
            row["memory"] = row["peak_bytes"] / plain["peak_bytes"]
        rows.append(row)
    if seconds := [row["plain_seconds"] for row in rows if "plain_seconds" in row]:
        plain["plain_seconds"] = median(seconds)
    return [plain, *rows]


def cells(row: Row) -> list[str]:
    """A row as it is printed."""
    if "refuses" in row:
        return [row["library"], f"refuses: {row['refuses']}", "", "", ""]
    if row["library"] == "non-private":
        time = f"{row['plain_seconds'] * 1e3:.1f} ms" if "plain_seconds" in row else "–"
        return [row["library"], "", time, "", f"{row['peak_bytes'] / 2**20:.0f} MiB"]
    verdict = "WRONG " if row["error"] > TOLERANCE else ""
    ratios = [f"{row[k]:.2f}×" if k in row else "–" for k in ("without_noise", "with_noise")]
    return [
        row["library"],
        f"{verdict}{row['error']:.1e}",
        *ratios,
        f"{row['memory']:.2f}×" if "memory" in row else "–",
    ]


def table_of(rows: list[Row], about: Row) -> Table:
    """All rows as one table, with what is needed to read them below it."""
    kept = "freed memory kept by glibc" if about["keep_memory"] else "glibc's own defaults"
    table = Table(
        title="Private step ÷ non-private step",
        caption=f"Median of {about['repeats']} paired ratios; torch {about['torch']}, "
        f"{about['threads']} threads, {kept}; machine {about['busy_percent']:.0f} % busy before.",
    )
    for heading in ("workload", "library", "error", "time", "time with noise", "peak memory"):
        table.add_column(heading, justify="left" if heading in ("workload", "library") else "right")
    for i, row in enumerate(rows):
        first = i == 0 or rows[i - 1]["workload"] != row["workload"]
        last = i + 1 == len(rows) or rows[i + 1]["workload"] != row["workload"]
        table.add_row(row["workload"] if first else "", *cells(row), end_section=last)
    return table


def chosen(text: str, known: dict[str, Any]) -> list[str]:
    """The names in a comma-separated list, all of them for `all`."""
    names = list(known) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"expected names from {', '.join(known)}, got {unknown}")
    return names


def main(
    workloads: Annotated[str, typer.Option(help="Comma-separated names, or all.")] = "all",
    libraries: Annotated[str, typer.Option(help="Comma-separated names, or all.")] = "all",
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds per library.")] = 7,
    keep_memory: Annotated[
        bool, typer.Option(help="Time with glibc keeping freed memory between steps.")
    ] = True,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file too.")
    ] = None,
) -> None:
    """Measure time and memory of a private step, relative to the same model's plain step."""
    picked = list(WORKLOADS) if workloads == "all" else chosen(workloads, WORKLOADS | SCALE)
    compared = chosen(libraries, LIBRARIES)
    about: Row = {
        "repeats": repeats,
        "keep_memory": keep_memory,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "busy_percent": psutil.cpu_percent(interval=1.0),
    }
    progress, rows = Console(stderr=True), []
    for workload in picked:
        with progress.status(f"measuring {workload}"):
            rows += rows_of(workload, compared, repeats, keep_memory=keep_memory)
    Console().print(table_of(rows, about))
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
