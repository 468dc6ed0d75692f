"""`hushgrad demo`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hushgrad.cli.errors import explain_errors
from hushgrad.launch.demo import EPSILONS, NAMES, TUNED, Trained, train_all
from hushgrad.launch.words import examples, in_words
from hushgrad.run.guarantee import up

_COLUMNS = ("not private", *(f"ε = {epsilon:g}" for epsilon in EPSILONS))
_PREPARED = (
    "Data: scikit-learn's digits, 1437 records to train on and 360 to test on. Pixels are divided "
    "by 16, the largest that can occur: nothing was computed from the records to prepare them."
)


def demo(
    output: Annotated[Path, typer.Option(help="where the picture goes")] = Path("demo.png"),
    seed: Annotated[int | None, typer.Option(help="reproducible, and not private")] = None,
    share: Annotated[float, typer.Option(min=0, max=1, help="of the steps, for a try")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Train two small models on scikit-learn's digits, with and without privacy.

    Takes less than two minutes, prints what the guarantee means, and saves a picture.
    """
    # On stderr, so that --json leaves stdout to the result.
    bar = Progress(
        TextColumn("{task.description:32}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True, quiet=as_json),
    )
    tasks: dict[str, object] = {}

    def show(label: str, step: int, steps: int) -> None:
        # A task is added when its run begins: the demo knows no list of them beforehand.
        if label not in tasks:
            tasks[label] = bar.add_task(label, total=steps)
        bar.update(tasks[label], completed=step)  # type: ignore[arg-type]

    with explain_errors():
        # Asked before two minutes are spent on what cannot be saved.
        if not output.parent.is_dir():
            raise ValueError(f"expected a folder that is there, got {output.parent}; make it")
        with bar, one_thread():
            found = train_all(seed=seed, share=share, each_step=show)
        save_picture(found, output)
    if as_json:
        typer.echo(json.dumps(_facts(found, output)))
        return
    console = Console()
    console.print(_table(found))
    for paragraph in _paragraphs(found):
        console.print(paragraph, highlight=False)
    console.print(f"Picture: {output}", highlight=False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: models this small are slower on two, which wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _table(found: list[Trained]) -> Table:
    table = Table(title="Accuracy on the test records", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("model")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for model, name in NAMES.items():
        table.add_row(name, *(f"{100 * t.accuracy:.1f} %" for t in found if t.model == model))
    return table


def _paragraphs(found: list[Trained]) -> list[str]:
    guarantees = [t.guarantee for t in found if t.guarantee is not None]
    loose, tight = guarantees[0], guarantees[1]
    total = math.fsum(g.epsilon_if_secret for g in guarantees)
    # Basic composition: valid whatever the runs are, and easy to follow.
    delta = math.fsum(g.delta for g in guarantees)
    return [
        in_words(loose),
        f"At ε = {EPSILONS[1]:g}: {examples(tight.epsilon_if_secret, tight.delta)}",
        f"These hold for each model alone. All {len(guarantees)} were trained on the same records, "
        f"and whoever sees them all has ε = {up(total)} and δ = {delta:g}.",
        f"{_PREPARED} {TUNED}",
        f"One of the guarantees in full:\n{loose}",
    ]


def _facts(found: list[Trained], output: Path) -> dict[str, object]:
    rows = [
        {
            "model": t.model,
            "accuracy": t.accuracy,
            "epsilon": None if t.guarantee is None else t.guarantee.epsilon_if_secret,
            "delta": None if t.guarantee is None else t.guarantee.delta,
            # With a seed there is an ε on paper and no privacy: `epsilon` is infinite then.
            "private": t.guarantee is not None and math.isfinite(t.guarantee.epsilon),
        }
        for t in found
    ]
    return {"runs": rows, "picture": str(output)}


def save_picture(found: list[Trained], path: Path) -> None:
    """Draw the accuracies as bars into an image file.

    Args:
        found: the models, in the order in which `train_all` returns them.
        path: the file, whose ending says of which kind it is.
    """
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(_COLUMNS)
    for k, column in enumerate(_COLUMNS):
        heights = [100 * t.accuracy for t in found[k :: len(_COLUMNS)]]
        places = [i + (k - 1) * width for i in range(len(heights))]
        bars = axes.bar(places, heights, width, label=column)
        axes.bar_label(bars, fmt="%.1f")
    axes.set_xticks(range(len(NAMES)), list(NAMES.values()))
    axes.set(ylabel="accuracy on test records, %", ylim=(0, 100), title="Digits, δ = 1e-05")
    figure.legend(loc="outside lower center", ncols=len(_COLUMNS))  # beside the bars
    figure.savefig(path)
