"""`hushgrad reproduce`: a table or figure of the papers, run anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hushgrad.cli.errors import explain_errors
from hushgrad.cli.target import explain_failure
from hushgrad.launch.plugins import REPRODUCTIONS, first_line, load_plugin, plugin_names
from hushgrad.launch.reproduction import Reproduction, StudySettings

_NAMES = ", ".join(plugin_names(REPRODUCTIONS))


def reproduce(
    name: Annotated[str, typer.Argument(help=f"one of {_NAMES}; list says what they are")],
    data: Annotated[
        Path | None, typer.Option(help="the folder of the data sets; HUSHGRAD_DATA if left out")
    ] = None,
    out: Annotated[Path, typer.Option(help="where tables and figures are written")] = Path(
        "runs/reproductions"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="runs of each setting")] = 10,
) -> None:
    """Run a table or a figure of the papers anew, and write it beside the published figures."""
    if name == "list":
        list_reproductions()
        return
    with explain_errors():
        study = load_reproduction(name)  # before the folder is made, so that a typo leaves nothing
        out.mkdir(parents=True, exist_ok=True)
        with Console(stderr=True).status("starting") as status:
            study(StudySettings(out, data, seeds, lambda line: status.update(line)))
    for path in sorted(out.iterdir()):
        typer.echo(str(path))


def list_reproductions() -> None:
    """Print each reproduction's name with a line on what it computes.

    One that cannot be imported does not hide the others: its line says why.
    """
    names = plugin_names(REPRODUCTIONS)
    width = max(map(len, names), default=0)
    for name in names:
        try:
            line = first_line(load_reproduction(name))
        except (ValueError, OSError) as error:
            line = f"cannot be imported: {error}"
        typer.echo(f"{name:{width}}  {line}")


def load_reproduction(name: str) -> Reproduction:
    """The reproduction that an installed package offers by this name.

    Raises:
        ValueError: there is none, or its module cannot be imported.

    >>> load_reproduction("srm-table2").__module__
    'hushgrad_reproductions.srm_table2'
    """
    with explain_failure(f"the reproduction {name}"):
        study: Reproduction = load_plugin(REPRODUCTIONS, name)
        return study
