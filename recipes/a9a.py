"""Logistic regression on a9a, at ε = 0.5."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from torch import nn

import hushgrad as hg
from hushgrad.data import Split, Table, a9a
from hushgrad.recipe import Recipe
from recipes.classifier import Settings, classifier

ATTRIBUTES = 14
"""A census record has 14 attributes, each of which sets at most one feature to 1: a row's norm is
at most √14, whatever the records are."""


def automatic(*, data: Path | None = None, seed: int = 0, epsilon: float = 0.5) -> Recipe:
    """AUTO-S at R = 1, on rows of norm at most 1."""
    settings = Settings(clip=hg.automatic(), batch=1024, epochs=10, lr=0.5)
    return classifier(
        logistic,
        scaled(a9a(data)),
        settings,
        epsilon=epsilon,
        seed=seed,
        notes=("batch, epochs and rate chosen by a few runs on this public data set",),
    )


def logistic() -> nn.Linear:
    """Logistic regression, with a score for each of the two classes."""
    return nn.Linear(123, 2)


def scaled(split: Split[Table]) -> Split[Table]:
    """Rows ÷ √14."""
    size = math.sqrt(ATTRIBUTES)
    (train, train_labels), (test, test_labels) = split.train, split.test
    return dataclasses.replace(
        split,
        train=(train / size, train_labels),
        test=(test / size, test_labels),
        preparation=f"{split.preparation}, then rows ÷ √{ATTRIBUTES}",
    )
