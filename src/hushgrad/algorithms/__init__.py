"""Algorithms: each a value that says what is sampled, what is summed and which iterate is returned.

`hg.plan(…, algorithm=Srm(…))` plans a run of it; the loop over the run stays the same.
"""

from hushgrad.algorithms.adaptive import Agd
from hushgrad.algorithms.algorithm import Algorithm, Conditions, StepPlan
from hushgrad.algorithms.federated import FedAvg
from hushgrad.algorithms.local import LocalGd, hemisphere, report
from hushgrad.algorithms.output import Output, average, last, noisy_min, smallest, stopped, uniform
from hushgrad.algorithms.projections import Affine, Ball, Box, Simplex
from hushgrad.algorithms.recursive import PerDistance, SpiderBoost, Srm, storm, unclipped
from hushgrad.algorithms.sgd import Sgd, rrpsgd

__all__ = [
    "Affine",
    "Agd",
    "Algorithm",
    "Ball",
    "Box",
    "Conditions",
    "FedAvg",
    "LocalGd",
    "Output",
    "PerDistance",
    "Sgd",
    "Simplex",
    "SpiderBoost",
    "Srm",
    "StepPlan",
    "average",
    "hemisphere",
    "last",
    "noisy_min",
    "report",
    "rrpsgd",
    "smallest",
    "stopped",
    "storm",
    "unclipped",
    "uniform",
]
