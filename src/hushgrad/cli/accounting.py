"""`hushgrad account` and `hushgrad plan`: what a run costs, and what noise it needs."""

from __future__ import annotations

import json
import math
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hushgrad.accounting import ACCOUNTANTS, Accountant, Target, least_noise, repeated
from hushgrad.accounting.accountants import require_delta
from hushgrad.accounting.calibration import require_proof
from hushgrad.cli.chart import saved
from hushgrad.cli.errors import sentences
from hushgrad.cli.question import Question, Sampling, batches_of
from hushgrad.cli.shown import growth, shown
from hushgrad.types import Relation


class AccountantName(Enum):
    """The accountants, as the command line spells them."""

    PLD = "pld"
    RDP = "rdp"
    GDP = "gdp"
    ZCDP = "zcdp"


Noise = typer.Option(help="σ: noise ÷ the clipping norm of one record, whatever the relation")
Records = typer.Option(help="n: the public number of records")
BatchSize = typer.Option(help="b: the size of a batch, for poisson its expectation")
Delta = Annotated[float, typer.Option(help="δ of the guarantee, below 1 / records")]
SamplingKind = Annotated[Sampling, typer.Option(help="how batches are drawn")]
MaxBatch = Annotated[
    int | None, typer.Option(help="truncated-poisson: where batches are cut; --batch if left out")
]
WhichAccountant = Annotated[AccountantName, typer.Option(help="gdp is an approximation")]
WhichRelation = Annotated[Relation, typer.Option(help="what makes two data sets neighbours")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]
PlotFile = Annotated[Path | None, typer.Option(help="draw the growth of ε into this file")]


def account(
    noise_multiplier: Annotated[float, Noise],
    steps: Annotated[int, typer.Option(help="T: how many batches are released")],
    delta: Delta,
    sampling: SamplingKind = Sampling.POISSON,
    rate: Annotated[float | None, typer.Option(help="q, in place of records and batch")] = None,
    records: Annotated[int | None, Records] = None,
    batch: Annotated[int | None, BatchSize] = None,
    max_batch: MaxBatch = None,
    accountant: WhichAccountant = AccountantName.PLD,
    relation: WhichRelation = Relation.ADD_REMOVE,
    as_json: AsJson = False,
    plot: PlotFile = None,
) -> None:
    """Say what a run costs: ε at δ.

    Give --rate, or --records and --batch. Exits with 2, and one sentence that says what to change,
    if the options make no sense or the accountant does not cover them.
    """
    with sentences():
        require_delta(delta)
        batches = batches_of(sampling, rate=rate, records=records, batch=batch, max_batch=max_batch)
        question = Question(batches, noise_multiplier, steps, delta, relation)
        chosen = ACCOUNTANTS[accountant.value]
        spent = chosen.epsilon(question.event, delta=delta, relation=relation)
        _answer(question, chosen, spent, as_json=as_json, plot=plot)


def plan(
    records: Annotated[int, Records],
    batch: Annotated[int, BatchSize],
    epochs: Annotated[float, typer.Option(help="expected passes over the data")],
    delta: Delta,
    epsilon: Annotated[float | None, typer.Option(help="ε to find the noise for")] = None,
    noise_multiplier: Annotated[float | None, Noise] = None,
    sampling: SamplingKind = Sampling.POISSON,
    max_batch: MaxBatch = None,
    accountant: WhichAccountant = AccountantName.PLD,
    relation: WhichRelation = Relation.ADD_REMOVE,
    as_json: AsJson = False,
    plot: PlotFile = None,
) -> None:
    """Find the noise for an ε, or the ε of a noise, for some passes over the data.

    Give --epsilon or --noise-multiplier. Exits with 2, and one sentence that says what to change,
    if the options make no sense or the accountant does not cover them.
    """
    with sentences():
        require_delta(delta)
        if not (math.isfinite(epochs) and epochs > 0):
            raise ValueError(f"expected --epochs above 0, got {epochs}; pass 1 for one pass")
        batches = batches_of(sampling, rate=None, records=records, batch=batch, max_batch=max_batch)
        steps = math.ceil(epochs / batches.rate - 1e-9)
        chosen = ACCOUNTANTS[accountant.value]
        require_proof(chosen)
        if epsilon is not None and noise_multiplier is None:
            target = Target(epsilon, delta, relation, chosen)
            noise, spent = least_noise(lambda z: repeated(steps, batches.event(z)), target)
        elif noise_multiplier is not None and epsilon is None:
            noise, run = noise_multiplier, repeated(steps, batches.event(noise_multiplier))
            spent = chosen.epsilon(run, delta=delta, relation=relation)
        else:
            given = "neither" if epsilon is None else "both"
            raise ValueError(
                f"expected either --epsilon or --noise-multiplier, got {given}; give one of them"
            )
        question = Question(batches, noise, steps, delta, relation)
        _answer(question, chosen, spent, as_json=as_json, plot=plot)


def _answer(
    question: Question, accountant: Accountant, spent: float, *, as_json: bool, plot: Path | None
) -> None:
    for warning in question.warnings:
        typer.echo(f"Warning: {warning}", err=True)
    if plot is not None:
        curves = {
            a.name if a.proves else f"{a.name} (approximate)": growth(question, a)
            for a in ACCOUNTANTS.values()
            if a.supports(question.event, question.relation)
        }
        saved(curves, plot, title=f"ε at δ = {question.delta:g}, {question.relation.value}")
    if as_json:
        typer.echo(json.dumps(_facts(question, accountant, spent)))
    else:
        console = Console()
        for part in shown(question, accountant, spent, width=min(console.width - 10, 70)):
            console.print(part)


def _facts(question: Question, accountant: Accountant, spent: float) -> dict[str, Any]:
    batches = question.batches
    return {
        "epsilon": spent,
        "delta": question.delta,
        "accountant": accountant.name,
        "approximate": not accountant.proves,
        "relation": question.relation.value,
        "sampling": batches.sampling.value,
        "noise_multiplier": question.noise_multiplier,
        "steps": question.steps,
        "rate": batches.rate,
        "records": batches.records,
        "batch": batches.batch,
        "max_batch": batches.max_batch,
        "warnings": question.warnings,
    }
