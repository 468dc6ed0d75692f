"""What a reproduction leaves: a table of means with confidence intervals, and a figure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scipy import stats


@dataclass(frozen=True)
class Figure:
    """The values of one quantity over several seeds.

    >>> print(Figure((1.0, 2.0, 3.0)))
    2.0 ± 2.5
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Their mean."""
        return statistics.fmean(self.values)

    @property
    def margin(self) -> float:
        """Half the width of the 95 % confidence interval of the mean, by Student's t."""
        count = len(self.values)
        if count < 2:  # one run tells nothing of the spread
            return math.nan
        quantile = float(stats.t.ppf(0.975, count - 1))
        return quantile * statistics.stdev(self.values) / math.sqrt(count)

    def __str__(self) -> str:
        # As many decimals as tell anything: two digits of the margin.
        size = self.margin if self.margin > 0 else abs(self.mean) * 1e-3
        places = max(0, 1 - math.floor(math.log10(size))) if size > 0 else 0
        margin = f" ± {self.margin:.{places}f}" if self.margin > 0 else ""
        return f"{self.mean:.{places}f}{margin}"


Cell = str | int | float | Figure | None


@dataclass
class Table:
    """Rows of cells under headings, to be read by people and by programs.

    Args:
        title: the heading of the page.
        headings: one for each column.
        rows: the cells, row by row.
        notes: what a reader must know of the figures.

    >>> table = Table("Errors", ("ε", "error"))
    >>> table.add(3.0, None)
    >>> print(table.markdown().splitlines()[4])
    | 3 | – |
    """

    title: str
    headings: Sequence[str]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """Add a row.

        Raises:
            ValueError: there are more or fewer cells than headings.
        """
        if len(cells) != len(self.headings):
            raise ValueError(
                f"expected a cell for each of the {len(self.headings)} headings, got {len(cells)}"
            )
        self.rows.append(cells)

    def markdown(self) -> str:
        """The table and its notes as Markdown."""
        # None is a dash, so that a missing figure is not taken for 0.
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        body = "\n".join("| " + " | ".join(map(cell_text, line)) + " |" for line in lines)
        notes = "".join(f"\n- {note}" for note in self.notes)
        return f"# {self.title}\n\n{body}\n{notes}\n"

    def save(self, folder: Path, name: str) -> None:
        """Write `name.md` and `name.json` into the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(self.markdown(), encoding="utf-8")
        plain = {
            "title": self.title,
            "headings": list(self.headings),
            "rows": [[_plain(cell) for cell in row] for row in self.rows],
            "notes": self.notes,
        }
        text = json.dumps(plain, indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def cell_text(cell: Cell) -> str:
    """A cell as it is read; numbers have four digits."""
    if cell is None:
        return "–"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _plain(cell: Cell) -> object:
    return list(cell.values) if isinstance(cell, Figure) else cell


def figures(runs: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    """What several seeds gave, quantity by quantity.

    >>> figures([{"loss": 1.0}, {"loss": 2.0}])["loss"].values
    (1.0, 2.0)
    """
    return {key: Figure(tuple(run[key] for run in runs)) for key in runs[0]}
