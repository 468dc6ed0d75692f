"""Train PyTorch models with differential privacy.

The way of the data is also the way through the package: `persample` (one gradient for each
record), `grouping` and `clipping` (how much of it counts), `aggregate` (a sum with a bound), and
`step`, which puts them in order.
"""

from hushgrad import clipping, grouping, persample
from hushgrad.batchnorm import replace_batchnorm
from hushgrad.clipping import abadi, automatic, normalize
from hushgrad.diagnosis import doctor
from hushgrad.execution import Execution, fitting_micro_batch
from hushgrad.grouping import per_layer, whole
from hushgrad.persample import check_optimizer, difference, per_sample
from hushgrad.step import clipped_sum
from hushgrad.types import Bounded, PerSample, Refused, Relation

__version__ = "0.1.0"

__all__ = [
    "Bounded",
    "Execution",
    "PerSample",
    "Refused",
    "Relation",
    "abadi",
    "automatic",
    "check_optimizer",
    "clipped_sum",
    "clipping",
    "difference",
    "doctor",
    "fitting_micro_batch",
    "grouping",
    "normalize",
    "per_layer",
    "per_sample",
    "persample",
    "replace_batchnorm",
    "whole",
]
