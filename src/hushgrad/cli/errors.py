"""An error of the user's is one sentence and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def explain_errors() -> Iterator[None]:
    """Turn an error of the user's into one sentence on stderr and exit code 2.

    Only `ValueError` (of which `Refused` is one) and `OSError` are the user's. Anything else is a
    bug, and keeps its traceback.

    Raises:
        typer.Exit: the block raised one of the two.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
