"""Non-convex logistic regression on a9a and ijcnn1, as paper C runs it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad.batches.records import count
from hushgrad.data.split import Split
from hushgrad.data.tables import LabelledTable
from hushgrad.glm import PrivateLogisticRegression
from hushgrad.glm.closed import LinearLoss
from hushgrad.glm.losses import logistic
from hushgrad.rng import Rng
from hushgrad.run.plan import Plan
from hushgrad.run.training import train
from hushgrad.types import Relation

PENALTY = 1e-3
"""λ of the regulariser λ Σ θ²/(1 + θ²)."""


@dataclass(frozen=True)
class LinearTask:
    """Records, and the public constant `scale` that every row is multiplied by.

    The model sees scaled rows; objective and regulariser are those of the rows as they are.

    Args:
        name: the data set's.
        train: scaled rows and labels ±1, which are private.
        test: scaled rows and labels ±1, which are public.
        scale: what rows were multiplied by.
        largest: a public bound on the norm of a scaled row.
        length: the usual norm of such a row, which settings go by and no guarantee.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    scale: float
    largest: float
    length: float

    @property
    def records(self) -> int:
        """How many private records there are."""
        return len(self.train[1])

    @property
    def features(self) -> int:
        """How many numbers a row has."""
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
    def test_objective(self, model: nn.Linear) -> float:
        """Test loss plus regulariser."""
        x, y = self.test
        return float(F.softplus(-y * model(x).squeeze(1)).mean() + self.penalty(model))

    @torch.no_grad()
    def measurements(self, model: nn.Linear) -> dict[str, float]:
        """Test objective, test loss, accuracy, and the gradient's norm over the private records."""
        x, y = self.test
        # y is ±1: a margin above 0 is a right answer.
        margins = y * model(x).squeeze(1)
        return {
            "objective": self.test_objective(model),
            "loss": float(F.softplus(-margins).mean()),
            "accuracy": float((margins > 0).double().mean()),
            "gradient": self._gradient_norm((self.scale * model.weight).double().flatten()),
        }

    def _gradient_norm(self, weights: Tensor) -> float:
        x, y = (part.double() for part in self.train)
        x = x / self.scale
        # In float64 and on unscaled rows: the paper states the norm of that gradient.
        with torch.enable_grad():
            point = weights.detach().clone().requires_grad_()
            square = point.square()
            total = F.softplus(-y * (x @ point)).mean() + PENALTY * (square / (1 + square)).sum()
            (gradient,) = torch.autograd.grad(total, point)
        return float(gradient.norm())


_LARGEST = {"a9a": math.sqrt(14), "ijcnn1": math.sqrt(22)}
_USUAL = {"a9a": math.sqrt(14), "ijcnn1": 1.2}
"""Norms of rows: a bound, and what is usual. That of ijcnn1 was read off it, and is not public."""


def linear_task(split: Split[LabelledTable], *, scaled: bool) -> LinearTask:
    """The data as a problem; scaled rows have norm 1 at most, by a bound that is public.

    Rows of a9a have 14 entries of 1 at most, those of ijcnn1 22 entries from -1 to 1.

    Args:
        split: a9a or ijcnn1.
        scaled: whether rows are divided by that bound.
    """
    scale = 1 / _LARGEST[split.name] if scaled else 1.0
    train, test = ((x * scale, 2.0 * y.float() - 1) for x, y in (split.train, split.test))
    norms = (scale * norm[split.name] for norm in (_LARGEST, _USUAL))
    return LinearTask(split.name, train, test, scale, *norms)


def fit_by_plan(
    problem: LinearTask,
    plan: Plan,
    *,
    rate: float,
    seed: int,
    points: int = 1,
    curve: list[tuple[float, float]] | None = None,
) -> dict[str, float]:
    """Train by a plan from a fixed seed.

    Args:
        problem: the records and their model.
        plan: what is trained.
        rate: the learning rate of SGD.
        seed: that of batches and noise.
        points: how many gradients of a record a step after the first takes.
        curve: where passes and test objectives are added, at no cost in the time that is reported.

    Returns:
        What `LinearTask.measurements` says of the model, passes over the data, gradients for each
        record, and seconds.
    """
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loss = LinearLoss(model, logistic())
    visits = evaluations = 0
    shown = 0.0
    started = time.perf_counter()
    run = train(model, optimizer, problem.train, plan=plan, rng=Rng.fixed(seed))
    for batch in run:
        run.step(loss, batch, penalty=lambda: problem.penalty(model))
        evaluations += count(batch) * (points if visits else 1)
        visits += count(batch)
        if curve is not None:
            paused = time.perf_counter()
            curve.append((visits / problem.records, problem.test_objective(model)))
            shown += time.perf_counter() - paused
    spent = time.perf_counter() - started - shown
    return problem.measurements(model) | {
        "passes": visits / problem.records,
        "evaluations": evaluations / problem.records,
        "seconds": spent,
    }


def fit_perturbed(
    problem: LinearTask, *, epsilon: float, delta: float, relation: Relation, seed: int
) -> dict[str, float]:
    """Train by objective perturbation, which minimises with a ridge in the regulariser's place.

    Args:
        problem: the records.
        epsilon: ε of the fit.
        delta: δ of the fit.
        relation: what makes two data sets neighbours.
        seed: that of the noise.

    Returns:
        What `LinearTask.measurements` says of the model, and seconds.
    """
    x, y = (part.double().numpy() for part in problem.train)
    started = time.perf_counter()
    found = PrivateLogisticRegression(
        epsilon=epsilon,
        delta=delta,
        algorithm="objective",
        feature_norm=problem.largest,
        fit_intercept=False,
        # Under add/remove the number of records is private, and a public one must be stated.
        records=problem.records if relation is Relation.ADD_REMOVE else None,
        classes=(-1.0, 1.0),
        rng=seed,
    ).fit(x, y)
    spent = time.perf_counter() - started
    model = problem.model()
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(found.coef_))
    return problem.measurements(model) | {"seconds": spent}


def minimum(problem: LinearTask) -> dict[str, float]:
    """The objective over the private records, minimised without privacy."""
    # Full batches, no noise: what the private methods are compared with.
    model = problem.model()
    x, y = problem.train
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=500, history_size=50, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = F.softplus(-y * model(x).squeeze(1)).mean() + problem.penalty(model)
        total.backward()
        return total

    optimizer.step(closure)
    return problem.measurements(model)
