"""Correlated noise beside independent noise at equal privacy: `python -m benchmarks.correlated`.

First the error that the noise leaves in running sums, for a run on 60 000 records, by the number of
groups that take turns: it is computed, not measured. Then the accuracy of a linear classifier of
scikit-learn's digits, trained in a loop of its own with the same kinds of noise.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass

import torch
import typer
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor

from hushgrad.accounting import PLD, Target, least_noise
from hushgrad.events import steps_of
from hushgrad.noise import Correlated, Noise, NoiseBuffer, correlated, release
from hushgrad.rng import Rng
from hushgrad.sampling import CyclicPoisson
from hushgrad.types import Bounded, Relation

DELTA = 1e-5
TRAINED = 1500  # of the digits' 1797 records
RATES = (0.5, 1.0, 2.0, 4.0)  # learning rates; the best is shown for each kind of noise

show = Console(highlight=False, soft_wrap=True).print


@dataclass(frozen=True)
class Setting:
    """A run: its records, the expected batch, how many steps, and the ε that it may spend."""

    records: int
    batch: int
    steps: int
    epsilon: float

    def sampling(self, cycle: int) -> CyclicPoisson:
        """So many groups in turn; `Poisson(rate)` is one group."""
        return CyclicPoisson(self.batch / self.records, cycle)

    def noise(self, cycle: int) -> tuple[Correlated, float]:
        """The bands of the least error for so many groups, and the noise multiplier they need."""
        sampling = self.sampling(cycle)
        kind = correlated().fitted(sampling, num_steps=self.steps)
        sigma, _ = least_noise(
            lambda s: kind.run_event(
                s, sampling=sampling, num_records=self.records, num_steps=self.steps
            ),
            Target(self.epsilon, DELTA, Relation.ADD_REMOVE, PLD),
        )
        return kind, sigma


def running_sums(setting: Setting) -> None:
    """Print the root mean square error of running sums, in bounds on one record."""
    show(
        f"{setting.records} records, batches of {setting.batch}, {setting.steps} steps, "
        f"epsilon {setting.epsilon:g}: groups = bands, noise multiplier, error of running sums"
    )
    cycle = 1
    while cycle * setting.batch <= setting.records:
        kind, sigma = setting.noise(cycle)
        error = sigma * kind.mixing.error(setting.steps)
        show(f"  {cycle:3}   {sigma:6.3f}   {error:6.2f}")
        cycle *= 2


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """The digits with a constant beside the pixels, in [0, 1], in a fixed random order."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.from_numpy(data.data)[order] / 16
    return torch.cat([pixels, torch.ones(len(pixels), 1)], 1), torch.from_numpy(data.target)[order]


def clipped_sum(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The sum of the records' gradients of the logistic loss, each clipped to norm 1."""
    slopes = torch.softmax(x @ weights, 1)
    slopes[torch.arange(len(y)), y] -= 1
    norms = slopes.norm(dim=1) * x.norm(dim=1)
    return x.T @ (slopes / norms.clamp_min(1)[:, None])


def accuracy(setting: Setting, noise: Noise, cycle: int, *, rate: float, seed: int) -> float:
    """The share of the test records that a private classifier gets right."""
    x, y = digits()
    sampling, rng = setting.sampling(cycle), Rng.fixed(seed)
    tags, buffer = list[bytes](), NoiseBuffer()
    weights = torch.zeros(x.shape[1], 10, dtype=torch.float64)
    for step in range(setting.steps):
        drawn = torch.from_numpy(sampling.draw(setting.records, step=step, rng=rng))
        total = Bounded({"w": clipped_sum(weights, x[drawn], y[drawn])}, 1.0)
        out = release(total, noise, rng=rng, step=step, past=tags, buffer=buffer)
        tags.append(out.digest)
        weights -= rate / setting.batch * out.values["w"]
    right = (x[TRAINED:] @ weights).argmax(1) == y[TRAINED:]
    return float(right.double().mean())


def classifiers(setting: Setting, seeds: int) -> None:
    """Print the mean accuracy on the digits over so many runs, and its standard error."""
    show(
        f"digits, {setting.records} records, batches of {setting.batch}, {setting.steps} steps, "
        f"epsilon {setting.epsilon:g}: groups, error of running sums, accuracy of {seeds} runs"
    )
    for cycle in (1, 4, 8):
        kind, sigma = setting.noise(cycle)
        tried = [
            [accuracy(setting, kind.at(sigma), cycle, rate=r, seed=k) for k in range(seeds)]
            for r in RATES
        ]
        best = max(tried, key=statistics.fmean)
        error = sigma * kind.mixing.error(setting.steps)
        spread = statistics.stdev(best) / seeds**0.5
        rate = RATES[tried.index(best)]
        show(
            f"  {cycle:3}   {error:6.2f}   {100 * statistics.fmean(best):5.1f} % "
            f"± {100 * spread:.1f}   at a learning rate of {rate:g}"
        )


def main(seeds: int = 20) -> None:
    """Compare the kinds of noise, at δ = 1e-5 under add/remove."""
    for epsilon in (3.0, 8.0):
        steps = steps_of(3, records=60_000, batch=512)
        running_sums(Setting(60_000, 512, steps, epsilon))
    for batch, epochs, epsilon in ((25, 2, 4.0), (100, 6, 2.0)):
        steps = steps_of(epochs, records=TRAINED, batch=batch)
        classifiers(Setting(TRAINED, batch, steps, epsilon), seeds)


if __name__ == "__main__":
    typer.run(main)
