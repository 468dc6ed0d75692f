"""From a recipe to a trained model: the loop, and the accuracy on public records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hushgrad.batches.records import count, cut, map_tensors
from hushgrad.launch.recipe import Recipe
from hushgrad.ledger import Budget
from hushgrad.rng import Rng
from hushgrad.run.admission import needs_rng
from hushgrad.run.training import Run, train
from hushgrad.types import Batch

WATCHED = "accuracy"
"""The metric that a recipe's `correct` is watched as, where its plan asks for it."""

_TEST_PIECE = 1000  # test records at once: all of them might not fit into memory


@dataclass(frozen=True)
class Outcome:
    """A run that has stopped: at its plan's end, or before it, to be resumed.

    Args:
        run: the run.
        seconds: those of this process.
        finished: whether all steps of the plan were taken.
        accuracy: that on the recipe's public records, None without any or before the end.
    """

    run: Run
    seconds: float
    finished: bool
    accuracy: float | None


@needs_rng
def start(
    recipe: Recipe,
    *,
    rng: Rng,
    folder: Path | None = None,
    budget: Budget | None = None,
    resume: bool = False,
    device: str = "cpu",
) -> Run:
    """Start the recipe's run, or go on from the checkpoint in `folder`.

    Where it is refused, nothing that it made is left.

    Args:
        recipe: what is trained.
        rng: the run's key, `Rng.from_os()` for a private run.
        folder: where checkpoints are kept, None for none.
        budget: what the run is charged to, None for a ledger of its own.
        resume: whether to go on with the run in `folder`.
        device: where the model is trained.

    Raises:
        Refused: the run would not keep what it states, or the budget has less left.
    """
    # Before the run looks at the parameters: they must not be replaced after that.
    recipe.model.to(device)
    if recipe.average is not None:
        recipe.average.to(device)
    # Named to the run, so that checkpoints have their state too.
    kept: dict[str, Any] = {"schedule": recipe.schedule, "average": recipe.average}
    return train(
        recipe.model,
        recipe.optimizer,
        recipe.data,
        plan=recipe.plan,
        rng=rng,
        execution=recipe.execution,
        budget=budget,
        folder=folder,
        resume=resume,
        keep={name: thing for name, thing in kept.items() if thing is not None},
    )


def carry_out(
    run: Run,
    recipe: Recipe,
    *,
    checkpoint_every: int | None = None,
    device: str = "cpu",
    each_step: Callable[[Run], None] = lambda run: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Take the steps that are left, and measure the model on the recipe's public records.

    Args:
        run: a run that `start` made.
        recipe: what it was made from.
        checkpoint_every: after so many steps a checkpoint is written.
        device: where the model is trained.
        each_step: called after every step. It sees the run, and so only what was released.
        stopped: asked after every step; once it says so, a checkpoint is written, and the run can
            be resumed.
    """
    begun = time.monotonic()
    # What is watched is released with noise, so the plan must have named it.
    asked = run.plan.metrics is not None and WATCHED in run.plan.metrics.watched
    watch = {WATCHED: recipe.correct} if asked and recipe.correct is not None else {}
    for batch in run:
        run.step(recipe.loss, _on(device, batch), watch=watch)
        if recipe.schedule is not None:
            recipe.schedule.step()
        if recipe.average is not None:
            recipe.average.update_parameters(recipe.model)
        each_step(run)
        left = len(run) - run.steps_taken
        stop = left > 0 and stopped()  # after the last step there is nothing to resume
        due = checkpoint_every is not None and run.steps_taken % checkpoint_every == 0
        if stop or (due and left > 0):
            run.save()
        if stop:
            return Outcome(run, time.monotonic() - begun, finished=False, accuracy=None)
    # The loop has finished the run, so the model may be changed again.
    if recipe.average is not None:
        recipe.model.load_state_dict(recipe.average.module.state_dict())
    seconds = time.monotonic() - begun
    return Outcome(run, seconds, finished=True, accuracy=accuracy(recipe, device=device))


@needs_rng
def launch(recipe: Recipe, *, rng: Rng, folder: Path | None = None, device: str = "cpu") -> Outcome:
    """Train as the recipe says, from the start to the end of its plan.

    Args:
        recipe: what is trained.
        rng: the run's key, `Rng.from_os()` for a private run.
        folder: where checkpoints are kept, None for none.
        device: where the model is trained.

    Returns:
        The run, with its guarantee, and the accuracy on public records.

    >>> from hushgrad.launch.builtin import classifier
    >>> recipe = classifier(epochs=1, noise_multiplier=2.0)
    >>> outcome = launch(recipe, rng=Rng.fixed(0))
    >>> outcome.finished, outcome.run.steps_taken
    (True, 2)
    """
    run = start(recipe, rng=rng, folder=folder, device=device)
    return carry_out(run, recipe, device=device)


def accuracy(recipe: Recipe, *, device: str = "cpu") -> float | None:
    """The share of the recipe's public test records that the model has right; None without any.

    No noise is added: the test records are taken to be public.
    """
    if recipe.test is None or recipe.correct is None:
        return None
    # Dropout and the like are off while accuracy is measured, and back on after it.
    was_training = recipe.model.training
    recipe.model.eval()
    with torch.no_grad():
        right = sum(
            float(recipe.correct(_on(device, piece)).double().sum())
            for piece in _pieces(recipe.test)
        )
    recipe.model.train(was_training)
    return right / count(recipe.test)


def _on(device: str, batch: Batch) -> Batch:
    return map_tensors(lambda x: x.to(device), batch)


def _pieces(batch: Batch) -> Iterator[Batch]:
    size = count(batch)
    for begin in range(0, size, _TEST_PIECE):
        yield cut(batch, begin, min(begin + _TEST_PIECE, size))
