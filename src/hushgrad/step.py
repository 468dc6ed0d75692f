"""One private step: the stages in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from hushgrad.aggregate import aggregate
from hushgrad.augmentation import rows_per_record
from hushgrad.clipping import Clip, automatic
from hushgrad.execution import Execution
from hushgrad.grouping import Grouping, whole
from hushgrad.metrics import Metrics
from hushgrad.noise import release
from hushgrad.plan import Plan
from hushgrad.rng import Rng
from hushgrad.types import Batch, Bounded, Loss, Params, Released

Observed = Callable[[Batch], Mapping[str, Tensor]]
"""The watched values of a micro-batch's records, by name."""

_AUTOMATIC = automatic()
_PLAIN = Execution()


def private_gradient(
    loss: Loss,
    params: Params,
    batch: Batch,
    *,
    plan: Plan,
    clip: Clip,
    step: int,
    rng: Rng,
    modules: Sequence[nn.Module] = (),
    execution: Execution = _PLAIN,
    observed: Observed = lambda part: {},
) -> Released:
    """The sum of the batch's clipped per-sample gradients, with the plan's metrics and noise.

    Guarantees: the noise is added once, whatever the batch, and scaled by the bound on one record.
    """
    total = clipped_sum(
        loss,
        params,
        batch,
        clip=clip,
        groups=plan.groups,
        modules=modules,
        execution=execution,
        metrics=plan.metrics,
        observed=observed,
    )
    return release(total, plan.noise, rng=rng, step=step)


def clipped_sum(
    loss: Loss,
    params: Params,
    batch: Batch,
    *,
    clip: Clip = _AUTOMATIC,
    groups: Grouping = whole,
    modules: Sequence[nn.Module] = (),
    execution: Execution = _PLAIN,
    metrics: Metrics | None = None,
    observed: Observed = lambda part: {},
) -> Bounded:
    """Sum the batch's clipped per-sample gradients, with their metrics beside them.

    Guarantees: adding or removing one record moves the sum by at most `l2`, whatever the record
    and its mates are. Nothing is noised yet: a `Bounded` must not leave the process.
    """
    partition = groups(tuple(params))
    total: Bounded | None = None
    for part in execution.parts(batch, modules, rows=rows_per_record(loss)):
        gradients = execution.gradients(loss, params, part, modules)
        norms = partition.norms(gradients.sq_norms())
        weights = clip.weights(norms)
        shares = partition.spread(weights)
        bounded = aggregate(gradients, shares, bound=clip.bound(len(partition.names)))
        if metrics is not None:
            rows = metrics.rows(gradients.losses, norms, weights, observed(part))
            bounded = metrics.beside(bounded, rows)
        total = bounded if total is None else total + bounded
    assert total is not None
    return total
