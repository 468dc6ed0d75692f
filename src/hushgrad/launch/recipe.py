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

    `data` are the private records, as `train` takes them; `loss` returns one value for each record
    of a batch; `correct` tells for each record whether the model is right, as 0 or 1. `test` are
    public records, on which accuracy is measured without noise. `schedule` is stepped, and
    `average` updated, once a step; the average's weights are copied into the model at the end.
    `notes` say how the data were prepared and how numbers were tuned; they go into the report.
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
