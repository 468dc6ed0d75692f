"""What a run checks of its arguments, before it starts and at each step; most of it is public."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from hushgrad.algorithms.schedule import Scheduled
from hushgrad.rng import Rng
from hushgrad.run.metrics import Metrics
from hushgrad.run.plan import Plan
from hushgrad.sampling import Draws, Loader, Scheme, Stated
from hushgrad.types import Batch, Params, Refused, Relation

P = ParamSpec("P")
R = TypeVar("R")

_REFUSED_OPTIMIZERS = (torch.optim.LBFGS, torch.optim.SparseAdam)
# One record must hardly be able to trigger the warning, so the margin is wide.
_FAR_OFF = 0.1  # of the planned number


def needs_rng(function: Callable[P, R]) -> Callable[P, R]:
    """Make a call without `rng`, which has no default, say what to pass."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if "rng" not in kwargs:
            raise TypeError(
                f"{function.__name__}() needs rng=, and there is no default, since its secrecy is "
                "what protects the records: pass rng=hg.Rng.from_os(), or hg.Rng.fixed(seed) for a "
                "run that is reproducible and not private"
            )
        return function(*args, **kwargs)

    return checked


def require_kind(name: str, value: object, kind: type, example: str) -> None:
    """Refuse a value of another type."""
    if not isinstance(value, kind):
        raise ValueError(
            f"expected {name} to be a {kind.__name__}, got a {type(value).__name__}; pass {example}"
        )


def require_first_order(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that evaluates the loss by itself, or takes sparse gradients."""
    if isinstance(optimizer, _REFUSED_OPTIMIZERS):
        raise Refused(
            f"expected an optimizer that takes one dense gradient for each step, got "
            f"{type(optimizer).__name__}; use SGD or Adam"
        )


def require_folder_allowed(plan: Plan, folder: object) -> None:
    """Refuse a folder where the output rule lets nothing but the model leave."""
    if plan.parts.output.silent and folder is not None:
        raise Refused(
            f"expected no folder with the output {plan.parts.output}, which allows nothing "
            "else to leave, got one; leave it out, or choose another output, such as uniform()"
        )


def loader_of(data: Any, plan: Plan) -> Loader | None:
    """Return what loads the records; None with a `Stated` sampling, which has its own loader."""
    if plan.sampling.loader is not None:
        if data is not None:
            raise ValueError(
                "expected data=None with a Stated sampling, whose loader has the data, got "
                f"a {type(data).__name__}; pass None"
            )
        return None
    loader = data if isinstance(data, Loader) else Loader(data)
    _compare_records(len(loader), plan)
    return loader


def _compare_records(found: int, plan: Plan) -> None:
    """Compare the number of records with the plan's.

    Where a record may be added or removed, the number is private. The guarantee holds for any
    number, so a warning is given only if it is far off: a precise warning, which one record could
    trigger, would reveal that record. Otherwise the number is public, and a wrong one changes the
    plan's cost.
    """
    if plan.relation is not Relation.ADD_REMOVE:
        if found != plan.records:
            raise Refused(
                f"expected the {plan.records} records of the plan, got {found}; under "
                f"{plan.relation.value} their number is public: plan with records={found}"
            )
    elif abs(found - plan.records) > _FAR_OFF * plan.records:
        warnings.warn(
            f"expected data of about the {plan.records} records that the plan is made for, got a "
            f"number that is off by more than {_FAR_OFF:.0%}, and is private: batches will be "
            "larger or smaller than planned, and the gradient is divided by the planned size; "
            "pass the public number of records to hg.plan",
            stacklevel=4,
        )


def batches_of(loader: Loader | None, plan: Plan, rng: Rng) -> Callable[[range], Iterator[Batch]]:
    """Return the batches of a range of steps, drawn as the plan accounts for them."""
    sampling = plan.sampling
    if isinstance(sampling, Stated):
        return lambda steps: sampling.batches(num_records=plan.records, steps=steps)
    assert isinstance(sampling, Scheme) and loader is not None
    # Drawn step by step only where an algorithm's steps sample differently.
    alike = all(stage.sampling == sampling for stage, _ in plan.stages)
    scheme: Draws = sampling if alike else Scheduled(plan.stage, sampling)
    return lambda steps: loader.batches(scheme, num_records=plan.records, steps=steps, rng=rng)


def trainable(model: nn.Module) -> Params:
    """Return the parameters that a run trains, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def require_same_parameters(model: nn.Module, params: Params) -> None:
    """Refuse a model that has other trainable parameters than when the run started."""
    # Compared by identity: the run takes gradients of the tensors that it started with.
    now = trainable(model)
    if {n: id(p) for n, p in now.items()} != {n: id(p) for n, p in params.items()}:
        changed = sorted(now.keys() ^ params.keys())
        raise Refused(
            "expected the parameters that the run started with, got changes in "
            f"{', '.join(changed) or 'their tensors'}; start another run after freezing or "
            "unfreezing"
        )


def require_watched(watch: Mapping[str, Any], metrics: Metrics | None) -> None:
    """Refuse a step that watches anything but the plan's metrics."""
    expected = metrics.watched if metrics else ()
    if set(watch) != set(expected):
        remedy = (
            "pass them: run.step(…, watch={name: function})"
            if set(watch) < set(expected)
            else "name them in the plan: hg.plan(…, metrics=Metrics(watched=(…,)))"
        )
        raise ValueError(
            f"expected a function to watch for each of {list(expected)}, got {list(watch)}; "
            f"{remedy}"
        )
