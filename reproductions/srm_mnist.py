"""Paper C, Figure 2: DP-SRM beside DP-SGD on MNIST, by iterations and by time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad.algorithms import Output, Sgd, Srm, average
from hushgrad.clipping.rules import abadi
from hushgrad.data.idx import mnist
from hushgrad.iterates import exchange_values
from hushgrad.launch.reproduction import StudySettings
from hushgrad.rng import Rng
from hushgrad.run.plan import Plan, plan
from hushgrad.run.training import train
from hushgrad.types import Batch
from hushgrad_reproductions.study import Figure, Table, figures

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

ErrorCurve = list[tuple[int, float, float]]
"""Steps taken, CPU seconds, and the test error in % of what a run that ended there returns."""


@dataclass(frozen=True)
class TunedMethod:
    """A method as it was tuned.

    Args:
        name: what the table calls it.
        batch: the expected size of a batch.
        passes: expected passes over the data.
        rate: the learning rate of SGD.
        gamma: γ = C2 of DP-SRM, None for DP-SGD.
    """

    name: str
    batch: int
    passes: float
    rate: float
    gamma: float | None = None

    def plan(self, records: int, epsilon: float) -> Plan:
        """Poisson batches, add or remove one record, privacy loss distributions.

        What is returned is the mean of the iterates of the last quarter, for both methods alike.
        """
        rule = (
            Sgd()
            if self.gamma is None
            else Srm(self.gamma, abadi(self.gamma), first_batch=min(4 * self.batch, records))
        )
        made = plan(
            records=records,
            batch=min(self.batch, records),
            epochs=self.passes,
            epsilon=epsilon,
            delta=DELTA,
            clip=abadi(C1),
            algorithm=rule,
        )
        return replace(made, algorithm=replace(rule, output=_tail(made.steps)))


METHODS = (
    TunedMethod("DP-SGD", batch=1024, passes=20, rate=1.0),
    TunedMethod("DP-SGD, 0.3 × iterations", batch=1024, passes=6, rate=2.0),
    TunedMethod("DP-SRM", batch=1024, passes=6, rate=4.0, gamma=0.7),
)
"""DP-SRM has 0.3 times the iterations, as the paper reports, and DP-SGD is run as short beside it.
Rates are above the paper's grid, which ends at 0.5; batches and C2 = γ are of it."""


def _tail(steps: int) -> Output:
    return average(3 * steps // 4)


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


def srm_mnist(settings: StudySettings) -> None:
    """Compare DP-SRM with DP-SGD on MNIST at both budgets, by iterations and by time."""
    split = mnist(settings.data)
    table = Table(
        "DP-SRM and DP-SGD on MNIST, δ = 1e-5",
        ("ε", "method", "test error in %", "paper", "iterations", "passes", "CPU seconds"),
        notes=[
            f"Means of {settings.seeds} seeds with 95 % confidence intervals.",
            "Add or remove one record, Poisson sampling, privacy loss distributions.",
            "The mean of the iterates of the last quarter is returned, which costs nothing.",
            f"C1 = {C1}; batches, rates, C2 = γ and the average were tried out on MNIST itself: "
            "non-private knowledge, which no guarantee covers.",
        ],
    )
    curves: dict[tuple[float, str], list[ErrorCurve]] = {}
    for epsilon in EPSILONS:
        for method in METHODS:
            made = method.plan(len(split.train[1]), epsilon)
            found = curves[epsilon, method.name] = []
            for seed in range(settings.seeds):
                settings.progress(f"{method.name}, ε = {epsilon}, seed {seed}")
                # One seed is that of weights, batches and noise: runs are repeatable, not private.
                found.append(_train_with_curve(made, method.rate, split.train, split.test, seed))
            _add(table, epsilon, method, made, found)
            table.save(settings.out, "srm-mnist")
    _draw(curves, settings.out / "srm-mnist.png")


def _train_with_curve(
    plan: Plan,
    rate: float,
    data: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    seed: int,
) -> ErrorCurve:
    torch.manual_seed(seed)
    model = network()
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    rng = Rng.fixed(seed)
    run = train(model, optimizer, data, plan=plan, rng=rng)
    # Where a run of this plan might have ended, for the curve: rounded up, the last is its end.
    ends = sorted({-(-len(run) * part // _POINTS) for part in range(1, _POINTS + 1)})
    rules = {end: _tail(end) for end in ends}  # as the plan's own, had it ended there
    kept = {end: rule.begin(end, rng) for end, rule in rules.items()}
    curve: ErrorCurve = []
    seconds, started = 0.0, time.process_time()
    for batch in run:
        run.step(loss, batch)
        seconds += time.process_time() - started  # measuring takes no part in the time
        taken = run.steps_taken
        for end in ends[len(curve) :]:
            kept[end] = rules[end].after(kept[end], params, taken)
        if taken == ends[len(curve)]:
            with exchange_values(params, kept.pop(taken)["point"]):
                curve.append((taken, seconds, _error(model, test)))
        started = time.process_time()
    return curve


@torch.no_grad()
def _error(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    found = torch.cat([model(part).argmax(1) for part in test[0].split(1000)])
    return 100 * float((found != test[1]).double().mean())


def _add(
    table: Table, epsilon: float, method: TunedMethod, plan: Plan, curves: Sequence[ErrorCurve]
) -> None:
    passes = sum(
        count * stage.sampling.expected_batch(plan.records) for stage, count in plan.stages
    )
    found = figures([{"seconds": curve[-1][1], "error": curve[-1][2]} for curve in curves])
    table.add(
        epsilon,
        method.name,
        found["error"],
        PUBLISHED.get((method.name, epsilon)),
        plan.steps,
        passes / plan.records,
        found["seconds"],
    )


def _draw(curves: dict[tuple[float, str], list[ErrorCurve]], path: Path) -> None:
    from matplotlib.figure import Figure as Picture  # takes a second to import

    picture = Picture(figsize=(9, 7), layout="constrained")
    axes = picture.subplots(len(EPSILONS), 2, sharey=True)
    for row, epsilon in zip(axes, EPSILONS, strict=True):
        for number, method in enumerate(METHODS):
            points = list(zip(*curves[epsilon, method.name], strict=True))
            steps = [of[0][0] for of in points]
            seconds = [Figure(tuple(s for _, s, _ in of)).mean for of in points]
            errors = [Figure(tuple(error for _, _, error in of)) for of in points]
            for axis, places in zip(row, (steps, seconds), strict=True):
                _curve(axis, places, errors, method.name, f"C{number}")
                if (published := PUBLISHED.get((method.name, epsilon))) is not None:
                    axis.axhline(published, color=f"C{number}", linestyle=":", linewidth=1)
        row[0].set(ylabel=f"test error in %, ε = {epsilon}", xlabel="iterations", ylim=(2, 10))
        row[1].set(xlabel="CPU seconds")
    axes[0, 1].legend(title="dotted: the paper's figure")
    picture.savefig(path, dpi=150)


def _curve(
    axis: Any, places: Sequence[float], errors: Sequence[Figure], name: str, colour: str
) -> None:
    """A mean over the seeds, in the band of its confidence interval where there is one."""
    means = [error.mean for error in errors]
    axis.plot(places, means, color=colour, label=name)
    low = [error.mean - error.margin for error in errors]
    high = [error.mean + error.margin for error in errors]
    axis.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.grid(alpha=0.3)
