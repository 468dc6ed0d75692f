"""`hushgrad account` and `hushgrad plan`: what a run costs, and what noise it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hushgrad.accounting import ACCOUNTANTS, Accountant, Target, group_epsilon, least_noise
from hushgrad.accounting.accountants import require_delta
from hushgrad.cli.answer import answer_lines, growth
from hushgrad.cli.chart import save_chart
from hushgrad.cli.errors import explain_errors
from hushgrad.cli.parameters import AsJson, one_of
from hushgrad.cli.question import Batches, Question, batches_from_options
from hushgrad.cli.terms import Terms, open_budget, require_room, terms_of
from hushgrad.events import steps_of
from hushgrad.run.guarantee import up
from hushgrad.sampling.named import SAMPLERS
from hushgrad.types import Relation

NoiseOption = typer.Option(help="σ: noise ÷ the clipping norm of one record, whatever the relation")
RecordsOption = typer.Option(help="n: the public number of records")
BatchSize = typer.Option(help="b: the size of a batch, for poisson its expectation")
_Delta = typer.Option(help="δ of the guarantee, below 1 / records")
Delta = Annotated[float, _Delta]
SamplingKind = Annotated[str, one_of(SAMPLERS, help="how batches are drawn")]
MaxBatch = Annotated[
    int | None, typer.Option(help="truncated-poisson: where batches are cut; --batch if left out")
]
WhichAccountant = Annotated[str, one_of(ACCOUNTANTS, help="gdp approximates")]
AnyAccountant = Annotated[str | None, one_of(ACCOUNTANTS, help="pld if left out, or one of")]
WhichRelation = Annotated[Relation, typer.Option(help="what makes two data sets neighbours")]
Group = Annotated[
    int, typer.Option(help="k: also say what it costs k records at once, or a user who has k")
]
PlotFile = Annotated[Path | None, typer.Option(help="draw the growth of ε into this file")]


def account(
    noise_multiplier: Annotated[float, NoiseOption],
    steps: Annotated[int, typer.Option(help="T: how many batches are released")],
    delta: Delta,
    sampling: SamplingKind = "poisson",
    rate: Annotated[float | None, typer.Option(help="q, in place of records and batch")] = None,
    records: Annotated[int | None, RecordsOption] = None,
    batch: Annotated[int | None, BatchSize] = None,
    max_batch: MaxBatch = None,
    accountant: WhichAccountant = "pld",
    relation: WhichRelation = Relation.ADD_REMOVE,
    group: Group = 1,
    as_json: AsJson = False,
    plot: PlotFile = None,
) -> None:
    """Say what a run costs: ε at δ.

    Give --rate, or --records and --batch. Exits with 2, and one sentence that says what to change,
    if the options make no sense or the accountant does not cover them.
    """
    with explain_errors():
        require_delta(delta)  # before anything is computed with it
        batches = batches_from_options(
            sampling, rate=rate, records=records, batch=batch, max_batch=max_batch
        )
        question = Question(batches, noise_multiplier, steps, delta, relation, group)
        chosen = ACCOUNTANTS[accountant]
        spent = chosen.epsilon(question.event, delta=delta, relation=relation)
        _answer(question, chosen, spent, as_json=as_json, plot=plot)


def plan(
    records: Annotated[int, RecordsOption],
    batch: Annotated[int, BatchSize],
    epochs: Annotated[float, typer.Option(help="expected passes over the data")],
    delta: Annotated[float | None, _Delta] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε to find the noise for")] = None,
    noise_multiplier: Annotated[float | None, NoiseOption] = None,
    sampling: SamplingKind = "poisson",
    max_batch: MaxBatch = None,
    accountant: Annotated[
        str | None, one_of(ACCOUNTANTS, help="pld if left out, or one of")
    ] = None,
    relation: Annotated[Relation | None, typer.Option(help="add-remove if left out")] = None,
    ledger: Annotated[Path | None, typer.Option(help="a ledger's file, with --dataset")] = None,
    dataset: Annotated[str | None, typer.Option(help="whose budget must have room")] = None,
    as_json: AsJson = False,
    plot: PlotFile = None,
) -> None:
    """Find the noise for an ε, or the ε of a noise, for some passes over the data.

    Give --epsilon or --noise-multiplier, and --delta. With --ledger and --dataset the plan must
    fit what that budget has left, and what is left out is taken from it: the plan then costs all
    of it. Nothing is spent. Exits with 2, and one sentence that says what to change, if the
    options make no sense, the accountant does not cover them, or the budget has no room.
    """
    with explain_errors(), open_budget(ledger, dataset, "--dataset") as budget:
        batches = batches_from_options(
            sampling, rate=None, records=records, batch=batch, max_batch=max_batch
        )
        steps = steps_of(epochs, records=records, batch=batch)
        # With neither, the budget is asked for what it has left.
        neither = epsilon is None and noise_multiplier is None
        terms = terms_of(
            budget,
            accountant=accountant,
            relation=relation,
            delta=delta,
            calibrated=neither,
        )
        noise, spent = _noise_and_cost(batches, steps, terms, epsilon, noise_multiplier)
        question = Question(batches, noise, steps, terms.delta, terms.relation)
        if budget is not None:
            # Asked of the ledger itself, so that a plan that passes here is taken there too.
            require_room(budget, question.event, spent, terms)
        _answer(question, terms.accountant, spent, as_json=as_json, plot=plot)


def _noise_and_cost(
    batches: Batches, steps: int, terms: Terms, epsilon: float | None, noise: float | None
) -> tuple[float, float]:
    """Return the noise multiplier of a plan and its ε: one of them was given, or is left."""
    aim = terms.epsilon if epsilon is None else epsilon
    if (aim is None) == (noise is None):
        given = "neither" if noise is None else "both"
        raise ValueError(
            f"expected either --epsilon or --noise-multiplier, got {given}; give one of them"
        )
    delta, relation, accountant = terms.delta, terms.relation, terms.accountant
    if noise is not None:
        event = batches.run(noise, steps)
        return noise, accountant.epsilon(event, delta=delta, relation=relation)
    assert aim is not None
    target = Target(aim, delta, relation, accountant)
    return least_noise(lambda sigma: batches.run(sigma, steps), target)


def _answer(
    question: Question, accountant: Accountant, spent: float, *, as_json: bool, plot: Path | None
) -> None:
    # One record is a group of its own, and its ε is known.
    shared = spent if question.group == 1 else _of_group(question, accountant)
    for warning in question.warnings:
        typer.echo(f"Warning: {warning}", err=True)  # stdout holds results alone
    if plot is not None:
        # Every accountant that covers the run, so that they can be compared by eye.
        curves = {
            a.name if a.proves else f"{a.name} (approximate)": growth(question, a)
            for a in ACCOUNTANTS.values()
            if a.supports(question.event, question.relation)
        }
        save_chart(curves, plot, title=f"ε at δ = {question.delta:g}, {question.relation.value}")
    if as_json:
        typer.echo(json.dumps(_facts(question, accountant, spent, shared)))
    else:
        console = Console()
        for part in answer_lines(question, accountant, spent, width=min(console.width - 10, 70)):
            console.print(part)
        if question.group > 1:
            console.print(f"{question.group} records at once, or a user with so many: ", end="")
            console.print(f"[bold]ε = {up(shared)}[/bold] at δ = {question.delta:g}")


def _of_group(question: Question, accountant: Accountant) -> float:
    return group_epsilon(
        question.event,
        size=question.group,
        delta=question.delta,
        relation=question.relation,
        accountant=accountant,
    )


def _facts(
    question: Question, accountant: Accountant, spent: float, shared: float
) -> dict[str, Any]:
    batches = question.batches
    return {
        "epsilon": spent,
        "delta": question.delta,
        "accountant": accountant.name,
        "approximate": not accountant.proves,
        "relation": question.relation.value,
        "sampling": batches.name,
        "noise_multiplier": question.noise_multiplier,
        "steps": question.steps,
        "rate": batches.rate,
        "records": batches.records,
        "batch": batches.batch,
        "max_batch": batches.max_batch,
        "group": question.group,
        "group_epsilon": shared,
        "warnings": question.warnings,
    }
