"""The recipe behind `hushgrad train --dataset … --model …`: a classifier on a public data set."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad.algorithms.algorithm import Parts
from hushgrad.algorithms.named import NAMED
from hushgrad.clipping.rules import Clip, abadi, automatic, normalize
from hushgrad.data import DATASETS
from hushgrad.launch.recipe import Recipe
from hushgrad.run.metrics import Metrics
from hushgrad.run.plan import plan
from hushgrad.sampling import FullBatch
from hushgrad.types import Batch

_TEXT = ("e2e", "sst2")
CLASSIFIED = tuple(name for name in DATASETS if name not in _TEXT)
"""The data sets that `classifier` knows."""


def linear_model(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Softmax regression: one linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two linear layers of 64 and tanh, which keeps the gradients of private training in bounds."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.Tanh(), nn.Linear(64, classes)
    )


def cnn_model(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A convolution with tanh and a linear layer; for images."""
    if len(shape) != 3:
        raise ValueError(
            f"expected images for the model cnn, got records of shape {shape}; use linear or mlp"
        )
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 12, 4, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12 * (height // 2) * (width // 2), classes),
    )


MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "linear": linear_model,
    "mlp": mlp,
    "cnn": cnn_model,
}
"""The models by name: each takes the shape of a record and the number of classes."""

CLIPS: dict[str, Callable[[], Clip]] = {
    "automatic": automatic,
    "normalize": normalize,
    "abadi": lambda: abadi(1.0),
}
"""The clipping rules by name, each with the bound 1."""

_SIZES = {"digits": (1024, 50.0)}  # of a batch, and epochs
_USUAL_SIZES = (1024, 10.0)
_MOST_RATE = 1e6  # beyond, weights overflow
_RATES = {"linear": 2.0, "mlp": 1.0, "cnn": 1.0}


def classifier(
    *,
    dataset: str = "digits",
    model: str = "linear",
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float = 1e-5,
    batch: int | None = None,
    epochs: float | None = None,
    lr: float | None = None,
    momentum: float = 0.9,
    clip: str = "automatic",
    algorithm: str = "sgd",
    data: Path | None = None,
    seed: int = 0,
) -> Recipe:
    """Train a small model on a public data set, by SGD on the mean of clipped gradients.

    ε is 3 if neither it nor a noise multiplier is given. `seed` is that of the first weights. An
    `algorithm` of full batches takes one step an epoch.
    """
    split = DATASETS[_one_of("dataset", dataset, CLASSIFIED)](data)
    features, labels = split.train
    shape, size = tuple(features.shape[1:]), len(labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = MODELS[_one_of("model", model, tuple(MODELS))](shape, len(split.classes))
    usual_batch, usual_epochs = _SIZES.get(dataset, _USUAL_SIZES)
    rate = _RATES[model] if lr is None else lr
    if not 0 < rate <= _MOST_RATE:
        raise ValueError(
            f"expected lr above 0 and at most {_MOST_RATE:g}, got {rate}; 0.1 to 4 is usual"
        )
    if epsilon is None and noise_multiplier is None:
        epsilon = 3.0
    size_of_batch = min(usual_batch, size) if batch is None else batch
    chosen = NAMED[_one_of("algorithm", algorithm, tuple(NAMED))](size_of_batch, size)
    if chosen.own_step:
        rate, momentum = 1.0, 0.0
    watched = Metrics(watched=("accuracy",)) if Parts.of(chosen.algorithm).carries_metrics else None

    def loss(part: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(network(part[0]), part[1], reduction="none")

    def correct(part: Batch) -> Tensor:
        right: Tensor = network(part[0]).argmax(1) == part[1]
        return right.float()

    return Recipe(
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=rate, momentum=momentum),
        data=split.train,
        loss=loss,
        plan=plan(
            records=size,
            batch=size if chosen.full else size_of_batch,
            epochs=usual_epochs if epochs is None else epochs,
            delta=delta,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            clip=CLIPS[_one_of("clip", clip, tuple(CLIPS))](),
            metrics=watched,
            sampling=FullBatch() if chosen.full else None,
            relation=chosen.relation,
            accountant=chosen.accountant,
            algorithm=chosen.algorithm,
        ),
        correct=correct,
        test=split.test,
        notes=(
            f"{split.name} from {split.source}: {split.preparation}. Nothing was computed from the "
            "records to prepare them.",
            "The default settings for digits were tuned by hand on this public data set; those "
            "for other data sets were not tuned.",
        ),
    )


def _one_of(option: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(
            f"expected --{option} to be one of {', '.join(known)}, got {value!r}; name one"
        )
    return value
