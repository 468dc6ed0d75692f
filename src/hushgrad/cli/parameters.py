"""Parameters that several commands have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]


def one_of(known: Mapping[str, object], *, help: str) -> Any:
    """An option that takes one of the names in a registry, and lists them in its help.

    Args:
        known: the registry; the names are its keys.
        help: what the option is for; the names are added to it.

    Returns:
        What `Annotated[str, …]` takes for an option of typer's.
    """
    names = ", ".join(known)
    return typer.Option(parser=name_in(known), metavar="NAME", help=f"{help}: {names}")


def name_in(known: Mapping[str, object]) -> Callable[[str], str]:
    """A parser that returns a name of the registry as it is and refuses any other.

    Raises:
        typer.BadParameter: by the parser; it lists the names.

    >>> name_in({"poisson": 1, "full": 2})("full")
    'full'
    """

    def parsed(name: str) -> str:
        if name not in known:
            raise typer.BadParameter(f"expected one of {', '.join(known)}, got {name!r}")
        return name

    return parsed
