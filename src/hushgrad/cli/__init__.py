"""The command line: one module for each group of commands."""

from __future__ import annotations

import typer

from hushgrad.cli.accounting import account, plan
from hushgrad.cli.audit import audit
from hushgrad.cli.clipping_bias import clipping_bias
from hushgrad.cli.demo import demo
from hushgrad.cli.doctor import doctor
from hushgrad.cli.ledger import ledger
from hushgrad.cli.reproduce import reproduce
from hushgrad.cli.train import train

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
"""The command `hushgrad`."""


@app.callback()
def hushgrad() -> None:
    """Train PyTorch models with differential privacy."""


# Commands are named for their functions; train alone takes options that it does not declare.
for command in (demo, doctor, account, plan, reproduce, clipping_bias):
    app.command()(command)
app.command(context_settings={"ignore_unknown_options": True})(train)
app.add_typer(audit, name="audit")
app.add_typer(ledger, name="ledger")
