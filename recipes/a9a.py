"""Logistic regression on a9a, at ε = 0.5."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from torch import nn

import hushgrad as hg
from hushgrad.data import LabelledTable, Split, a9a
from hushgrad.launch.recipe import Recipe
from hushgrad_recipes.classifier import Settings, classifier

ATTRIBUTES = 14
"""A census record has 14 attributes, each of which sets at most one feature to 1: a row's norm is
at most √14, whatever the records are."""

TUNED = "batch, epochs and rate chosen by five runs on this public data set"


def automatic(*, data: Path | None = None, seed: int = 0, epsilon: float = 0.5) -> Recipe:
    """AUTO-S at R = 1: it classifies well, but its scores are no log-odds.

    On a linear model AUTO-S descends another convex loss than the logistic one.

    Args:
        data: the folder of the data sets; what HUSHGRAD_DATA names if None.
        seed: that of the first weights.
        epsilon: ε of the whole run, at δ = 1e-5.
    """
    settings = Settings(clip=hg.automatic(), batch=1024, epochs=10, lr=2.0)
    return classifier(
        logistic, scale_rows(a9a(data)), settings, epsilon=epsilon, seed=seed, notes=(TUNED,)
    )


def abadi(*, data: Path | None = None, seed: int = 0, epsilon: float = 0.5) -> Recipe:
    """Abadi's rule at R = 1, which clips few gradients of rows this short: the loss stays low."""
    settings = Settings(clip=hg.abadi(1.0), batch=1024, epochs=10, lr=1.0)
    return classifier(
        logistic, scale_rows(a9a(data)), settings, epsilon=epsilon, seed=seed, notes=(TUNED,)
    )


def logistic() -> nn.Linear:
    """Logistic regression, with a score for each of the two classes."""
    return nn.Linear(123, 2)


def scale_rows(split: Split[LabelledTable]) -> Split[LabelledTable]:
    """The split with its rows ÷ √14, a public constant, so that their norms are at most 1.

    >>> import torch
    >>> part = (torch.ones(1, 14), torch.ones(1))
    >>> found = scale_rows(Split("a9a", "", part, part, "as published"))
    >>> round(float(found.train[0].norm()), 6), found.preparation
    (1.0, 'as published, then rows ÷ √14')
    """
    size = math.sqrt(ATTRIBUTES)
    (train, train_labels), (test, test_labels) = split.train, split.test
    return dataclasses.replace(
        split,
        train=(train / size, train_labels),
        test=(test / size, test_labels),
        preparation=f"{split.preparation}, then rows ÷ √{ATTRIBUTES}",
    )
