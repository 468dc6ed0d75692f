"""Small models to try the library on.

`cnn` and `transformer` return a model, its loss and a batch, for the doctor. `train_all` trains two
models on scikit-learn's digits, with and without privacy, for `hushgrad demo`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad.batches.records import take
from hushgrad.launch.builtin import classifier
from hushgrad.launch.loop import accuracy, carry_out, start
from hushgrad.launch.recipe import Recipe
from hushgrad.rng import Rng
from hushgrad.run.guarantee import Guarantee
from hushgrad.run.training import Run
from hushgrad.types import Batch, Loss


def cnn() -> tuple[nn.Module, Loss, Batch]:
    """A small image classifier: a convolution, group norm, and two linear layers.

    Returns:
        The model, its loss, and a batch, as `hushgrad doctor hushgrad.launch.demo:cnn` takes them.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.GroupNorm(4, 8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 32),
        nn.ReLU(inplace=True),
        nn.Dropout(0.1),
        nn.Linear(32, 10),
    )
    # Drawn records will do: the doctor looks at the model, and prints nothing of the records.
    batch = (torch.randn(32, 1, 8, 8), torch.randint(10, (32,)))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels, reduction="none")

    return model, loss, batch


class _LanguageModel(nn.Module):
    """A transformer layer between an embedding and the same embedding, transposed."""

    def __init__(self, words: int = 64, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens) + self.positions[: tokens.shape[1]]
        q, k, v = self.query_key_value(self.norm(h)).chunk(3, dim=-1)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits: Tensor = (h + self.feed(h)) @ self.words.weight.T
        return logits


def transformer() -> tuple[nn.Module, Loss, Batch]:
    """A small language model with tied embeddings and learned positions.

    Returns:
        The model, its loss, and a batch.
    """
    torch.manual_seed(0)
    model = _LanguageModel()

    def loss(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1]).transpose(1, 2)
        return F.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)

    return model, loss, torch.randint(64, (16, 16))


NAMES = {"linear": "softmax regression", "cnn": "small CNN"}
"""The models that the demo trains."""

EPSILONS = (3.0, 1.0)
"""The ε of its private runs."""

DELTA = 1e-5
TUNED = "Batch, epochs and learning rates were tuned by hand on this public data set."

# Batch, epochs and learning rate: a smaller ε pays for fewer and larger batches.
_SETTINGS = {
    ("linear", 3.0): (1024, 50.0, 2.0),
    ("linear", 1.0): (1437, 30.0, 1.0),
    ("cnn", 3.0): (1024, 50.0, 1.0),
    ("cnn", 1.0): (1437, 30.0, 1.0),
}
_PLAIN = {"linear": (64, 60.0, 0.5), "cnn": (64, 30.0, 0.1)}

Step = Callable[[str, int, int], None]
"""Told after each step: what is trained, the steps taken, and those there are."""

Told = Callable[[int, int], None]


@dataclass(frozen=True)
class Trained:
    """A model of the demo.

    Args:
        model: its name in `NAMES`.
        accuracy: on the test records, which are public.
        guarantee: that of its run, None if it was trained without privacy.
    """

    model: str
    accuracy: float
    guarantee: Guarantee | None


def train_all(*, seed: int | None = None, share: float = 1.0, each_step: Step) -> list[Trained]:
    """Train each model without privacy and at each ε.

    Args:
        seed: makes the runs reproducible, and not private; None draws keys from the system.
        share: of the steps of every run, for a try.
        each_step: told after each step what is trained, the steps taken, and those there are.

    Returns:
        For each model: the one without privacy, and those at each of `EPSILONS`.
    """
    found = []
    for model, name in NAMES.items():
        found.append(_train_plainly(model, seed or 0, share, partial(each_step, name)))
        for epsilon in EPSILONS:
            told = partial(each_step, f"{name}, ε = {epsilon:g}")
            found.append(_train_privately(model, epsilon, seed, share, told))
    return found


def _train_privately(
    model: str, epsilon: float, seed: int | None, share: float, told: Told
) -> Trained:
    recipe = _recipe(model, epsilon, seed or 0, share)

    def show(run: Run) -> None:
        told(run.steps_taken, len(run))

    run = start(recipe, rng=Rng.from_os() if seed is None else Rng.fixed(seed))
    outcome = carry_out(run, recipe, each_step=show)
    assert outcome.accuracy is not None
    return Trained(model, outcome.accuracy, run.guarantee)


def _recipe(model: str, epsilon: float, seed: int, share: float) -> Recipe:
    batch, epochs, lr = _SETTINGS[model, epsilon]
    return classifier(
        dataset="digits",
        model=model,
        epsilon=epsilon,
        delta=DELTA,
        batch=batch,
        epochs=epochs * share,
        lr=lr,
        seed=seed,
    )


def _train_plainly(model: str, seed: int, share: float, told: Told) -> Trained:
    """Ordinary training, as a measure: no clipping, no noise, no guarantee."""
    batch, epochs, lr = _PLAIN[model]
    recipe = classifier(dataset="digits", model=model, noise_multiplier=0.0, lr=lr, seed=seed)
    steps = max(1, round(epochs * share * recipe.plan.records / batch))
    draws = torch.Generator().manual_seed(seed)
    for step in range(steps):
        # Drawn with replacement: nothing is accounted for here.
        drawn = torch.randint(recipe.plan.records, (batch,), generator=draws)
        recipe.optimizer.zero_grad()
        recipe.loss(take(recipe.data, drawn.tolist())).mean().backward()
        recipe.optimizer.step()
        told(step + 1, steps)
    # The digits have test records, so there is an accuracy.
    found = accuracy(recipe)
    assert found is not None
    return Trained(model, found, None)
