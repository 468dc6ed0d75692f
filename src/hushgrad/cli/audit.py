"""`hushgrad audit`: attacks that anyone can run."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hushgrad.audit.floating_point import (
    ATTACKS,
    Mechanism,
    float32_noise,
    float64_noise,
    radii,
    released,
)

audit = typer.Typer(no_args_is_help=True, help="Attack the library, and see what it gives away.")
"""The group of commands `hushgrad audit`."""

_MECHANISMS: dict[str, Mechanism] = {
    "float32, torch.randn": float32_noise,
    "float64, no grid": float64_noise,
    "hushgrad": released,
}


@audit.callback()
def attacks() -> None:
    """Attack the library, and see what it gives away."""


@audit.command()
def noise(
    trials: Annotated[int, typer.Option(min=2, help="releases of either kind, per attack")] = 40,
    draws: Annotated[int, typer.Option(min=16, help="numbers to look for the tail in")] = 2**24,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Tell a known record of norm 1 from one noisy sum at σ = 1, by the bits of the noise.

    An AUC of 1 means always, 0.5 means never; an ideal Gaussian allows 0.5 to these attacks.
    """
    found = {
        name: {attack.name: attack.auc(mechanism, trials=trials) for attack in ATTACKS}
        for name, mechanism in _MECHANISMS.items()
    }
    tails = {name: radii(mechanism, draws=draws) for name, mechanism in _MECHANISMS.items()}
    if as_json:
        facts = {
            name: scores | {"largest radius": tails[name].largest, "pairs at 0": tails[name].atoms}
            for name, scores in found.items()
        }
        typer.echo(json.dumps(facts))
        return
    table = Table(title="AUC of each attack", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("noise", *(attack.name for attack in ATTACKS), "largest radius", "pairs at 0"):
        table.add_column(heading, justify="left" if heading == "noise" else "right")
    for name, scores in found.items():
        shown = [f"{score:.2f}" for score in scores.values()]
        table.add_row(name, *shown, f"{tails[name].largest:.3f}", str(tails[name].atoms))
    Console().print(table)
