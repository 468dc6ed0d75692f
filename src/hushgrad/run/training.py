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
    """Start a private training run of `model` on `data`, with any first-order optimizer.

    Nothing is trained yet. The returned `Run` yields the batches, and `run.step(loss, batch)`
    replaces `loss.backward()` and `optimizer.step()`.

    Guarantees: the trained model is (ε, δ)-differentially private, with the ε and δ of `plan`, if
    the `rng` is secret. Every part of that guarantee, and what it assumes, is in `run.guarantee`.

    Args:
        model: the model; its parameters that require a gradient are trained.
        optimizer: a first-order optimizer of exactly these parameters, such as SGD or Adam.
        data: a tensor, an array, a tuple or mapping of them, a map-style data set, or a
            `sampling.Loader` of one; None with `sampling.Stated`, whose loader has the data.
        plan: the plan to carry out, made by `hg.plan`.
        rng: the key of batches and noise: `hg.Rng.from_os()`, or `hg.Rng.fixed(seed)` for a run
            that is reproducible and not private.
        execution: how gradients are computed; it changes speed and memory, never the guarantee.
        budget: the account of a ledger that the run is charged to.
        folder: where the run keeps its checkpoints and its key; without one it writes nothing.
        resume: whether to go on from the checkpoint in `folder`.
        keep: objects with a `state_dict`, by name, that are saved with each checkpoint, such as a
            learning rate schedule or an average of the model.

    Returns:
        The run, ready for its first batch.

    Raises:
        TypeError: if `rng` is missing.
        ValueError: if an argument is of another kind.
        Refused: if the run would not be private as planned, or `budget` cannot pay for it; the
            message names the remedy.

    Example:
        >>> from hushgrad.run.plan import plan
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> p = plan(records=64, batch=16, epochs=1, delta=1e-3, noise_multiplier=1.0)
        >>> run = train(model, optimizer, torch.randn(64, 3), plan=p, rng=Rng.fixed(0))
        >>> for batch in run:
        ...     run.step(lambda x: model(x)[:, 0].square(), batch)
        >>> run.steps_taken
        4

    Reference: Abadi et al. 2016, Deep Learning with Differential Privacy, Algorithm 1.
    """
    require_kind("rng", rng, Rng, "Rng.from_os()")
    require_kind("plan", plan, Plan, "hg.plan(…)")
    if budget is not None:
        require_kind("budget", budget, Budget, 'hg.Ledger("ledger.sqlite").budget("name")')
    require_one_process()
    refuse_wrapped((model,))
    require_first_order(optimizer)
    check_optimizer(optimizer, trainable(model))
    # An earlier run of these parameters may have had another loss.
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
        # Drawn by the run's own key, so that no other run draws the same batches.
        batches_of(loader, plan, memory.sampling),
        plan=plan,
        memory=memory,
        execution=execution,
        constants=Constants(
            (model, *(thing for thing in keep.values() if isinstance(thing, nn.Module))),
            # A penalty that reads the data set itself would bypass the noise.
            private=() if loader is None else leaves_of(loader.columns),
        ),
    )
