"""One private descent on a linear problem of simulated data, as the theory has it."""

from __future__ import annotations

import math
from functools import cache

from jaxtyping import Float64
from torch import Tensor

from hushgrad.accounting import Target, least_noise
from hushgrad.clipping.rules import Clip
from hushgrad.glm.descent import Descent, descend
from hushgrad.glm.exact import EXACT
from hushgrad.glm.losses import ScoreLoss
from hushgrad.glm.rows import RowSource
from hushgrad.noise import gaussian
from hushgrad.rng import Rng
from hushgrad.run.plan import Plan
from hushgrad.sampling import FullBatch
from hushgrad.types import Relation


# A search of its own for each setting, which many seeds share.
@cache
def noise_multiplier(epsilon: float, delta: float, steps: int) -> float:
    """The least σ of so many full-batch steps under add/remove; 0 for an infinite ε.

    Args:
        epsilon: ε of the whole run.
        delta: δ of the whole run.
        steps: how many steps are released.

    >>> noise_multiplier(math.inf, 1e-5, 10)
    0.0
    >>> round(noise_multiplier(1.0, 1e-5, 1), 2)
    3.73
    """
    if math.isinf(epsilon):
        return 0.0
    sigma, _ = least_noise(
        lambda z: FullBatch().run_event(gaussian(z).event, num_records=1, num_steps=steps),
        Target(epsilon, delta, Relation.ADD_REMOVE, EXACT),
    )
    return sigma


def descend_privately(
    rows: RowSource,
    labels: Tensor,
    *,
    loss: ScoreLoss,
    clip: Clip,
    descent: Descent,
    steps: int,
    epsilon: float,
    delta: float,
    seed: int,
) -> Float64[Tensor, " width"]:
    """Where DP-GD from θ = 0 ends, at (ε, δ) under add/remove with a public number of records.

    Args:
        rows: the features, with a public bound on their norms.
        labels: one for each row.
        loss: the loss of a score.
        clip: the clipping rule.
        descent: the step size, the projection and the average that is returned.
        steps: how many full batches.
        epsilon: ε of the whole run; infinite for a run without noise.
        delta: δ of the whole run.
        seed: that of the noise.
    """
    plan = Plan(
        records=rows.count,
        sampling=FullBatch(),
        steps=steps,
        noise_multiplier=noise_multiplier(epsilon, delta, steps),
        delta=delta,
        relation=Relation.ADD_REMOVE,
        clip=clip,
        accountant=EXACT,
    )
    done = descend(
        rows, labels, classes=1, loss=loss, plan=plan, descent=descent, rng=Rng.fixed(seed)
    )
    return done.theta[0]
