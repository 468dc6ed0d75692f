"""A user's whole run: a network trained from nothing, with all that a private run needs besides.

A trainer prepares (imports, data, model), and returns the run itself: for a private library the
search for the noise, the certification of the model, drawing the batches, every step, and the
guarantee at the end. The data are random, of the shape of MNIST's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hushgrad_recipes.networks import tanh_cnn

EPSILON, DELTA = 3.0, 1e-5
LEARNING_RATE = 0.05

Run = Callable[[], None]


class Shape(NamedTuple):
    """How much is trained on, in which batches, and for how long."""

    records: int
    batch: int
    epochs: int


RUNS = {"mnist_run": Shape(60_000, 512, 2), "tiny_run": Shape(1024, 256, 1)}


def title(name: str) -> str:
    """A run in words, for tables."""
    shape = RUNS[name]
    return (
        f"MNIST CNN of the papers, {shape.records} records, batch {shape.batch}, "
        f"epochs {shape.epochs}"
    )


def images(shape: Shape) -> tuple[Tensor, Tensor]:
    """Random pictures and labels."""
    torch.manual_seed(0)
    return torch.rand(shape.records, 1, 28, 28), torch.randint(10, (shape.records,))


def model_and_sgd() -> tuple[nn.Module, torch.optim.SGD]:
    """The network, and its optimizer."""
    torch.manual_seed(0)
    model = tanh_cnn()
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[list[Tensor]]
) -> None:
    """An epoch of an ordinary loop."""
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def plain(name: str) -> Run:
    """Without privacy; batches are cut from the shuffled tensors, the quickest way there is."""
    shape = RUNS[name]
    x, y = images(shape)

    def run() -> None:
        model, optimizer = model_and_sgd()
        for _ in range(shape.epochs):
            order = torch.randperm(shape.records).split(shape.batch)
            fit(model, optimizer, ([x[chosen], y[chosen]] for chosen in order))

    return run


def plain_with_loader(name: str) -> Run:
    """Without privacy; batches come from torch's DataLoader, as in most people's loops."""
    shape = RUNS[name]
    data = TensorDataset(*images(shape))

    def run() -> None:
        model, optimizer = model_and_sgd()
        loader = DataLoader(data, batch_size=shape.batch, shuffle=True)
        for _ in range(shape.epochs):
            fit(model, optimizer, loader)

    return run


def hushgrad(name: str) -> Run:
    """This library with all its defaults."""
    import hushgrad as hg

    shape = RUNS[name]
    data = images(shape)

    def run() -> None:
        model, optimizer = model_and_sgd()
        plan = hg.plan(
            records=shape.records,
            batch=shape.batch,
            epochs=shape.epochs,
            epsilon=EPSILON,
            delta=DELTA,
        )
        run = hg.train(model, optimizer, data, plan=plan, rng=hg.Rng.from_os())
        for batch in run:
            run.step(lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none"), batch)
        str(run.guarantee)

    return run


def opacus(name: str, mode: str) -> Run:
    """Opacus with its defaults in one of its modes."""
    from opacus import PrivacyEngine

    shape = RUNS[name]
    data = TensorDataset(*images(shape))

    def run() -> None:
        engine = PrivacyEngine()
        model, optimizer = model_and_sgd()
        settings = {
            "module": model,
            "optimizer": optimizer,
            "data_loader": DataLoader(data, batch_size=shape.batch),
            "target_epsilon": EPSILON,
            "target_delta": DELTA,
            "epochs": shape.epochs,
            "max_grad_norm": 1.0,
        }
        if mode == "ghost":
            criterion = nn.CrossEntropyLoss()
            model, optimizer, criterion, loader = engine.make_private_with_epsilon(
                **settings, grad_sample_mode="ghost", criterion=criterion
            )
        else:
            criterion = F.cross_entropy
            model, optimizer, loader = engine.make_private_with_epsilon(**settings)
        for _ in range(shape.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
        engine.get_epsilon(DELTA)

    return run


TRAINERS: dict[str, Callable[[str], Run]] = {
    "plain": plain,
    "plain-loader": plain_with_loader,
    "hushgrad": hushgrad,
    "opacus-hooks": partial(opacus, mode="hooks"),
    "opacus-ghost": partial(opacus, mode="ghost"),
}
