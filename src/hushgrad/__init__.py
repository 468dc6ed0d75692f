"""Train PyTorch models with differential privacy.

The way of the data is also the way through the package: `sampling` (which records a step sees),
`persample` (one gradient for each), `grouping` and `clipping` (how much of it counts), `aggregate`
(a sum with a bound), `noise` (a release), and `step`, which puts them in order. `accounting` says
what a `plan` costs, `train` carries it out, and a `Ledger` remembers it.
"""

from hushgrad import accounting, clipping, grouping, persample, sampling
from hushgrad.batchnorm import replace_batchnorm
from hushgrad.clipping import abadi, automatic, normalize
from hushgrad.diagnosis import doctor
from hushgrad.execution import Execution
from hushgrad.grouping import per_layer
from hushgrad.ledger import Ledger
from hushgrad.metrics import Metrics
from hushgrad.persample import constant as constant
from hushgrad.persample import difference, per_sample
from hushgrad.plan import Plan, plan
from hushgrad.rng import Rng
from hushgrad.step import clipped_sum
from hushgrad.training import Run, train
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
    "grouping",
    "normalize",
    "per_layer",
    "per_sample",
    "persample",
    "plan",
    "replace_batchnorm",
    "sampling",
    "train",
]
