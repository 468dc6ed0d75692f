"""`hushgrad clipping-bias`: what a clipping rule and a norm really optimise."""

from __future__ import annotations

import csv
import json
import warnings
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hushgrad.cli.errors import explain_errors
from hushgrad.clipping.named import CLIPS
from hushgrad.glm import losses
from hushgrad.glm.huberised import ClippedObjective, Huberised

LOSSES = {
    "logistic": losses.logistic,
    "squared": losses.squared,
    "hinge": losses.hinge,
    "huber": losses.huber,
    "poisson": losses.poisson,
}
_RADIUS = 50.0  # where minimisers are looked for; on its edge there is none
_POINTS = 401


def clipping_bias(
    loss: Annotated[str, typer.Option(help=", ".join(LOSSES))] = "logistic",
    rules: Annotated[str, typer.Option(help="some of " + ", ".join(CLIPS))] = "abadi,automatic",
    norms: Annotated[str, typer.Option(help="clipping norms, with commas")] = "0.05,0.1,0.2,0.5,1",
    data: Annotated[
        Path | None, typer.Option(help="a CSV file of two columns, feature and label; public data")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="the picture; a table of the same name goes by it")
    ] = (Path("clipping-bias.png")),
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Draw the objective that clipped gradient descent minimises, and where its minimum lies.

    For a linear model of one parameter. Without a file: two records x = 1/2 of label +1 for each
    x = 1 of label −1, on which clipping below 1/4 costs log 1/R whatever the number of records
    (or, for losses of numbers, targets 0, 1 and 8 at x = 1). It reads records and adds no noise.
    """
    with explain_errors():
        features, labels = _records(loss, data)
        problems = {
            (rule, norm): ClippedObjective(
                Huberised(_entry(LOSSES, loss, "loss")(), _entry(CLIPS, rule, "rule")(norm)),
                features,
                labels,
            )
            for rule in rules.split(",")
            for norm in _numbers(norms)
        }
        rows = [_row(rule, norm, problem) for (rule, norm), problem in problems.items()]
        # A mistyped folder is not made: the picture would be looked for elsewhere.
        if not output.parent.is_dir():
            raise ValueError(f"expected a folder that is there, got {output.parent}; make it")
        _draw(problems, rows, output, loss=loss)
        _write(rows, output.with_suffix(".csv"))
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(title=f"{loss} loss, clipped", title_justify="left", box=SIMPLE_HEAD)
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console = Console()
    console.print(table)
    console.print(f"Picture: {output}, table: {output.with_suffix('.csv')}", highlight=False)


def _records(loss: str, data: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    if data is not None:
        if not data.is_file():
            raise ValueError(f"expected a CSV file, got {data}, which is none; name another --data")
        with warnings.catch_warnings(action="ignore"):  # of an empty file, which is refused below
            found = np.loadtxt(data, delimiter=",", ndmin=2)
        if found.shape[1] != 2 or not len(found) or not np.isfinite(found).all():
            raise ValueError(
                f"expected two columns of finite numbers, feature and label, in {data}, got "
                f"{len(found)} rows of {found.shape[1]} columns; leave out the heading, all other "
                "columns, and rows without a number"
            )
        return torch.from_numpy(found[:, :1].copy()), torch.from_numpy(found[:, 1].copy())
    # The data sets of clipped DP-GD: theorem 3.2 for labels, theorem B.4 for numbers.
    if loss in ("logistic", "hinge"):
        x, y = [0.5, 0.5, 1.0], [1.0, 1.0, -1.0]
    else:
        x, y = [1.0, 1.0, 1.0], [0.0, 1.0, 8.0]
    return torch.tensor(x, dtype=torch.float64)[:, None], torch.tensor(y, dtype=torch.float64)


def _entry(options: dict[str, Any], name: str, what: str) -> Any:
    if name not in options:
        raise ValueError(f"expected a {what} among {', '.join(options)}, got {name!r}")
    return options[name]


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"expected numbers with commas, got {text!r}; pass 0.1,0.5,1") from None


def _row(rule: str, norm: float, problem: ClippedObjective) -> dict[str, Any]:
    """A line of the table; None where the objective has no minimum, or is not convex."""
    right = float(problem.minimiser(clipped=False, radius=_RADIUS)[0])
    found = excess = None
    if problem.huberised.convex:
        # A minimiser at the edge of the region is none: the objective falls for ever.
        biased = problem.minimiser(clipped=True, radius=_RADIUS)
        if abs(float(biased[0])) < _RADIUS * (1 - 1e-9):
            found, excess = float(biased[0]), problem.excess_risk(radius=_RADIUS)
    return {
        "rule": rule,
        "norm": norm,
        "minimiser": right,
        "clipped minimiser": found,
        "excess risk": excess,
    }


def _cell(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else f"{value:.4g}"


def _draw(
    problems: dict[tuple[str, float], ClippedObjective],
    rows: list[dict[str, Any]],
    path: Path,
    *,
    loss: str,
) -> None:
    from matplotlib.figure import Figure  # takes a second to import

    minima = [row[k] for row in rows for k in ("minimiser", "clipped minimiser")]
    known = [m for m in minima if m is not None]
    # Wide enough that every minimum is seen with its surroundings.
    margin = max(2.0, 0.3 * (max(known) - min(known)))
    at = np.linspace(min(known) - margin, max(known) + margin, _POINTS)
    rules = list(dict.fromkeys(rule for rule, _ in problems))
    figure = Figure(figsize=(5 * len(rules), 4), layout="constrained")
    for axes, rule in zip(np.atleast_1d(figure.subplots(1, len(rules))), rules, strict=True):
        # What is not clipped is the same under every norm: any problem of the rule has it.
        first = next(problem for (name, _), problem in problems.items() if name == rule)
        points = [torch.tensor([theta], dtype=torch.float64) for theta in at]
        original = [first.original(point) for point in points]
        axes.plot(at, original, color="black", label="not clipped")
        for (name, norm), problem in problems.items():
            if name != rule:
                continue
            values = problem.curve(torch.from_numpy(at))
            (line,) = axes.plot(at, values.numpy(), label=f"norm {norm:g}")
            row = next(r for r in rows if (r["rule"], r["norm"]) == (rule, norm))
            if row["clipped minimiser"] is not None:
                axes.axvline(row["clipped minimiser"], color=line.get_color(), lw=0.7, ls=":")
        axes.axvline(rows[0]["minimiser"], color="black", lw=0.7, ls=":")
        axes.set(title=f"{loss} loss, {rule}", xlabel="θ", ylabel="mean loss")
        axes.legend(fontsize="small")
    figure.savefig(path)


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
