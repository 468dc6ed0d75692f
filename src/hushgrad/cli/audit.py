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
    NoiseMechanism,
    float32_noise,
    float64_noise,
    hushgrad_noise,
    radii,
)

audit = typer.Typer(no_args_is_help=True, help="Attack the library, and see what it gives away.")
"""The group of commands `hushgrad audit`."""

_Trials = typer.Option(min=2, max=10**5, help="releases of either kind, per attack")
_Draws = typer.Option(min=16, max=2**30, help="numbers to look for the tail in")
_MECHANISMS: dict[str, NoiseMechanism] = {
    "float32, torch.randn": float32_noise,
    "float64, no grid": float64_noise,
    "hushgrad": hushgrad_noise,
}


@audit.callback()
def attacks() -> None:
    """Attack the library, and see what it gives away."""


@audit.command()
def noise(
    trials: Annotated[int, _Trials] = 40,
    draws: Annotated[int, _Draws] = 2**24,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Tell a known record of norm 1 from one noisy sum at σ = 1, by the bits of the noise.

    An AUC of 1 means always, 0.5 means never; an ideal Gaussian allows 0.5 to these attacks.
    """
    # Beside two mechanisms that leak: an attack that finds nothing anywhere proves little.
    found = {
        name: {attack.name: attack.auc(mechanism, trials=trials) for attack in ATTACKS}
        for name, mechanism in _MECHANISMS.items()
    }
    tails = {name: radii(mechanism, draws=draws) for name, mechanism in _MECHANISMS.items()}
    for name, tail in tails.items():
        found[name] |= {"largest radius": tail.largest, "pairs at 0": float(tail.atoms)}
    if as_json:
        typer.echo(json.dumps(found))
        return
    title = "AUC of each attack, and what is left of the tail"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("attack", *found):
        table.add_column(heading, justify="left" if heading == "attack" else "right")
    for attack in next(iter(found.values())):
        table.add_row(attack, *(f"{scores[attack]:.3g}" for scores in found.values()))
    Console().print(table)
