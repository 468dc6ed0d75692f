"""From a recipe to a trained model: the loop, and the accuracy on public records."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hushgrad.persample.records import count, cut, map_tensors
from hushgrad.recipe import Recipe
from hushgrad.rng import Rng
from hushgrad.training import Run, train
from hushgrad.types import Batch

_TEST_PIECE = 1000


@dataclass(frozen=True)
class Outcome:
    """A run that has ended, how long it took, and its accuracy on the recipe's public records."""

    run: Run
    seconds: float
    accuracy: float | None


def launch(
    recipe: Recipe,
    *,
    rng: Rng,
    device: str = "cpu",
    each_step: Callable[[Run], None] | None = None,
) -> Outcome:
    """Train as the recipe says, to the end of its plan.

    `each_step` is called after every step. It sees the run, and so only what was released.
    """
    recipe.model.to(device)
    start = time.monotonic()
    run = train(
        recipe.model,
        recipe.optimizer,
        recipe.data,
        plan=recipe.plan,
        rng=rng,
        execution=recipe.execution,
    )
    for batch in run:
        run.step(recipe.loss, map_tensors(lambda x: x.to(device), batch))
        if recipe.schedule is not None:
            recipe.schedule.step()
        if recipe.average is not None:
            recipe.average.update_parameters(recipe.model)
        if each_step is not None:
            each_step(run)
    if recipe.average is not None:
        recipe.model.load_state_dict(recipe.average.module.state_dict())
    seconds = time.monotonic() - start
    return Outcome(run, seconds, accuracy(recipe, device=device))


def accuracy(recipe: Recipe, *, device: str = "cpu") -> float | None:
    """The share of the recipe's public test records that the model has right; None if it has none.

    No noise is added: the test records are taken to be public.
    """
    if recipe.test is None or recipe.correct is None:
        return None
    was_training = recipe.model.training
    recipe.model.eval()
    with torch.no_grad():
        right = sum(
            float(recipe.correct(piece).double().sum()) for piece in _pieces(recipe.test, device)
        )
    recipe.model.train(was_training)
    return right / count(recipe.test)


def _pieces(batch: Batch, device: str) -> list[Batch]:
    def to(x: Tensor) -> Tensor:
        return x.to(device)

    size = count(batch)
    return [
        map_tensors(to, cut(batch, start, min(start + _TEST_PIECE, size)))
        for start in range(0, size, _TEST_PIECE)
    ]
