"""One private step: the stages in order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hushgrad.aggregate import aggregate
from hushgrad.clipping import Clip, automatic
from hushgrad.execution import Execution
from hushgrad.grouping import Grouping, whole
from hushgrad.noise import release
from hushgrad.persample import per_sample
from hushgrad.plan import Plan
from hushgrad.rng import Rng
from hushgrad.types import Batch, Bounded, Loss, Params, Released

_AUTOMATIC = automatic()
_PLAIN = Execution()


def private_gradient(
    loss: Loss,
    params: Params,
    batch: Batch,
    *,
    plan: Plan,
    step: int,
    rng: Rng,
    modules: Sequence[nn.Module] = (),
    execution: Execution = _PLAIN,
) -> Released:
    """The sum of the batch's clipped per-sample gradients, with the plan's noise.

    Guarantees: the noise is added once, whatever the batch, and scaled by the bound on one record.
    """
    total = clipped_sum(
        loss,
        params,
        batch,
        clip=plan.clip,
        groups=plan.groups,
        modules=modules,
        execution=execution,
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
) -> Bounded:
    """Sum the batch's clipped per-sample gradients.

    Guarantees: adding or removing one record moves the sum by at most `l2`, whatever the record
    and its mates are. Nothing is noised yet: a `Bounded` must not leave the process.
    """
    partition = groups(tuple(params))
    total: Bounded | None = None
    for part in execution.parts(batch, modules):
        gradients = per_sample(loss, params, part, form=execution.form, modules=modules)
        norms = partition.norms(gradients.sq_norms())
        weights = partition.spread(clip.weights(norms))
        bounded = aggregate(gradients, weights, bound=clip.bound(len(partition.names)))
        total = bounded if total is None else total + bounded
    assert total is not None
    return total
