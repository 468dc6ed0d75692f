"""hushgrad reproduce: a table or figure of the papers, run anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hushgrad.cli.errors import errors_explained


def reproduce(
    name: Annotated[str, typer.Argument(help="Which one; `list` names them.")],
    data: Annotated[
        Path | None, typer.Option(help="The folder of the data sets, or HUSHGRAD_DATA.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where tables and figures are written.")] = Path(
        "reproductions"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = 10,
) -> None:
    """Run a table or a figure of the papers anew, and write it beside the published figures."""
    from hushgrad.reproductions import REPRODUCTIONS, StudySettings  # takes seconds to import

    console = Console(stderr=True)
    if name not in REPRODUCTIONS:
        known = ", ".join(sorted(REPRODUCTIONS))
        if name == "list":
            typer.echo(known.replace(", ", "\n"))
            return
        raise typer.BadParameter(f"expected one of {known}, got {name}")
    with errors_explained():
        out.mkdir(parents=True, exist_ok=True)
        with console.status("starting") as status:
            settings = StudySettings(out, data, seeds, lambda line: status.update(line))
            REPRODUCTIONS[name](settings)
    for path in sorted(out.iterdir()):
        typer.echo(str(path))
