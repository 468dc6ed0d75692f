"""Generalised linear models: closed-form per-sample norms, and what clipping does to them.

`estimators` has scikit-learn estimators, which is all that most users need. Below them are `losses`
of a linear score; `rows` and `gradients`, per-sample gradients in closed form, with the same
interface as those of any other model; `descent` and `perturbation`, the algorithms; and
`huberised`, the loss that clipped gradient descent really minimises.
"""

from hushgrad.glm.estimators import (
    PrivateLinearRegression,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    PrivatePoissonRegressor,
)
from hushgrad.glm.huberised import ClippedObjective, Huberised
from hushgrad.glm.losses import Penalty, ScoreLoss

__all__ = [
    "ClippedObjective",
    "Huberised",
    "Penalty",
    "PrivateLinearRegression",
    "PrivateLinearSVC",
    "PrivateLogisticRegression",
    "PrivatePoissonRegressor",
    "ScoreLoss",
]
