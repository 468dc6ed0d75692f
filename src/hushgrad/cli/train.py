"""`hushgrad train`."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any
from warnings import catch_warnings, filterwarnings

import typer

from hushgrad.algorithms.named import NAMED
from hushgrad.cli.errors import explain_errors
from hushgrad.cli.progress import Bar, show_certification
from hushgrad.cli.request import (
    folder_to_resume,
    free_folder,
    read_call,
    recipe_lines,
    request_for,
    request_to_resume,
)
from hushgrad.cli.target import explain_failure
from hushgrad.cli.terms import open_budget
from hushgrad.clipping.named import CLIPS
from hushgrad.data import CLASSIFIED
from hushgrad.launch.builtin import MODELS
from hushgrad.launch.loop import carry_out, start
from hushgrad.launch.preflight import check
from hushgrad.launch.report import VERSIONS, Request, write_beginning, write_end, write_progress
from hushgrad.launch.words import in_words
from hushgrad.rng import Rng
from hushgrad.run.training import Run

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

_CHECKPOINTS = 20  # of a whole run, if nothing else is asked for


def _of_recipe(text: str, registry: Iterable[str] = ()) -> Any:
    """An option that is declared for its help alone: the recipe's function says what it takes."""
    names = ", ".join(registry)
    return typer.Option(
        help=f"{text} {names}; without a RECIPE" if names else text,
        rich_help_panel="Options of the recipe",
        metavar="VALUE",
    )


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="file.py:function or module:function, which returns a Recipe, or a name of "
            "hushgrad train list; any parameter of the function is an option",
        ),
    ] = None,
    dataset: Annotated[str | None, _of_recipe("one of", CLASSIFIED)] = None,
    model: Annotated[str | None, _of_recipe("one of", MODELS)] = None,
    epsilon: Annotated[str | None, _of_recipe("ε of the whole run")] = None,
    delta: Annotated[str | None, _of_recipe("δ of the whole run, below 1 / records")] = None,
    batch: Annotated[str | None, _of_recipe("the expected size of a batch")] = None,
    epochs: Annotated[str | None, _of_recipe("expected passes over the data")] = None,
    lr: Annotated[str | None, _of_recipe("the learning rate")] = None,
    clip: Annotated[str | None, _of_recipe("the clipping rule, one of", CLIPS)] = None,
    algorithm: Annotated[str | None, _of_recipe("one of", NAMED)] = None,
    data: Annotated[
        Path | None, typer.Option(help="the folder of the data sets; HUSHGRAD_DATA if left out")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="the run's folder; runs/NAME-1, -2, … if left out")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="reproducible, and not private")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the run in --output")
    ] = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, metavar="STEPS", help="a twentieth of them if left out")
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="the file of the data set's budget")] = None,
    dataset_name: Annotated[str | None, typer.Option(help="its name in the ledger")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress bar")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Train a model with differential privacy, as a recipe says.

    A recipe is a function that returns a hushgrad.launch.recipe.Recipe. What the run leaves is in
    its folder, with a report. Exits with 2, and one sentence, where it cannot start: nothing is
    written or spent then. Ctrl-C leaves a checkpoint and exits with 130.
    """
    named = {"dataset": dataset, "model": model, "epsilon": epsilon, "delta": delta}
    named |= {"batch": batch, "epochs": epochs, "lr": lr, "clip": clip}
    named["algorithm"] = algorithm
    if arguments == ["list"]:
        list_recipes()
        return
    with ExitStack() as stack:
        with explain_errors():
            call = read_call(arguments or [], named)
            budget = stack.enter_context(open_budget(ledger, dataset_name, "--dataset-name"))
            folder = folder_to_resume(output) if resume else free_folder(output, call.name)
            charged = ["--ledger", str(ledger), "--dataset-name", str(dataset_name)]
            request = request_for(call, seed=seed, data=data, ledger=charged if budget else [])
            if resume:
                request = request_to_resume(request, folder)
            with catch_warnings():
                # `check` refuses what this warns of.
                filterwarnings("ignore", "expected delta below 1 / records", UserWarning)
                recipe = call.recipe(data=data, seed=request.weights_seed)
            with (
                show_certification(quiet=quiet or as_json),
                explain_failure("the recipe's model and loss"),
            ):
                check(recipe, device=device)
            rng = Rng.from_os() if seed is None else Rng.fixed(seed)
            stopped = stack.enter_context(catch_interrupts())
            run = start(recipe, rng=rng, folder=folder, budget=budget, resume=resume, device=device)
        # It is the last file of the beginning: a run that was killed before it begins again here.
        if not (folder / VERSIONS).exists():
            with explain_how_to_resume(request, folder):
                write_beginning(run, folder, request)
        every = checkpoint_every or max(1, len(run) // _CHECKPOINTS)
        with (
            Bar(run.plan, quiet=quiet or as_json, taken=run.steps_taken) as bar,
            explain_how_to_resume(request, folder, run),
        ):
            outcome = carry_out(
                run,
                recipe,
                checkpoint_every=every,
                device=device,
                each_step=bar,
                stopped=stopped,
            )
        with explain_how_to_resume(request, folder):
            if not outcome.finished:
                _say_how_to_resume(run, folder, request)
            found = write_end(outcome, recipe, folder, request)
        _say(found, run, folder, as_json=as_json)


def list_recipes() -> None:
    """Print the recipes and data sets that can be trained by name, each with a line on it."""
    lines = list(recipe_lines())
    width = max(len(name) for name, _ in lines)
    for name, line in lines:
        typer.echo(f"{name:{width}}  {line}")


@contextmanager
def catch_interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed, so that no step is broken off.

    Pressed again it ends the process at once, as usual.
    """
    pressed = False

    def note(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def explain_how_to_resume(request: Request, folder: Path, run: Run | None = None) -> Iterator[None]:
    """Turn an error into a sentence, how far the run came, and the command that goes on from there.

    Args:
        request: what was asked for.
        folder: the run's.
        run: the run, if it takes steps in the block.

    Raises:
        typer.Exit: the block raised `ValueError` or `OSError`, such as for a full disk.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        ended = (
            ""
            if run is None
            else f" The run ended after {run.steps_taken} of {run.plan.steps} steps; what it was "
            "charged stays charged."
        )
        command = _resume_command(request, folder)
        typer.echo(f"Error: {error}.{ended} To go on:\n\n    {command}\n", err=True)
        raise typer.Exit(1) from error


def _resume_command(request: Request, folder: Path) -> str:
    return f"{request.command} --output {shlex.quote(str(folder))} --resume"


def _say_how_to_resume(run: Run, folder: Path, request: Request) -> None:
    write_progress(run, folder)
    command = _resume_command(request, folder)
    typer.echo(
        f"Interrupted after {run.steps_taken} of {len(run)} steps. To go on:\n\n    {command}\n",
        err=True,
    )
    raise typer.Exit(INTERRUPTED)


def _say(found: dict[str, Any], run: Run, folder: Path, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found))
        return
    if found["accuracy"] is not None:
        typer.echo(f"{100 * found['accuracy']:.2f} % of the test records, taken to be public")
    typer.echo(f"{run.guarantee}\n\n{in_words(run.guarantee)}\n\nReport: {folder / 'report.md'}")
