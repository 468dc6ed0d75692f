"""Algorithms: each a value that says what is sampled, what is summed and what is given out.

`hg.plan(…, algorithm=Srm(…))` plans a run of it; the loop over the run stays the same.
"""

from hushgrad.algorithms.algorithm import Algorithm, Course, Stage
from hushgrad.algorithms.output import (
    Output,
    average,
    last,
    noisy_min,
    smallest,
    stopped,
    uniform,
)
from hushgrad.algorithms.recursive import PerDistance, SpiderBoost, Srm, storm, unclipped
from hushgrad.algorithms.sgd import Sgd

__all__ = [
    "Algorithm",
    "Course",
    "Output",
    "PerDistance",
    "Sgd",
    "SpiderBoost",
    "Srm",
    "Stage",
    "average",
    "last",
    "noisy_min",
    "smallest",
    "stopped",
    "storm",
    "unclipped",
    "uniform",
]
