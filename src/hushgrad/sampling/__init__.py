"""Sampling: which records a step sees, and how much privacy that random choice adds.

A scheme is one value that both draws the batches and states their amplification, so that the
sampling that is accounted for is the sampling that happens. A `Loader` turns the drawn positions
into batches of tensors.
"""

from hushgrad.sampling.cyclic import CyclicPoisson
from hushgrad.sampling.fixed import FullBatch, Shuffled, WithoutReplacement
from hushgrad.sampling.loading import Loader
from hushgrad.sampling.poisson import Poisson, TruncatedPoisson
from hushgrad.sampling.scheme import Draws, Sampling, Scheme, require_relation
from hushgrad.sampling.stated import Stated

__all__ = [
    "CyclicPoisson",
    "Draws",
    "FullBatch",
    "Loader",
    "Poisson",
    "Sampling",
    "Scheme",
    "Shuffled",
    "Stated",
    "TruncatedPoisson",
    "WithoutReplacement",
    "require_relation",
]
