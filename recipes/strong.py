"""Beyond the paper's settings: large batches, a rate that falls, and images prepared one by one."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import hushgrad as hg
from hushgrad.data import Split
from hushgrad.launch.recipe import Recipe
from hushgrad.run.augmentation import Augment, Views
from hushgrad.types import Loss
from hushgrad_recipes.classifier import Settings, classifier, cross_entropy
from hushgrad_recipes.networks import tanh_cnn

TUNED = (
    "steps, rate and preparation were tried on this public data set, by training on 50 000 of its "
    "training records and looking at the other 10 000; docs/results.md lists what was tried"
)


def strong(
    split: Split[Any],
    augment: Augment,
    *,
    seed: int,
    epsilon: float,
    batch: int,
    epochs: float,
    lr: float,
    views: int,
) -> Recipe:
    """The papers' network by AUTO-S, with a rate that falls in a line to 0.

    Args:
        split: images and labels, prepared.
        augment: makes a random view of each record of a batch.
        seed: that of the first weights.
        epsilon: ε of the whole run, at δ = 1e-5.
        batch: the expected size of a batch.
        epochs: expected passes over the data.
        lr: the first learning rate.
        views: each record counts as the mean of so many views; with 0 it is taken as it is.
    """
    steps = epochs * len(split.train[1]) / batch

    def linear_decay(optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: max(1 - step / steps, 0.0))

    def views_loss(model: Module) -> Loss:
        return Views(cross_entropy(model), augment, views)

    settings = Settings(
        clip=hg.automatic(),
        batch=batch,
        epochs=epochs,
        lr=lr,
        schedule=linear_decay,
        loss=views_loss if views else cross_entropy,
    )
    return classifier(tanh_cnn, split, settings, epsilon=epsilon, seed=seed, notes=(TUNED,))
