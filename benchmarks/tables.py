"""The figures as Markdown: python -m benchmarks.tables FILE.json… [--page PAGE.md]…

The files are those that `benchmarks.run --json` writes. With `--page` the tables are put into the
page between the marks `<!-- steps -->` and `<!-- end of steps -->`, and so on for each table that
the page has marks for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

Row = dict[str, Any]
"""What was found of a library on a workload."""

TOLERANCE = 0.01  # hushgrad's norms are upper bounds, at most 1 % above their estimate
MEASURABLE = 2**20  # bytes; less is lost among the pages that a process happens to touch
NONE = "–"
OVERVIEW = ("hushgrad", "opacus-hooks", "opacus-ghost")


def load(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def save(path: Path, row: Row) -> None:
    """Put a row in the place of the one of the same workload and library, or at the end."""
    rows = {key(old): old for old in load(path)} | {key(row): row}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": list(rows.values())}, indent=1) + "\n")


def key(row: Row) -> tuple[str, str]:
    """What is measured once."""
    return row["workload"], row["library"]


def duration(seconds: float) -> str:
    """Seconds with three figures, in a unit that suits them."""
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def figures(x: float) -> str:
    """Two decimals, or none where they would be noise."""
    return f"{x:.2f}" if x < 100 else f"{x:.0f}"


def ratio(found: Row | None) -> str:
    """The median ratio, with the least and the largest."""
    if found is None:
        return NONE
    middle, least, largest = (figures(found[k]) for k in ("ratio", "least", "largest"))
    return f"{middle} ({least}–{largest})"


def base(found: Row | None) -> str:
    """What the ratio's base takes."""
    return NONE if found is None else duration(found["plain_seconds"])


def accuracy(row: Row) -> str:
    """The error of the clipped sum, or what there is to say in its place."""
    if "graph_breaks" in row:
        return f"{row['graph_breaks']} graph breaks"
    if "error" not in row:
        return NONE
    return f"{'WRONG ' if row['error'] > TOLERANCE else ''}{row['error']:.1e}"


def memory(row: Row) -> str:
    """The peak relative to the plain step's, or in MiB where that is too small for a ratio."""
    if "peak_bytes" not in row:
        return NONE
    if row["plain_peak_bytes"] < MEASURABLE:
        return f"{row['peak_bytes'] / 2**20:.1f} MiB"
    return figures(row["peak_bytes"] / row["plain_peak_bytes"])


def table(headings: Sequence[str], lines: Iterable[Sequence[str]], *, words: int = 2) -> str:
    """A table in Markdown, the first columns, of words, to the left."""
    rule = ["---" if i < words else "---:" for i in range(len(headings))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headings, rule, *lines))


def by_workload(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each workload, in their order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["workload"], []).append(row)
    return found


def columns(row: Row) -> tuple[Row | None, Row | None]:
    """The figures with the defaults, and those with freed memory kept."""
    found = row.get("allocators", {})
    return found.get("default"), found.get("memory kept")


def of_all(rows: Sequence[Row], column: int, name: str) -> str:
    """The median of the plain process's figure, which each row has measured for itself."""
    found = [f[name] for row in rows if (f := columns(row)[column]) is not None]
    return duration(median(found)) if found else NONE


def steps_table(rows: Sequence[Row]) -> str:
    """Steps: private ÷ plain."""
    lines: list[Sequence[str]] = []
    for group in by_workload(rows).values():
        times = (of_all(group, 0, "plain_seconds"), of_all(group, 1, "plain_seconds"))
        peaks = [row["plain_peak_bytes"] for row in group if "plain_peak_bytes" in row]
        peak = f"{median(peaks) / 2**20:.0f} MiB" if peaks else NONE
        first = of_all(group, 0, "plain_first_seconds")
        lines.append((group[0]["title"], "plain", "", *times, peak, first))
        for row in group:
            if "refuses" in row:
                lines.append(("", row["library"], f"refuses: {row['refuses']}", "", "", "", ""))
                continue
            usual, kept = columns(row)
            first = duration(usual["first_seconds"]) if usual else NONE
            cells = (accuracy(row), ratio(usual), ratio(kept), memory(row), first)
            lines.append(("", "; ".join((row["library"], *row.get("notes", ()))), *cells))
    headings = ("workload", "library", "error", "time", "time, memory kept")
    return table((*headings, "peak memory", "first step"), lines)


def runs_table(rows: Sequence[Row]) -> str:
    """Whole runs: private ÷ plain."""
    lines: list[Sequence[str]] = []
    for group in by_workload(rows).values():
        process = of_all(group, 0, "plain_process_seconds")
        times = (of_all(group, 0, "plain_seconds"), of_all(group, 1, "plain_seconds"))
        lines.append((group[0]["title"], "plain", *times, process))
        for row in group:
            if "refuses" in row:
                lines.append(("", row["library"], f"refuses: {row['refuses']}", "", ""))
                continue
            usual, kept = columns(row)
            process = figures(usual["process_ratio"]) if usual else NONE
            lines.append(("", row["library"], ratio(usual), ratio(kept), process))
    return table(("run", "library", "time", "time, memory kept", "with start and imports"), lines)


def overview_table(rows: Sequence[Row]) -> str:
    """Steps and whole runs beside those of Opacus, with the defaults, in a few columns."""
    lines: list[Sequence[str]] = []
    for group in by_workload(rows).values():
        found = {row["library"]: row for row in group}
        if "hushgrad" in found:
            usual = [columns(found.get(name, {}))[0] for name in OVERVIEW]
            lines.append((group[0]["title"], *(figures(f["ratio"]) if f else NONE for f in usual)))
    headings = ("time ÷ the time without privacy", "hushgrad", "Opacus", "Opacus, ghost")
    return table(headings, lines, words=1)


def caption(rows: Sequence[Row]) -> str:
    """The conditions of all rows, in a sentence."""

    def every(name: str) -> str:
        return ", ".join(sorted({str(row["about"][name]) for row in rows}))

    found = [f for row in rows for f in row.get("allocators", {}).values()]
    threads = ", ".join(sorted({str(f["threads"]) for f in found})) or NONE
    given = {f"{k}={v}" for row in rows for k, v in row["about"]["environment"].items()}
    busiest = max(row["about"]["busy_percent"] for row in rows)
    return (
        f"Measured {every('date')}; torch {every('torch')}, {every('machine')}, "
        f"{every('processors')} processors, torch's threads {threads}; pairs {every('repeats')}; "
        f"set by whoever ran it: {', '.join(sorted(given)) or 'nothing'}; machine at most "
        f"{busiest:.0f} % busy before.\n"
    )


def is_run(row: Row) -> bool:
    """Whether this is a whole run, and not a step."""
    return str(row["workload"]).endswith("_run")


def is_large(row: Row) -> bool:
    """Whether this is one of the larger models, which have a table of their own."""
    return row["workload"] in ("vit_small", "gpt2_small")


SECTIONS: dict[str, tuple[Callable[[Row], bool], Callable[[Sequence[Row]], str], str]] = {
    "overview": (
        lambda row: not is_large(row),
        overview_table,
        "make bench ARGS='--json docs/benchmarks.json'",
    ),
    "steps": (
        lambda row: not is_run(row) and not is_large(row),
        steps_table,
        "python -m benchmarks.run --json FILE",
    ),
    "runs": (is_run, runs_table, "python -m benchmarks.run --workloads mnist_run --json FILE"),
    "scale": (
        is_large,
        steps_table,
        "python -m benchmarks.run --workloads vit_small,gpt2_small "
        "--libraries hushgrad,opacus-ghost --repeats 5 --json FILE",
    ),
}
"""Of each table which rows it takes, how it is made, and the command that measures it."""


def section(name: str, rows: Sequence[Row]) -> str:
    """One table with its caption, or the command that will fill it."""
    takes, made, command = SECTIONS[name]
    mine = [row for row in rows if takes(row)]
    if not mine:
        return f"*To be measured: `{command}`.*\n"
    return f"{made(mine)}\n{caption(mine)}"


def pages(rows: Sequence[Row]) -> str:
    """All tables that have rows, one below the other."""
    names = [n for n, (takes, *_) in SECTIONS.items() if any(map(takes, rows))]
    return "\n".join(section(name, rows) for name in names if name != "overview")


def filled(page: str, rows: Sequence[Row]) -> str:
    """The page with a table put between each pair of marks."""
    marked = [name for name in SECTIONS if f"<!-- {name} -->" in page]
    if not marked:
        raise ValueError(f"expected marks such as <!-- steps --> for some of {list(SECTIONS)}")
    for name in marked:
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"expected the lines {start.strip()} and {end} in the page")
        page = before + start + section(name, rows) + end + after
    return page


def main(
    files: Annotated[list[Path], typer.Argument(help="Files that benchmarks.run wrote.")],
    page: Annotated[list[Path] | None, typer.Option(help="Put the tables into this page.")] = None,
) -> None:
    """Print the tables in Markdown, or put them into pages."""
    rows = list({key(row): row for path in files for row in load(path)}.values())
    if not page:
        sys.stdout.write(pages(rows))
    for path in page or ():
        path.write_text(filled(path.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
