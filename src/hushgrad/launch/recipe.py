"""A recipe: a whole private training run as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from hushgrad.run.execution import Execution
from hushgrad.run.plan import Plan
from hushgrad.types import Batch, Loss


@dataclass(frozen=True)
class Recipe:
    """What a run needs: the model and its optimizer, the data, the loss, and the plan.

    A recipe is made by a function that takes keyword arguments (`data`, the folder of the data
    sets; `seed`; `epsilon`) and does nothing private: it spends no budget and releases nothing.
    Each call makes a new model.

    Args:
        model: what is trained.
        optimizer: what moves its parameters.
        data: the private records, as `train` takes them.
        loss: returns one value for each record of a batch.
        plan: everything that the guarantee depends on.
        correct: tells for each record of a batch whether the model is right, as 0 or 1.
        test: public records, on which accuracy is measured without noise.
        schedule: a schedule of learning rates, stepped once a step.
        average: an average of the weights, updated once a step; the model ends with it.
        execution: how gradients are computed, which changes no guarantee.
        notes: how the data were prepared and numbers were tuned; they go into the report.

    >>> import torch
    >>> import hushgrad as hg
    >>> model = nn.Linear(20, 2)
    >>> recipe = Recipe(
    ...     model=model,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
    ...     data=(torch.randn(500, 20), torch.randint(2, (500,))),
    ...     loss=lambda b: nn.functional.cross_entropy(model(b[0]), b[1], reduction="none"),
    ...     plan=hg.plan(records=500, batch=50, epochs=1, noise_multiplier=1.0, delta=1e-4),
    ... )
    >>> recipe.plan.steps
    10
    """

    model: nn.Module
    optimizer: Optimizer
    data: Any
    loss: Loss
    plan: Plan
    correct: Callable[[Batch], Tensor] | None = None
    test: Batch | None = None
    schedule: LRScheduler | None = None
    average: AveragedModel | None = None
    execution: Execution = field(default_factory=Execution)
    notes: tuple[str, ...] = ()
