"""Correlated beside independent noise on MNIST, at the same guarantee and for few epochs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad.data.idx import mnist
from hushgrad.launch.reproduction import StudySettings
from hushgrad.noise import correlated, momentum
from hushgrad.rng import Rng
from hushgrad.run.plan import Plan, plan
from hushgrad.run.training import train
from hushgrad.sampling import CyclicPoisson
from hushgrad.types import Batch
from hushgrad_recipes.networks import tanh_cnn
from hushgrad_reproductions.study import Figure, Table

EPSILONS = (3.0, 8.0)
DELTA = 1e-5
BATCH, EPOCHS, MOMENTUM = 512, 2.0, 0.9
CYCLES = (1, 8, 16)
RATES = (0.05, 0.1)


def plan_for(records: int, epsilon: float, cycle: int) -> Plan:
    """A plan of so many groups that take turns, with as many bands; one is independent noise."""
    sampling = CyclicPoisson(BATCH / records, cycle)
    return plan(
        records=records,
        batch=BATCH,
        epochs=EPOCHS,
        epsilon=epsilon,
        delta=DELTA,
        sampling=sampling,
        noise=correlated(workload=momentum(MOMENTUM)),
    )


def correlated_mnist(settings: StudySettings) -> None:
    """Train the 4-layer tanh network with both kinds of noise, and tabulate its accuracy."""
    split = mnist(settings.data)
    table = Table(
        f"Correlated and independent noise on MNIST, {EPOCHS:g} epochs, δ = {DELTA:g}",
        ("ε", "groups and bands", "noise multiplier", "rate", "test accuracy in %"),
        notes=[
            f"Means of {settings.seeds} seeds with 95 % confidence intervals.",
            "The 4-layer tanh network, automatic clipping, cyclic Poisson sampling of batches of "
            f"{BATCH}, momentum {MOMENTUM}, add or remove one record.",
            "One group with one band is Poisson sampling with independent noise.",
            "The better of the rates is shown, chosen on MNIST itself: non-private knowledge.",
        ],
    )
    for epsilon in EPSILONS:
        for cycle in CYCLES:
            made = plan_for(len(split.train[1]), epsilon, cycle)
            tried = []
            for rate in RATES:
                settings.progress(f"ε = {epsilon:g}, {cycle} groups, rate {rate}")
                runs = (
                    _accuracy(made, rate, split.train, split.test, seed)
                    for seed in range(settings.seeds)
                )
                tried.append((Figure(tuple(runs)), rate))
            found, rate = max(tried, key=lambda pair: pair[0].mean)
            table.add(epsilon, cycle, made.noise_multiplier, rate, found)
            table.save(settings.out, "correlated-mnist")


def _accuracy(
    plan: Plan, rate: float, data: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], seed: int
) -> float:
    torch.manual_seed(seed)
    model: nn.Module = tanh_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    # One seed is that of weights, batches and noise: runs are repeatable, not private.
    run = train(model, optimizer, data, plan=plan, rng=Rng.fixed(seed))
    for batch in run:
        run.step(loss, batch)
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in test[0].split(1000)])
    return 100 * float((found == test[1]).double().mean())
