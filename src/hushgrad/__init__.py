"""Train PyTorch models with differential privacy.

The way of the data is also the way through the package: `sampling` (which records a step sees),
`gradients` (one for each record), `clipping` (how much of each counts, and a sum with a bound),
`noise` (a release), and `run`, which puts them in order. `accounting` says what a `plan` costs,
`train` carries it out, and a `Ledger` remembers it.
"""

from hushgrad import accounting, clipping, gradients, sampling
from hushgrad.batchnorm import replace_batchnorm
from hushgrad.clipping import groups as grouping
from hushgrad.clipping.groups import per_layer
from hushgrad.clipping.rules import abadi, automatic, normalize
from hushgrad.diagnosis import doctor
from hushgrad.gradients import constant as constant
from hushgrad.gradients import difference, per_sample
from hushgrad.ledger import Ledger
from hushgrad.moved import name_what_moved
from hushgrad.rng import Rng
from hushgrad.run.execution import Execution
from hushgrad.run.metrics import Metrics
from hushgrad.run.plan import Plan, plan
from hushgrad.run.step import clipped_sum
from hushgrad.run.training import Run, train
from hushgrad.types import Bounded, Refused, Relation

__version__ = "0.1.0"

__all__ = [
    "Bounded",
    "Execution",
    "Ledger",
    "Metrics",
    "Plan",
    "Refused",
    "Relation",
    "Rng",
    "Run",
    "abadi",
    "accounting",
    "automatic",
    "clipped_sum",
    "clipping",
    "difference",
    "doctor",
    "gradients",
    "grouping",
    "normalize",
    "per_layer",
    "per_sample",
    "plan",
    "replace_batchnorm",
    "sampling",
    "train",
]

name_what_moved()
