"""The doctor: what each parameter costs, and tests that its per-sample gradients are right."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions
from rich.table import Table
from torch import nn

from hushgrad.gradients import (
    Certificate,
    Form,
    Gradients,
    auto,
    certificate_for,
    per_sample,
    recomputed,
    require_factors,
    traced,
)
from hushgrad.gradients.factors import cost_of
from hushgrad.types import Batch, Loss, Params


@dataclass(frozen=True)
class ParameterRow:
    """One parameter: which operations use it, how its gradient is held, and the cost per record."""

    name: str
    shape: tuple[int, ...]
    operations: str
    form: str
    batch_position: str
    flops: float
    bytes: float


@dataclass(frozen=True)
class Check:
    """One tested claim: what was measured, and whether the claim holds."""

    claim: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Diagnosis:
    """The findings of `doctor`: a row for each parameter, the tested claims, and the verdict."""

    form: str
    rows: tuple[ParameterRow, ...]
    checks: tuple[Check, ...]
    why_not: dict[str, str]

    @property
    def healthy(self) -> bool:
        """True if every claim holds."""
        return all(check.holds for check in self.checks)

    @property
    def verdict(self) -> str:
        """The conclusion in one sentence."""
        if self.healthy:
            return f"certified: private training will use the {self.form} form"
        failed = "; ".join(check.claim for check in self.checks if not check.holds)
        return f"not certified: {failed}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | str]:
        title = f"Per-sample gradients: {self.form} (flops and bytes are those of one record)"
        table = _table(title)
        for heading in ("parameter", "shape", "operations", "held as", "batch"):
            folds = heading in ("parameter", "operations")
            table.add_column(heading, overflow="fold", no_wrap=not folds)
        table.add_column("flops", justify="right", no_wrap=True)
        table.add_column("bytes", justify="right", no_wrap=True)
        for row in self.rows:
            shape = "×".join(map(str, row.shape)) or "scalar"
            amounts = (_amount(row.flops), _amount(row.bytes))
            table.add_row(row.name, shape, row.operations, row.form, row.batch_position, *amounts)
        yield table
        for form, reason in self.why_not.items():
            yield f"Not {form}: {reason}"
        proof = _table("Tests on probe batches")
        for heading in ("claim", "found", ""):
            proof.add_column(heading)
        for check in self.checks:
            mark = "[green]holds[/green]" if check.holds else "[red]fails[/red]"
            proof.add_row(check.claim, check.found, mark)
        yield proof
        yield f"[bold]{self.verdict}[/bold]"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def doctor(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    *,
    form: Form | Sequence[Form] = auto,
    idle: Collection[str] = (),
) -> Diagnosis:
    """Certify a model for private training, and show what each of its parameters costs.

    Guarantees: the certificate is the one that `train` uses, so a healthy model trains privately.

    Args:
        model: the model; its trainable parameters are the private ones.
        loss: takes a batch and returns one loss for each record.
        batch: a few records of the shape that training will use; their values do not matter.
        form: which forms of per-sample gradients to try, in order.
        idle: names of parameters that only some records use.

    Returns:
        A `Diagnosis`: print it with `rich.print`, or read `.verdict` and `.rows`.

    Raises:
        Refused: if no form can be certified; the message names parameter, operation and remedy.

    Example:
        >>> import torch
        >>> model = nn.Linear(3, 1)
        >>> found = doctor(model, lambda x: model(x).squeeze(1).square(), torch.randn(4, 3))
        >>> found.verdict, found.rows[1].name
        ('certified: private training will use the traced form', 'bias')
    """
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    settings: dict[str, Any] = {"modules": (model,), "idle": idle}
    certificate = certificate_for(loss, params, batch, form=form, **settings)
    # The frugal form holds no factors to show; those of the fast one are the same.
    shown = traced if certificate.form is recomputed else certificate.form
    gradients = require_factors(per_sample(loss, params, batch, form=shown, **settings))
    rows = tuple(_row(name, params, certificate, gradients) for name in params)
    return Diagnosis(
        certificate.form.name, rows, tuple(_checks(certificate, params)), certificate.why_not
    )


def _row(name: str, params: Params, certificate: Certificate, gradients: Gradients) -> ParameterRow:
    shape = tuple(params[name].shape)
    sites = [site for site in certificate.sites if name in site.parameters]
    layouts = [place.layout for site in sites for place in site.outputs]
    spelled = (site.operation.removeprefix("get ").strip("_") for site in sites)
    operations = ", ".join(dict.fromkeys(spelled)) or "–"
    positions = ", ".join(dict.fromkeys(str(at) for at in layouts if at)) or "–"
    held = gradients.held_gradients[name].form if name in gradients.held_gradients else "idle"
    if certificate.form is not traced:
        held = f"{certificate.form.name}, {held}"
    uses = tuple(gradients.factors[name].values())
    flops, size = cost_of(uses, shape) if uses else (0, 0)
    records = uses[0].batch if uses else 1
    return ParameterRow(name, shape, operations, held, positions, flops / records, size / records)


def _checks(certificate: Certificate, params: Params) -> list[Check]:
    seen, slack = certificate.evidence, certificate.evidence.precision.rounding
    sizes = ", ".join(str(size) for size in dict.fromkeys(seen.sizes))
    independent = f"off by at most {seen.loss:.1e} in batches of {sizes}"
    return [
        Check("a record's loss does not depend on other records", independent, True),
        Check(
            "norms are at least those of one-record runs",
            f"lowest {seen.lowest_norm:.7f} of them",
            seen.lowest_norm >= 1 - max(slack, 1e-6),
        ),
        Check(
            "and at most 1 % above",
            f"highest {seen.highest_norm:.7f} of them",
            seen.highest_norm <= 1.01 + slack,
        ),
        Check(
            "norm estimates agree to 1e-5",
            f"off by at most {seen.estimate:.1e}",
            seen.estimate <= max(slack, 1e-5),
        ),
        Check(
            "gradients agree entry by entry",
            f"off by at most {seen.gradient:.1e} of the norm",
            seen.gradient <= max(slack, 1e-4),
        ),
        Check(
            "a record's results are bit-identical whatever the other records are",
            _places(certificate),
            True,
        ),
        Check("every private parameter was reached", f"{len(params)} of {len(params)}", True),
        Check("no gradient or buffer was written without hushgrad noticing", "none", True),
    ]


def _places(certificate: Certificate) -> str:
    padded = f"in batches padded to multiples of {certificate.multiple}"
    if certificate.period == 1:
        return padded
    return f"{padded}, at random positions modulo {certificate.period}"


def _amount(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"
