"""Recipes for the tests of `hushgrad train`: a good one, and one for each way to go wrong."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

import hushgrad as hg
from hushgrad.accounting.accountants import Rdp
from hushgrad.launch.recipe import Recipe
from hushgrad.run.metrics import Metrics

RECORDS = 200
SENTINEL = 7.31915421


def _recipe(
    data: tuple[Tensor, Tensor],
    *,
    epsilon: float = 2.0,
    delta: float = 1e-4,
    batch: int = 50,
    steps: int = 12,
    pause: float = 0.0,
    first: nn.Module | None = None,
    added: float = 0.0,
) -> Recipe:
    model = nn.Sequential(first or nn.Identity(), nn.Linear(5, 3))

    def loss(part: tuple[Tensor, Tensor]) -> Tensor:
        # Softened by 1e-9, so that `added` is the loss to nine digits.
        found = F.cross_entropy(model(part[0]), part[1], reduction="none")
        return added + 1e-9 * found if added else found

    def correct(part: tuple[Tensor, Tensor]) -> Tensor:
        return (model(part[0]).argmax(1) == part[1]).float()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer.register_step_post_hook(lambda *_: time.sleep(pause))
    public = torch.Generator().manual_seed(1)
    return Recipe(
        model=model,
        optimizer=optimizer,
        data=data,
        loss=loss,
        plan=hg.plan(
            records=RECORDS,
            batch=batch,
            epochs=steps * batch / RECORDS,
            epsilon=epsilon,
            delta=delta,
            accountant=Rdp(orders=(2, 3, 4, 6, 8, 12, 16, 32, 64)),  # it is quicker
            metrics=Metrics(watched=("accuracy",)),
        ),
        correct=correct,
        test=(torch.randn(40, 5, generator=public), torch.randint(3, (40,), generator=public)),
        schedule=StepLR(optimizer, 5, 0.5),
        average=AveragedModel(model),
        notes=("made-up records, prepared by nothing",),
    )


def _records() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (RECORDS,), generator=draws)
    return torch.randn(RECORDS, 5, generator=draws) + labels[:, None], labels


def good(
    *,
    seed: int = 0,
    epsilon: float = 2.0,
    delta: float = 1e-4,
    batch: int = 50,
    steps: int = 12,
    pause: float = 0.0,
) -> Recipe:
    """Three classes that a linear model can tell apart."""
    return _recipe(_records(), epsilon=epsilon, delta=delta, batch=batch, steps=steps, pause=pause)


def with_dropout(*, seed: int = 0, pause: float = 0.0) -> Recipe:
    """The same with randomness of its own in each step."""
    return _recipe(_records(), first=nn.Dropout(0.3), pause=pause)


def sentinel(*, seed: int = 0) -> Recipe:
    """A loss whose value without noise is known."""
    return _recipe(_records(), added=SENTINEL)


def nan_features() -> Recipe:
    """A record with a NaN."""
    features, labels = _records()
    features[17, 2] = torch.nan
    return _recipe((features, labels))


def label_out_of_range() -> Recipe:
    """A label for which the model has no output."""
    features, labels = _records()
    labels[41] = 3
    return _recipe((features, labels))


def negative_label() -> Recipe:
    """A label below 0."""
    features, labels = _records()
    labels[41] = -1
    return _recipe((features, labels))


def refused() -> Recipe:
    """A model in which records meet."""
    return _recipe(_records(), first=nn.BatchNorm1d(5))


def missing_file(*, data: Path | None = None) -> Recipe:
    """A recipe that reads a file which is not there."""
    Path("no-such-file.csv").read_text(encoding="utf-8")
    raise AssertionError


def number() -> int:
    """No recipe at all."""
    return 3


def required(*, width: int) -> Recipe:
    """A recipe that cannot do without an option."""
    assert width > 0
    return _recipe(_records())
