"""Contract suites: tests that your own rule, gradients, sampler or algorithm must pass.

Each suite returns nothing if the contract holds. Otherwise it raises `AssertionError`, which says
what was expected, what came, and how to mend it.
"""

from hushgrad.testing.algorithms import check_algorithm
from hushgrad.testing.clip_rules import check_clip_rule
from hushgrad.testing.gradients import check_per_sample
from hushgrad.testing.samplers import check_sampler

__all__ = ["check_algorithm", "check_clip_rule", "check_per_sample", "check_sampler"]
