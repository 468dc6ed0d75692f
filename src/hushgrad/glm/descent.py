"""Private gradient descent on a linear model: minibatches or full batches, any clipping rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from hushgrad.algorithms import Sgd
from hushgrad.clipping.rules import Clip
from hushgrad.glm.gradients import NAME, ClippedLinearSum
from hushgrad.glm.losses import Penalty, ScoreLoss
from hushgrad.glm.rows import RowSource
from hushgrad.ledger import Budget, Spend
from hushgrad.parallel.single import require_one_process
from hushgrad.rng import Rng
from hushgrad.run.permit import Allowance, Permit
from hushgrad.run.plan import Plan
from hushgrad.run.resuming import Fingerprint, none, open_store
from hushgrad.run.step import StepContext
from hushgrad.sampling import Scheme
from hushgrad.types import Refused, Relation

Projection = Callable[[Tensor], Tensor]
"""Returns the nearest point of a public convex set."""


@dataclass(frozen=True)
class Descent:
    """How released gradients move θ, and which iterate is returned.

    Guarantees: all of it is post-processing of released values, and costs no privacy.

    Args:
        rate: η, the learning rate.
        momentum: the heavy-ball momentum.
        average: the mean of the last iterates is returned, this share of them; 0 returns the last
            one.
        penalty: a penalty on θ, which reads no record.
        projection: returns the nearest point of a public convex set.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> Descent(rate=0.5, momentum=0.9).average
        0.5
    """

    rate: float
    momentum: float = 0.0
    average: float = 0.5
    penalty: Penalty | None = None
    projection: Projection | None = None

    def __post_init__(self) -> None:
        if not (self.rate > 0 and 0 <= self.momentum < 1 and 0 <= self.average <= 1):
            raise ValueError(
                "expected rate > 0, 0 <= momentum < 1 and 0 <= average <= 1, got "
                f"{self.rate}, {self.momentum} and {self.average}; leave them out"
            )


@dataclass
class Descended:
    """The result of a descent, and what it was charged beyond its plan."""

    theta: Float64[Tensor, "classes width"]
    steps_taken: int
    charges: tuple[Spend, ...] = ()

    @property
    def steps_drawn(self) -> int:
        """The number of steps that drew their batch; a step uses every batch."""
        return self.steps_taken

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint would contain; a descent writes none."""
        return {}


def descend(
    rows: RowSource,
    labels: Tensor,
    *,
    classes: int,
    loss: ScoreLoss,
    plan: Plan,
    descent: Descent,
    rng: Rng,
    budget: Budget | None = None,
    fingerprint: Fingerprint = none,
) -> Descended:
    """Take the plan's steps from θ = 0, each on a batch drawn as the plan accounts for it.

    Guarantees: noise is added once to each step, also to an empty batch; sums are divided by the
    plan's public expected batch; only released values move θ.

    Args:
        rows: the records' features.
        labels: the records' labels.
        classes: the number of scores, one row of θ each.
        loss: the loss of a record's scores.
        plan: a plan of DP-SGD with a fixed clipping rule and no metrics.
        descent: the learning rate, the momentum and what is returned.
        rng: the key of batches and noise.
        budget: the account that is charged.
        fingerprint: maps a key to a digest of the data.

    Raises:
        Refused: if the plan is of another kind, or the number of records is public and another.
    """
    require_one_process()
    clip, sampling = plan.clip, plan.sampling
    # The plan's event covers plain DP-SGD steps; this loop takes no others.
    plain = plan.metrics is None and plan.algorithm == Sgd() and not plan.correlated
    if not (isinstance(clip, Clip) and isinstance(sampling, Scheme) and plain):
        raise Refused(
            "expected a plan of DP-SGD with a fixed clipping rule, a sampling scheme and no "
            f"metrics, got {plan.algorithm!r}, {clip!r}, {sampling.statement} and metrics "
            f"{plan.metrics}; train other plans by hg.train, with glm.closed.LinearLoss"
        )
    memory = open_store(
        plan=plan,
        rng=rng,
        budget=budget,
        folder=None,
        resume=False,
        keep={},
        fingerprint=fingerprint,
    )
    theta = torch.zeros(classes, rows.width, dtype=torch.float64)
    # Enters the run in its ledger; there is no checkpoint to load.
    memory.restore(Descended(theta, 0), lambda state: None)
    velocity, mean = torch.zeros_like(theta), torch.zeros_like(theta)
    kept = max(1, round(descent.average * plan.steps))
    _require_planned_number(rows, sampling, plan)
    span = sampling.span(plan.records, length=rows.count)
    # The same for all steps, so it is made once.
    allowed = (Allowance(ClippedLinearSum, plan.noise_at(0)),)
    for step in range(plan.steps):
        memory.drawn(step)
        drawn, own = rows, labels
        if not sampling.sees_all:
            # Positions are drawn up to a public span, so that draws do not depend on the data.
            positions = sampling.draw(span, step=step, rng=memory.sampling)
            positions = positions[positions < rows.count]
            # Positions beyond the data are of records that are not there.
            drawn, own = rows.take(positions), labels[torch.from_numpy(positions)]
        context = StepContext(memory.rng, Permit(step, allowed))
        released = context.release(ClippedLinearSum(drawn, own, theta, loss, clip))
        # Before θ moves: a release must be known before it is used.
        memory.released(step, released.digest)
        gradient = released.values[NAME] / plan.divisor
        if descent.penalty is not None:
            gradient = gradient + descent.penalty.gradient(theta)
        velocity = descent.momentum * velocity + gradient
        theta = theta - descent.rate * velocity
        if descent.projection is not None:
            theta = descent.projection(theta)
        if step >= plan.steps - kept:  # a running mean, so that no iterate is stored
            mean += theta / kept
    done = Descended(mean, plan.steps)
    memory.finish(done)
    return Descended(mean, plan.steps, memory.charges)


def _require_planned_number(rows: RowSource, sampling: Scheme, plan: Plan) -> None:
    """Refuse another number of records than the plan's, where it is public."""
    # With add/remove the number is private, and must not be compared.
    if Relation.ADD_REMOVE not in sampling.relations and rows.count != plan.records:
        raise Refused(
            f"expected the {plan.records} records that the plan states with "
            f"{sampling.statement}, got another number of them; plan for the public number"
        )
