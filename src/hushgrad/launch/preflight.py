"""What is looked at before a run starts, so that nothing is written or spent on a mistake.

Most checks are on public numbers. Three look at private records: that no feature is NaN or
infinite, that no label or index is out of the model's range, and that the model can be certified.
Each tells yes or no, never which record; the report names these answers as not counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad.batches.nested import leaves_of
from hushgrad.gradients import restored
from hushgrad.launch.recipe import Recipe
from hushgrad.run.augmentation import rows_per_record
from hushgrad.sampling import Loader
from hushgrad.types import Batch, Refused

UNCOUNTED = (
    "the yes or no of three checks before the run: whether features are finite, whether labels are "
    "in range, and whether the model can be certified"
)
"""What the checks tell about the records, in words for the report."""

_PROBES = 8  # of the first records, to certify with


def check(recipe: Recipe, *, device: str = "cpu") -> None:
    """Raise one sentence for a run that could not go well. Reads, and changes nothing.

    Records that are fetched one by one are not all read: only the first few are.

    Args:
        recipe: what is to be trained.
        device: where.

    Raises:
        ValueError: there is no such device, or δ is 1 / records or more.
        Refused: a feature is not finite, a label or index is out of the model's range, or the model
            cannot be certified.
    """
    require_device(device)
    _require_small_delta(recipe)
    if recipe.plan.sampling.loader is not None:
        return  # its loader has the records
    loader = recipe.data if isinstance(recipe.data, Loader) else Loader(recipe.data)
    columns = [_tensor(x) for x in leaves_of(loader.columns)]
    for column in columns:
        if column.is_floating_point() and not bool(column.isfinite().all()):
            raise Refused(
                "expected finite features, got NaN or infinity among the records; replace them by "
                "a public constant before training"
            )
    extremes = [i for column in columns for i in _extremes(column)]
    # An index out of range shows on a record with an extreme one; the others are to certify with.
    probes = loader.load(np.array([*extremes, *range(_PROBES)]))
    with torch.random.fork_rng(), restored({}, (recipe.model,)):
        _require_in_range(recipe, probes)
        _require_certified(recipe, probes)


def require_device(device: str) -> None:
    """Raise unless torch has this device.

    Raises:
        ValueError: a tensor cannot be made there.

    >>> require_device("cpu")
    """
    # torch says of a device in three kinds of errors that it is not there.
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"expected a device that torch finds, got {device!r}; leave --device out to use the "
            "processor"
        ) from error


def _require_small_delta(recipe: Recipe) -> None:
    delta, records = recipe.plan.delta, recipe.plan.records
    if delta * records >= 1:
        raise ValueError(
            f"expected delta below 1 / records = {1 / records:.2g}, got {delta:g}, by which "
            "publishing a record chosen at random would pass; use a smaller delta"
        )


def _extremes(column: Tensor) -> list[int]:
    """Where a column of whole numbers has its least and its largest."""
    if column.is_floating_point() or column.is_complex() or not column.numel():
        return []
    width = column[0].numel() or 1
    flat = column.reshape(-1).to(torch.int64)
    return [int(flat.argmin()) // width, int(flat.argmax()) // width]


def _require_in_range(recipe: Recipe, probes: Batch) -> None:
    """Try the loss on the records with the least and the largest of every whole number."""
    try:
        with torch.no_grad():
            recipe.loss(probes)
    except IndexError:
        # The cause is left out: it would name a record's value.
        raise Refused(
            "expected labels and indices in the model's range, got a record that the loss cannot "
            "take; count classes from 0, and give the model an output for each"
        ) from None


def _require_certified(recipe: Recipe, probes: Batch) -> None:
    params = {name: p for name, p in recipe.model.named_parameters() if p.requires_grad}
    # At the size of the run's largest batch, so that the first step finds its certificate.
    rows = rows_per_record(recipe.loss)
    capacity = recipe.execution.capacity(recipe.plan.largest_batch, rows=rows)
    objective = recipe.execution.objective(recipe.loss, params, (recipe.model,))
    recipe.execution.taker(objective, probes, capacity)()


def _tensor(column: Any) -> Tensor:
    return column if isinstance(column, Tensor) else torch.from_numpy(column)
