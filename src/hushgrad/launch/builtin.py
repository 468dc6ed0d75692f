"""The recipe behind `hushgrad train DATASET --model MODEL`: a classifier on a public data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad.algorithms.algorithm import AlgorithmParts
from hushgrad.algorithms.named import NAMED
from hushgrad.clipping.named import CLIPS
from hushgrad.data import CLASSIFIED
from hushgrad.launch.recipe import Recipe
from hushgrad.run.metrics import Metrics
from hushgrad.run.plan import plan
from hushgrad.sampling import FullBatch
from hushgrad.types import Batch


def linear_model(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Softmax regression: one linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two linear layers with 64 tanh units between them."""
    # Bounded units keep gradients short: Papernot et al. 2021, Tempered Sigmoid Activations.
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.Tanh(), nn.Linear(64, classes)
    )


def cnn_model(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A convolution with tanh and a linear layer; for images.

    Raises:
        ValueError: a record is not an image of channels, rows and columns.
    """
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


T = TypeVar("T")

MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "linear": linear_model,
    "mlp": mlp,
    "cnn": cnn_model,
}
"""The models by name: each takes the shape of a record and the number of classes."""

# Batch and epochs. Noise is added once a step, so batches are large, and epochs few.
_SIZES = {"digits": (1024, 50.0)}
_USUAL_SIZES = (1024, 10.0)
_MOST_RATE = 1e6  # beyond, weights overflow
_RATES = {"linear": 2.0, "mlp": 1.0, "cnn": 1.0}
_USUAL_RATE = 1.0
_USUAL_EPSILON = 3.0


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

    Args:
        dataset: a name in `hushgrad.data.CLASSIFIED`.
        model: a name in `MODELS`.
        epsilon: ε of the whole run; 3 if neither it nor a noise multiplier is given.
        noise_multiplier: σ, in place of ε.
        delta: δ of the whole run.
        batch: the expected size of a batch.
        epochs: expected passes over the data; an algorithm of full batches takes one step in each.
        lr: the learning rate of SGD.
        momentum: the momentum of SGD.
        clip: a name in `hushgrad.clipping.named.CLIPS`, at clipping norm 1.
        algorithm: a name in `hushgrad.algorithms.named.NAMED`.
        data: the folder of the data sets.
        seed: that of the first weights, which are public.

    Raises:
        ValueError: a name or a number makes no sense; the message lists what would.

    >>> recipe = classifier(model="mlp", epochs=1, noise_multiplier=1.0)
    >>> recipe.plan.records, recipe.plan.clip
    (1437, automatic(gamma=0.01, clip_norm=1.0))
    """
    split = find_by_name(CLASSIFIED, dataset, option="--dataset")(data)
    features, labels = split.train
    records = len(labels)
    network = _network(model, tuple(features.shape[1:]), len(split.classes), seed=seed)
    usual_batch, usual_epochs = _SIZES.get(dataset, _USUAL_SIZES)
    size = min(usual_batch, records) if batch is None else batch
    chosen = find_by_name(NAMED, algorithm, option="--algorithm")(size, records)
    if epsilon is None and noise_multiplier is None:
        epsilon = _USUAL_EPSILON
    rate = _learning_rate(model, lr)
    if chosen.own_step:  # SGD at rate 1 takes the step that the algorithm returns as it is
        rate, momentum = 1.0, 0.0
    metered = AlgorithmParts.of(chosen.algorithm).carries_metrics
    watched = Metrics(watched=("accuracy",)) if metered else None
    return Recipe(
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=rate, momentum=momentum),
        data=split.train,
        loss=_cross_entropy(network),
        plan=plan(
            records=records,
            batch=records if chosen.full else size,
            epochs=usual_epochs if epochs is None else epochs,
            delta=delta,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            clip=find_by_name(CLIPS, clip, option="--clip")(1.0),
            metrics=watched,
            sampling=FullBatch() if chosen.full else None,
            relation=chosen.relation,
            accountant=chosen.accountant,
            algorithm=chosen.algorithm,
        ),
        correct=_correct(network),
        test=split.test,
        notes=(
            f"{split.name} from {split.source}: {split.preparation}. Nothing was computed from the "
            "records to prepare them.",
            "The default settings for digits were tuned by hand on this public data set; those "
            "for other data sets were not tuned.",
        ),
    )


def _network(model: str, shape: tuple[int, ...], classes: int, *, seed: int) -> nn.Module:
    build = find_by_name(MODELS, model, option="--model")
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(seed)
        return build(shape, classes)


def find_by_name(registry: Mapping[str, T], name: str, *, option: str) -> T:
    """What a registry has by a name.

    Raises:
        ValueError: the registry has no such name; the message has the option and all names.

    >>> find_by_name(MODELS, "mlp", option="--model").__name__
    'mlp'
    """
    if name not in registry:
        raise ValueError(
            f"expected {option} to be one of {', '.join(registry)}, got {name!r}; name one"
        )
    return registry[name]


def _learning_rate(model: str, lr: float | None) -> float:
    rate = _RATES.get(model, _USUAL_RATE) if lr is None else lr
    if not 0 < rate <= _MOST_RATE:
        raise ValueError(
            f"expected lr above 0 and at most {_MOST_RATE:g}, got {rate}; 0.1 to 4 is usual"
        )
    return rate


def _cross_entropy(network: nn.Module) -> Callable[[Batch], Tensor]:
    def loss(part: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(network(part[0]), part[1], reduction="none")

    return loss


def _correct(network: nn.Module) -> Callable[[Batch], Tensor]:
    def correct(part: Batch) -> Tensor:
        right: Tensor = network(part[0]).argmax(1) == part[1]
        return right.float()

    return correct
