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


@cache
def noise_multiplier(epsilon: float, delta: float, steps: int) -> float:
    """The least σ of so many full-batch steps under add/remove; 0 for an infinite ε."""
    if math.isinf(epsilon):
        return 0.0
    sigma, _ = least_noise(
        lambda z: FullBatch().run_event(gaussian(z).event, num_records=1, num_steps=steps),
        Target(epsilon, delta, Relation.ADD_REMOVE, EXACT),
    )
    return sigma


def descended(
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
    """Where DP-GD from θ = 0 ends, at (ε, δ) under add/remove with a public number of records."""
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
