"""What the accounting commands print: ε by every accountant and relation, and its growth."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table

from hushgrad.accounting import ACCOUNTANTS, Accountant
from hushgrad.accounting.closed_forms import sampled_gaussian_epsilon
from hushgrad.cli.chart import ChartCurve, draw_chart
from hushgrad.cli.question import Question
from hushgrad.run.guarantee import up
from hushgrad.types import Refused, Relation

_POINTS = 20


def answer_lines(
    question: Question, accountant: Accountant, spent: float, *, width: int
) -> Iterator[Table | str]:
    """Yield what is printed, from top to bottom.

    Args:
        question: the run.
        accountant: the one that was asked for.
        spent: the run's ε by it.
        width: of the chart, in characters.
    """
    batches = question.batches
    # An approximation may under-state ε, and must not be read as a guarantee.
    mark = "" if accountant.proves else "≈ "
    yield (
        f"[bold]ε = {mark}{up(spent)}[/bold] at δ = {question.delta:g}: {accountant.name}, "
        f"{question.relation.value}, {batches.name} sampling"
    )
    cut = "" if batches.max_batch is None else f", batches cut at {batches.max_batch}"
    yield (
        f"noise multiplier {up(question.noise_multiplier)} (noise ÷ clipping norm), "
        f"{question.steps} steps, rate {batches.rate:.6g}{cut}"
    )
    yield _table(question, accountant, spent)
    # The footnote is for a ≈ in the table; where there is none, it would puzzle.
    if ACCOUNTANTS["gdp"].supports(question.event, question.relation):
        yield "≈ an approximation that may under-state ε: never used for a guarantee"
    yield "– not covered: asking for it says what to use instead"
    yield f"ε by {accountant.name} as the run goes, had each step been the plan's last:"
    yield draw_chart(growth(question, accountant), width=width)


def _table(question: Question, accountant: Accountant, spent: float) -> Table:
    table = Table(
        title=f"ε of the same noise at δ = {question.delta:g}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("accountant", no_wrap=True)
    for relation in Relation:
        table.add_column(relation.value, justify="right", no_wrap=True)
    for other in ACCOUNTANTS.values():
        # The number that was asked for took a while already.
        known = {question.relation: spent} if other is accountant else {}
        cells = [_cell(question, other, relation, known) for relation in Relation]
        table.add_row(other.name, *cells)
    if question.batches.name == "without-replacement":
        # The lemmas are proved for replacing a record, under batches of a fixed size.
        formula = _closed_form(question)
        cells = [formula if relation is Relation.REPLACE_ONE else "–" for relation in Relation]
        table.add_row("DP-SRM's lemmas", *cells)
    return table


def _closed_form(question: Question) -> str:
    """ε by the formula of a paper, where its conditions hold: to be seen beside the accountants."""
    try:
        found = sampled_gaussian_epsilon(
            question.noise_multiplier,
            rate=question.batches.rate,
            steps=question.steps,
            delta=question.delta,
        )
    except Refused:
        return "–"
    return up(found)


def _cell(
    question: Question, accountant: Accountant, relation: Relation, known: dict[Relation, float]
) -> str:
    try:
        spent = known.get(relation)
        if spent is None:
            spent = accountant.epsilon(question.event, delta=question.delta, relation=relation)
    except Refused:
        return "–"
    return up(spent) if accountant.proves else f"≈ {up(spent)}"


def growth(question: Question, accountant: Accountant) -> ChartCurve:
    """ε after some of the steps, by the accountant's sketch, which over-states it a little.

    Args:
        question: the run.
        accountant: whose sketch is taken: a curve is looked at, and never stated as a guarantee.
    """
    # A set, since the first of few steps may be drawn twice.
    points = sorted({max(1, round(question.steps * k / _POINTS)) for k in range(1, _POINTS + 1)})
    quick, relation = accountant.sketch(), question.relation
    return [
        (n, quick.epsilon(question.after(n), delta=question.delta, relation=relation))
        for n in points
    ]
