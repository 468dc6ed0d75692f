"""Paper C, Figure 2: DP-SRM beside DP-SGD on MNIST, by iterations and by time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad.algorithms import Sgd, Srm
from hushgrad.clipping import abadi
from hushgrad.data.idx import mnist
from hushgrad.plan import Plan, plan
from hushgrad.reproductions.study import Figure, Settings, Table, figures
from hushgrad.rng import Rng
from hushgrad.training import train
from hushgrad.types import Batch

EPSILONS = (1.2, 3.0)
DELTA = 1e-5
C1 = 1.5
PUBLISHED = {
    ("DP-SGD", 1.2): 5.33,
    ("DP-SRM", 1.2): 4.49,
    ("DP-SGD", 3.0): 3.81,
    ("DP-SRM", 3.0): 3.62,
}
"""Test errors in %."""
_POINTS = 20  # of a curve

Curve = list[tuple[int, float, float]]
"""Steps taken, seconds, and the test error in % after them."""


@dataclass(frozen=True)
class Method:
    """What was run: a batch, passes over the data, a rate of SGD, and C2 where there is one."""

    name: str
    batch: int
    passes: float
    rate: float
    gamma: float | None = None

    def plan(self, records: int, epsilon: float) -> Plan:
        """Poisson batches, add or remove one record, privacy loss distributions."""
        rule = (
            Sgd()
            if self.gamma is None
            else Srm(self.gamma, abadi(self.gamma), first_batch=min(4 * self.batch, records))
        )
        return plan(
            records=records,
            batch=min(self.batch, records),
            epochs=self.passes,
            epsilon=epsilon,
            delta=DELTA,
            clip=abadi(C1),
            algorithm=rule,
        )


METHODS = (
    Method("DP-SGD", batch=512, passes=20, rate=0.25),
    Method("DP-SRM", batch=512, passes=6, rate=0.25, gamma=0.3),
)
"""From the paper's grids; DP-SRM has 0.3 times the iterations, as the paper reports."""


def network() -> nn.Sequential:
    """The paper's 4-layer network: ReLU, and padding 3 in the first convolution."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def srm_mnist(settings: Settings) -> None:
    """Test errors at both budgets, and a figure of the first seed."""
    split = mnist(settings.data)
    data, test = split.train, split.test
    table = Table(
        "DP-SRM and DP-SGD on MNIST, δ = 1e-5",
        ("ε", "method", "test error in %", "paper", "iterations", "passes", "seconds"),
        notes=[
            f"Means of {settings.seeds} seeds with 95 % confidence intervals.",
            "Add or remove one record, Poisson sampling, privacy loss distributions.",
            f"C1 = {C1}; batches, rates and C2 = γ are from the paper's grids, tried out on MNIST "
            "itself: non-private knowledge, which no guarantee covers.",
        ],
    )
    curves: dict[tuple[float, str], Curve] = {}
    for epsilon in EPSILONS:
        for method in METHODS:
            made = method.plan(len(data[1]), epsilon)
            runs = []
            for seed in range(settings.seeds):
                settings.progress(f"{method.name}, ε = {epsilon}, seed {seed}")
                curve = _trained(made, method.rate, data, test, seed)
                curves.setdefault((epsilon, method.name), curve)
                _, seconds, error = curve[-1]
                runs.append({"error": error, "seconds": seconds})
            _add(table, epsilon, method, made, figures(runs))
            table.save(settings.out, "srm-mnist")
    _draw(curves, settings.out / "srm-mnist.png")


def _trained(
    plan: Plan,
    rate: float,
    data: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    seed: int,
) -> Curve:
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    run = train(model, optimizer, data, plan=plan, rng=Rng.fixed(seed))
    curve: Curve = []
    seconds, started = 0.0, time.perf_counter()
    for batch in run:
        run.step(loss, batch)
        if run.steps_taken % max(1, len(run) // _POINTS) == 0 or run.steps_taken == len(run):
            seconds += time.perf_counter() - started  # measuring takes no part in the time
            curve.append((run.steps_taken, seconds, _error(model, test)))
            started = time.perf_counter()
    return curve


@torch.no_grad()
def _error(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    found = torch.cat([model(part).argmax(1) for part in test[0].split(1000)])
    return 100 * float((found != test[1]).double().mean())


def _add(
    table: Table, epsilon: float, method: Method, plan: Plan, found: dict[str, Figure]
) -> None:
    published = PUBLISHED.get((method.name, epsilon))
    passes = sum(
        count * stage.sampling.expected_batch(plan.records) for stage, count in plan.stages
    )
    table.add(
        epsilon,
        method.name,
        found["error"],
        published,
        plan.steps,
        passes / plan.records,
        found["seconds"],
    )


def _draw(curves: dict[tuple[float, str], Curve], path: Path) -> None:
    from matplotlib.figure import Figure as Picture  # takes a second to import

    picture = Picture(figsize=(9, 7), layout="constrained")
    axes = picture.subplots(len(EPSILONS), 2, sharey=True)
    for row, epsilon in zip(axes, EPSILONS, strict=True):
        for (of, name), curve in curves.items():
            if of == epsilon:
                errors = [error for _, _, error in curve]
                row[0].plot([steps for steps, _, _ in curve], errors, label=name)
                row[1].plot([seconds for _, seconds, _ in curve], errors, label=name)
        row[0].set(ylabel=f"test error in %, ε = {epsilon}", xlabel="iterations", ylim=(0, 20))
        row[1].set(xlabel="seconds")
        for axis in row:
            axis.grid(alpha=0.3)
    axes[0, 1].legend()
    picture.savefig(path)
