"""CIFAR-10 with the small network CNN5 of the paper on DP-SRM, at ε = 3."""

from __future__ import annotations

from pathlib import Path

import hushgrad as hg
from hushgrad.data import cifar10
from hushgrad.launch.recipe import Recipe
from hushgrad_recipes.classifier import Settings, classifier
from hushgrad_recipes.networks import cnn5


def automatic(*, data: Path | None = None, seed: int = 0, epsilon: float = 3.0) -> Recipe:
    """AUTO-S at R = 1. The paper's text prints no figures for this network.

    Args:
        data: the folder of the data sets; what HUSHGRAD_DATA names if None.
        seed: that of the first weights.
        epsilon: ε of the whole run, at δ = 1e-5.
    """
    settings = Settings(clip=hg.automatic(), batch=2048, epochs=40, lr=0.2)
    return classifier(
        cnn5, cifar10(data), settings, epsilon=epsilon, seed=seed, notes=("nothing was tuned",)
    )
