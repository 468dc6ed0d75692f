"""Training: a user's loop in which `run.step` replaces the backward pass and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hushgrad.batches.nested import leaves_of
from hushgrad.gradients import check_optimizer, forget_structure
from hushgrad.ledger import Budget
from hushgrad.parallel.single import refuse_wrapped, require_one_process
from hushgrad.rng import Rng
from hushgrad.run.admission import (
    batches_of,
    loader_of,
    needs_rng,
    require_first_order,
    require_folder_allowed,
    require_kind,
    trainable,
)
from hushgrad.run.execution import Execution
from hushgrad.run.penalties import Constants
from hushgrad.run.plan import Plan
from hushgrad.run.resuming import Keep, none, open_store
from hushgrad.run.run import Run

__all__ = ["Run", "train"]

_PLAIN = Execution()
_NOTHING: Mapping[str, Any] = {}


@needs_rng
def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Any,
    *,
    plan: Plan,
    rng: Rng,
    execution: Execution = _PLAIN,
    budget: Budget | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
    keep: Keep = _NOTHING,
) -> Run:
    """Start a private training run of `model` on `data`, by any first-order optimizer.

    `data` is a tensor, an array, a tuple or mapping of them, a map-style data set, or a
    `sampling.Loader` of one. With a sampling that was `Stated`, it is left None.

    The run is charged to `budget`. In `folder` it keeps checkpoints and its key; with `resume` it
    goes on from there. What `keep` names (a schedule, an average) is saved along.
    """
    require_kind("rng", rng, Rng, "Rng.from_os()")
    require_kind("plan", plan, Plan, "hg.plan(…)")
    if budget is not None:
        require_kind("budget", budget, Budget, 'hg.Ledger("ledger.sqlite").budget("name")')
    require_one_process()
    refuse_wrapped((model,))
    require_first_order(optimizer)
    check_optimizer(optimizer, trainable(model))
    forget_structure(trainable(model))
    require_folder_allowed(plan, folder)
    loader = loader_of(data, plan)
    memory = open_store(
        plan=plan,
        rng=rng,
        budget=budget,
        folder=None if folder is None else Path(folder),
        resume=resume,
        keep=keep,
        fingerprint=loader.fingerprint if loader else none,
    )
    return Run(
        model,
        optimizer,
        batches_of(loader, plan, memory.sampling),
        plan=plan,
        memory=memory,
        execution=execution,
        constants=Constants(
            (model, *(thing for thing in keep.values() if isinstance(thing, nn.Module))),
            private=() if loader is None else leaves_of(loader.columns),
        ),
    )
