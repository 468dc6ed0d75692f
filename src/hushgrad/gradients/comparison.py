"""How close two computations of the same per-sample gradients must be, and whether they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hushgrad.gradients.factors.gradients import Gradients


@dataclass(frozen=True)
class Precision:
    """How closely a batched run must follow runs of one record, in the model's own arithmetic.

    Well above what reordered sums do, well below what a wrong layout or a missed use does. A
    parameter's error is relative to its gradient's norm, or to the share `floor` of the whole
    gradient's where that is larger: what is left of large numbers that cancel is only rounding.
    """

    gradient: float
    loss: float
    floor: float = 0.01
    rounding: float = 0.0  # what the arithmetic alone does to a norm, where that can be seen


FINE = {torch.float64: Precision(1e-9, 1e-10), torch.float32: Precision(2e-4, 2e-5)}
COARSE = Precision(0.1, 2.5e-2, floor=0.25, rounding=5e-2)  # anything narrower, at the least

ROUGHLY = 0.1
"""What a ReLU that rounding flips may do to a gradient, far below what a wrong layout does."""


def norm_of(x: Tensor | None) -> Tensor:
    """In float64, on the processor."""
    assert x is not None
    return x.double().square().sum().sqrt().cpu()


def differs(wrong: dict[str, float], whence: str = "from its one-record run") -> str:
    """Say which gradient is off the most."""
    name, off = max(wrong.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    return f"the gradient of {name} differs {whence} by {off:.2g} of its norm"


def apart(gradients: Gradients, others: Gradients, precision: Precision) -> dict[str, float]:
    """The parameters whose gradients are not those of another run over the same records.

    Half of the records must agree closely and all of them roughly, since rounding may flip a ReLU.
    Records that are not finite are left out.
    """
    norms = {name: s.estimate.clamp_min(0).sqrt() for name, s in others.squares.items()}
    total = torch.stack([*norms.values()]).square().sum(0).sqrt()
    kept = (total.isfinite() & (total > 0)).nonzero().flatten()
    if not len(kept):
        return {}
    drawn = torch.from_numpy(np.random.default_rng(1).standard_normal(len(kept))).to(total.device)
    weights = torch.zeros_like(total).index_copy(0, kept, drawn / total[kept])
    one, other = (x.weighted_sum(dict.fromkeys(norms, weights)) for x in (gradients, others))
    wrong = {}
    for name, norm in norms.items():
        scale = torch.maximum(norm, precision.floor * total)[kept]
        off = gradients.squares[name].estimate[kept].clamp_min(0).sqrt() - norm[kept]
        off = (off / scale).abs().nan_to_num(nan=torch.inf)
        gap = norm_of(one[name] - other[name]) / (weights[kept] * scale).norm().cpu()
        worst = max(float(off.max()), float(gap))
        if not (float(off.median()) <= precision.gradient and worst <= ROUGHLY):
            wrong[name] = worst
    return wrong
