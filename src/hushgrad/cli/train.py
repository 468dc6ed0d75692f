"""`hushgrad train`."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from warnings import catch_warnings, filterwarnings

import typer

from hushgrad.algorithms.named import NAMED
from hushgrad.cli.errors import explain_errors
from hushgrad.cli.progress import Bar, show_certification
from hushgrad.cli.request import (
    RecipeCall,
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
from hushgrad.launch.recipe import Recipe
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


RecipeName = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE]",
        help="file.py:function or module:function, which returns a Recipe, or a name of "
        "hushgrad train list; any parameter of the function is an option",
    ),
]
DataSet = Annotated[str | None, _of_recipe("one of", CLASSIFIED)]
ModelName = Annotated[str | None, _of_recipe("one of", MODELS)]
Epsilon = Annotated[str | None, _of_recipe("ε of the whole run")]
WholeDelta = Annotated[str | None, _of_recipe("δ of the whole run, below 1 / records")]
ExpectedBatch = Annotated[str | None, _of_recipe("the expected size of a batch")]
Epochs = Annotated[str | None, _of_recipe("expected passes over the data")]
LearningRate = Annotated[str | None, _of_recipe("the learning rate")]
ClipName = Annotated[str | None, _of_recipe("the clipping rule, one of", CLIPS)]
AlgorithmName = Annotated[str | None, _of_recipe("one of", NAMED)]
DataFolder = Annotated[
    Path | None, typer.Option(help="the folder of the data sets; HUSHGRAD_DATA if left out")
]
RunFolder = Annotated[
    Path | None, typer.Option(help="the run's folder; runs/NAME-1, -2, … if left out")
]
RunSeed = Annotated[int | None, typer.Option(help="reproducible, and not private")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with the run in --output")]
CheckpointEvery = Annotated[
    int | None, typer.Option(min=1, metavar="STEPS", help="a twentieth of them if left out")
]
BudgetFile = Annotated[Path | None, typer.Option(help="the file of the data set's budget")]
BudgetName = Annotated[str | None, typer.Option(help="its name in the ledger")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress bar")]
ResultAsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


@dataclass(frozen=True)
class RunOptions:
    """The options of `hushgrad train` that are not the recipe's; see its help."""

    data: Path | None
    output: Path | None
    seed: int | None
    resume: bool
    checkpoint_every: int | None
    ledger: Path | None
    dataset_name: str | None
    device: str
    quiet: bool


@dataclass(frozen=True)
class TrainingJob:
    """A run that has started, with what is needed to carry it out and to write its folder."""

    run: Run
    recipe: Recipe
    folder: Path
    request: Request
    stopped: Callable[[], bool]


def train(
    arguments: RecipeName = None,
    dataset: DataSet = None,
    model: ModelName = None,
    epsilon: Epsilon = None,
    delta: WholeDelta = None,
    batch: ExpectedBatch = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    clip: ClipName = None,
    algorithm: AlgorithmName = None,
    data: DataFolder = None,
    output: RunFolder = None,
    seed: RunSeed = None,
    resume: Resume = False,
    checkpoint_every: CheckpointEvery = None,
    ledger: BudgetFile = None,
    dataset_name: BudgetName = None,
    device: Device = "cpu",
    quiet: Quiet = False,
    as_json: ResultAsJson = False,
) -> None:
    """Train a model with differential privacy, as a recipe says.

    A recipe is a function that returns a hushgrad.launch.recipe.Recipe. What the run leaves is in
    its folder, with a report. Exits with 2, and one sentence, where it cannot start: nothing is
    written or spent then. Ctrl-C leaves a checkpoint and exits with 130.
    """
    if arguments == ["list"]:
        list_recipes()
        return
    named = {"dataset": dataset, "model": model, "epsilon": epsilon, "delta": delta, "clip": clip}
    named |= {"batch": batch, "epochs": epochs, "lr": lr, "algorithm": algorithm}
    options = RunOptions(
        data=data,
        output=output,
        seed=seed,
        resume=resume,
        checkpoint_every=checkpoint_every,
        ledger=ledger,
        dataset_name=dataset_name,
        device=device,
        quiet=quiet or as_json,
    )
    with ExitStack() as stack:
        # Only what comes before the first step exits with 2; later errors say how to go on.
        with explain_errors():
            job = _start(stack, read_call(arguments or [], named), options)
        found = _carry_out(job, options)
        _say(found, job.run, job.folder, as_json=as_json)


def _start(stack: ExitStack, call: RecipeCall, options: RunOptions) -> TrainingJob:
    """Check everything, and start the run; the ledger stays open until the stack is left."""
    budget = stack.enter_context(
        open_budget(options.ledger, options.dataset_name, "--dataset-name")
    )
    folder = (
        folder_to_resume(options.output)
        if options.resume
        else free_folder(options.output, call.name)
    )
    charged = ["--ledger", str(options.ledger), "--dataset-name", str(options.dataset_name)]
    request = request_for(
        call, seed=options.seed, data=options.data, ledger=charged if budget else []
    )
    if options.resume:
        request = request_to_resume(request, folder)
    with catch_warnings():
        # `check` refuses what this warns of.
        filterwarnings("ignore", "expected delta below 1 / records", UserWarning)
        recipe = call.recipe(data=options.data, seed=request.weights_seed)
    with (
        show_certification(quiet=options.quiet),
        explain_failure("the recipe's model and loss"),
    ):
        check(recipe, device=options.device)
    rng = Rng.from_os() if options.seed is None else Rng.fixed(options.seed)
    # From here on Ctrl-C must not lose a step that was charged.
    stopped = stack.enter_context(catch_interrupts())
    run = start(
        recipe,
        rng=rng,
        folder=folder,
        budget=budget,
        resume=options.resume,
        device=options.device,
    )
    return TrainingJob(run, recipe, folder, request, stopped)


def _carry_out(job: TrainingJob, options: RunOptions) -> dict[str, Any]:
    """Take the steps and write the folder; returns what is in result.json."""
    run, folder, request = job.run, job.folder, job.request
    # VERSIONS is the last file of the beginning: a run that was killed before it begins again here.
    if not (folder / VERSIONS).exists():
        with explain_how_to_resume(request, folder):
            write_beginning(run, folder, request)
    every = options.checkpoint_every or max(1, len(run) // _CHECKPOINTS)
    with (
        Bar(run.plan, quiet=options.quiet, taken=run.steps_taken) as bar,
        explain_how_to_resume(request, folder, run),
    ):
        outcome = carry_out(
            run,
            job.recipe,
            checkpoint_every=every,
            device=options.device,
            each_step=bar,
            stopped=job.stopped,
        )
    with explain_how_to_resume(request, folder):
        if not outcome.finished:
            _say_how_to_resume(run, folder, request)
        return write_end(outcome, job.recipe, folder, request)


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
        # A second Ctrl-C finds the handler that was there before, and ends the process.
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
        # A run that broke off keeps its charges: the steps may have been seen.
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
    # On stderr: with --json, stdout holds the result of a finished run or nothing.
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
