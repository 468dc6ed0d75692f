"""Non-convex logistic regression on a9a and ijcnn1, as paper C runs it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad.data.split import Split
from hushgrad.data.tables import Table
from hushgrad.persample.records import count
from hushgrad.plan import Plan
from hushgrad.rng import Rng
from hushgrad.training import train
from hushgrad.types import Batch

PENALTY = 1e-3
"""λ of the regulariser λ Σ θ²/(1 + θ²)."""


@dataclass(frozen=True)
class Problem:
    """Records, and the public constant `scale` that every row is multiplied by.

    The model sees scaled rows; objective and regulariser are those of the rows as they are.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    scale: float

    @property
    def records(self) -> int:
        return len(self.train[1])

    @property
    def features(self) -> int:
        return self.train[0].shape[1]

    def model(self) -> nn.Linear:
        """Weights that start at zero."""
        model = nn.Linear(self.features, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def penalty(self, model: nn.Linear) -> Tensor:
        """The regulariser, of the weights of unscaled rows."""
        square = (self.scale * model.weight).square()
        return PENALTY * (square / (1 + square)).sum()

    @torch.no_grad()
    def measured(self, model: nn.Linear) -> dict[str, float]:
        """Test objective, test loss, accuracy, and the gradient's norm over the private records."""
        (x, y), weights = self.test, (self.scale * model.weight).double().flatten()
        margins = y.double() * (x.double() @ weights) / self.scale
        loss = F.softplus(-margins).mean()
        return {
            "objective": float(loss + self.penalty(model)),
            "loss": float(loss),
            "accuracy": float((margins > 0).double().mean()),
            "gradient": self._gradient_norm(weights),
        }

    def _gradient_norm(self, weights: Tensor) -> float:
        x, y = (part.double() for part in self.train)
        x = x / self.scale
        with torch.enable_grad():
            point = weights.detach().clone().requires_grad_()
            square = point.square()
            total = F.softplus(-y * (x @ point)).mean() + PENALTY * (square / (1 + square)).sum()
            (gradient,) = torch.autograd.grad(total, point)
        return float(gradient.norm())


def problem(split: Split[Table], *, scaled: bool) -> Problem:
    """The data as a problem; scaled rows have norm 1 at most, by a bound that is public.

    Rows of a9a have 14 entries of 1 at most, those of ijcnn1 22 entries from -1 to 1.
    """
    largest = {"a9a": math.sqrt(14), "ijcnn1": math.sqrt(22)}[split.name]
    scale = 1 / largest if scaled else 1.0
    train, test = ((x * scale, 2.0 * y.float() - 1) for x, y in (split.train, split.test))
    return Problem(split.name, train, test, scale)


def fitted(
    problem: Problem,
    plan: Plan,
    *,
    rate: float | Callable[[int], float],
    seed: int,
    points: int = 1,
    every: Callable[[int, nn.Linear], None] = lambda visits, model: None,
) -> dict[str, float]:
    """Train by a plan from a fixed seed; what was measured, with its cost.

    `points` is how many gradients of a record a step takes. `every` is shown the model and the
    number of records visited after each step.
    """
    model = problem.model()
    first = rate if isinstance(rate, float) else rate(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=first)
    visits = steps = 0

    def loss(batch: Batch) -> Tensor:
        x, y = batch
        return F.softplus(-y * model(x).squeeze(1))

    started = time.perf_counter()
    run = train(model, optimizer, problem.train, plan=plan, rng=Rng.fixed(seed))
    for batch in run:
        if not isinstance(rate, float):
            optimizer.param_groups[0]["lr"] = rate(steps)
        run.step(loss, batch, penalty=lambda: problem.penalty(model))
        visits, steps = visits + count(batch), steps + 1
        every(visits, model)
    spent = time.perf_counter() - started
    evaluations = visits * points
    return problem.measured(model) | {
        "passes": visits / problem.records,
        "evaluations": evaluations / problem.records,
        "seconds": spent,
    }
