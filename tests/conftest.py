"""Set-up shared by all tests: checked shapes, repeatable examples, a fixed seed."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

import checker

checker.check("hushgrad", "hushgrad_recipes", "hushgrad_reproductions")

# A first call into torch can take seconds on a busy machine, so neither time limit applies.
settings.register_profile(
    "local", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fixed", settings.get_profile("local"), derandomize=True)
settings.load_profile("fixed" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start every test from the same random state of torch.

    Under `@given` it runs once per test, not per example: draw a seed as an argument there.
    """
    torch.manual_seed(0)
