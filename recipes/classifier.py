"""The builder that the recipes of classifiers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

import hushgrad as hg
from hushgrad.clipping.rules import Clip
from hushgrad.data import Split
from hushgrad.launch.recipe import Recipe
from hushgrad.types import Batch, Loss

G1 = "settings of Automatic Clipping, appendix G.1, which were tuned on this public data set"


def cross_entropy(model: nn.Module) -> Loss:
    """The cross-entropy of each record: one value for each, so that none is averaged away."""

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels, reduction="none")

    return loss


def correct(model: nn.Module) -> Callable[[Batch], Tensor]:
    """1 for each record whose class has the largest score, else 0."""

    @torch.no_grad()
    def right(batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        hits: Tensor = model(inputs).argmax(1) == labels
        return hits.float()

    return right


@dataclass(frozen=True)
class Settings:
    """How a classifier is trained: SGD with momentum on the released mean of a batch.

    Args:
        clip: the clipping rule.
        batch: the expected size of a batch.
        epochs: expected passes over the data.
        lr: the learning rate, against the mean of the clipped gradients.
        momentum: the momentum of SGD.
        schedule: makes a schedule of rates from the optimizer, which is stepped after each step.
        average: makes an average of the weights from the model, which is returned in its place.
        loss: makes the loss of each record from the model.
    """

    clip: Clip
    batch: int
    epochs: float
    lr: float
    momentum: float = 0.9
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    average: Callable[[nn.Module], AveragedModel] | None = None
    loss: Callable[[nn.Module], Loss] = cross_entropy


def classifier(
    network: Callable[[], nn.Module],
    split: Split[Any],
    settings: Settings,
    *,
    epsilon: float,
    delta: float = 1e-5,
    seed: int = 0,
    notes: tuple[str, ...] = (),
) -> Recipe:
    """Train `network` on a data set, as the settings say.

    Args:
        network: makes the model.
        split: the training records, which are private, and the test records, which are not.
        settings: how it is trained.
        epsilon: ε of the whole run.
        delta: δ of the whole run.
        seed: that of the first weights alone; batches and noise follow from the run's key.
        notes: how the settings were chosen, for the report.
    """
    # The caller's random numbers stay as they were.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network()
    if any(p.dim() == 4 for p in model.parameters()):
        # Convolutions are faster so; torch's types leave this overload out.
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    return Recipe(
        model=model,
        optimizer=optimizer,
        data=split.train,
        loss=settings.loss(model),
        plan=hg.plan(
            records=len(split.train[1]),  # public: the size of a published data set
            batch=settings.batch,
            epochs=settings.epochs,
            epsilon=epsilon,
            delta=delta,
            clip=settings.clip,
        ),
        correct=correct(model),
        test=split.test,
        schedule=settings.schedule(optimizer) if settings.schedule else None,
        average=settings.average(model) if settings.average else None,
        notes=(
            f"{split.name}, {split.preparation}: nothing was computed from the records",
            "ε by the PLD accountant, Poisson sampling, add/remove one record",
            *notes,
        ),
    )
