"""Does DP-GD pay for parameters that the data do not use? Clipped DP-GD's Theorem 4.1.

The same records of rank k are laid into more and more dimensions p. Noise outside their span moves
no score, so without a projection the excess risk is the same for every p. A projection onto a
ball, even one that holds the minimiser, shortens all of θ by the length of the noise in all p
directions, and the excess risk grows with p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from hushgrad.clipping.rules import abadi
from hushgrad.glm.bounds import average_risk, best_rate, central_risk
from hushgrad.glm.descent import Descent, Projection
from hushgrad.glm.huberised import ClippedObjective, Huberised
from hushgrad.glm.losses import logistic
from hushgrad.glm.rows import scaled_rows
from hushgrad.launch.reproduction import StudySettings
from hushgrad_reproductions.descending import descend_privately, noise_multiplier
from hushgrad_reproductions.study import Figure, Table

EPSILON, DELTA, STEPS = 2.0, 1e-5, 400
RECORDS, RANK = 256, 5
CLIP_NORM = 1.0
"""The logistic loss on rows of norm 1 has no longer gradients: nothing is clipped."""

STRENGTH = 4.0
"""‖θ‖ of the model that the labels are drawn from."""

WAYS = ("free", "projected", "projected, its own rate")


@dataclass(frozen=True)
class RowsBall:
    """A projection: the nearest θ of norm at most `radius`, all its rows as one vector.

    >>> RowsBall(1.0)(torch.tensor([[3.0, 4.0]])).tolist()
    [[0.6000000238418579, 0.800000011920929]]
    """

    radius: float

    def __call__(self, theta: Tensor) -> Tensor:
        return theta * min(1.0, self.radius / float(torch.linalg.vector_norm(theta)))


@dataclass(frozen=True)
class RiskProblem:
    """Logistic regression on rows of norm 1 in k dimensions, and its minimiser."""

    objective: ClippedObjective
    minimiser: Float64[Tensor, " k"]

    @property
    def distance(self) -> float:
        """‖θ*‖."""
        return float(torch.linalg.vector_norm(self.minimiser))

    def excess(self, theta: Float64[Tensor, " k"]) -> float:
        """The excess risk at the coordinates of θ in the records' span."""
        return self.objective.original(theta) - self.objective.original(self.minimiser)


def risk_problem(records: int = RECORDS, *, seed: int = 0) -> RiskProblem:
    """Simulated records, the same for every p.

    Args:
        records: how many, n.
        seed: that of the simulation.
    """
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(records, RANK))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    truth = draw.normal(size=RANK)
    truth *= STRENGTH / np.linalg.norm(truth)
    chance = 1 / (1 + np.exp(-x @ truth))
    # Drawn by chance: records that a line can separate would have their minimum at infinity.
    y = np.where(draw.uniform(size=records) < chance, 1.0, -1.0)
    objective = ClippedObjective(
        Huberised(logistic(), abadi(CLIP_NORM)), torch.from_numpy(x), torch.from_numpy(y)
    )
    return RiskProblem(objective, objective.minimiser(clipped=False))


def glm_dimension(
    settings: StudySettings, *, largest: int = 10_000, records: int = RECORDS
) -> None:
    """Tabulate and draw the excess risk of DP-GD against the number of parameters p.

    Args:
        settings: where to, and how many seeds.
        largest: the last p, a power of ten.
        records: how many records are simulated.
    """
    given = risk_problem(records)
    sizes = [10**power for power in range(1, round(math.log10(largest)) + 1)]
    noise = noise_multiplier(EPSILON, DELTA, STEPS) * CLIP_NORM / records
    table = Table(
        f"Theorem 4.1: DP-GD on records of rank {RANK} in p dimensions",
        ["p", *(f"excess risk, {way}" for way in WAYS), "bound, rank k", "bound, rank p"],
    )
    bounds, risks = {}, {}
    for p in sizes:
        settings.progress(f"glm-dimension: p = {p}")
        risks[p] = excess_risks(given, p, noise=noise, seeds=settings.seeds)
        bounds[p] = [
            average_risk(
                distance=given.distance, clip_norm=CLIP_NORM, rank=rank, noise=noise, steps=STEPS
            )
            for rank in (RANK, p)
        ]
        table.add(p, *risks[p].values(), *bounds[p])
    closed = central_risk(
        distance=given.distance,
        clip_norm=CLIP_NORM,
        rank=RANK,
        records=records,
        epsilon=EPSILON,
        delta=DELTA,
    )
    start = given.excess(torch.zeros(RANK, dtype=torch.float64))
    table.notes += [
        f"Logistic loss, n = {records}, ‖θ*‖ = {given.distance:.3g}; θ = 0 has excess risk "
        f"{start:.4g}. {STEPS} full-batch steps, mean of all, L = {CLIP_NORM:g}, ε = {EPSILON:g}, "
        f"δ = {DELTA:g}, add/remove, public n; {settings.seeds} seeds, means ± 95 %.",
        "Projected: onto the ball of radius ‖θ*‖ about 0, which holds θ*. Rates are those at which "
        "the bounds are least, for rank k, and for rank p in the last way.",
        "Bounds are of the steps and the noise that were used: rank k is proved without a "
        "projection, rank p with one too, at its own rate.",
        f"The theorem's own form, with n²ε² steps and its noise, gives {closed:.4g} for every p.",
    ]
    table.save(settings.out, "glm-dimension")
    _draw(risks, bounds, start, settings)


def excess_risks(given: RiskProblem, p: int, *, noise: float, seeds: int) -> dict[str, Figure]:
    """The excess risk of DP-GD in p dimensions, in each of `WAYS`.

    Args:
        given: the problem in the k dimensions of its records.
        p: the number of parameters.
        noise: the standard deviation of the noise in a step's mean gradient.
        seeds: how many runs.
    """
    # An orthonormal basis of a random subspace: rows keep their norms and inner products.
    basis = torch.from_numpy(np.linalg.qr(np.random.default_rng(p).normal(size=(p, RANK)))[0])
    rows = scaled_rows(given.objective.features @ basis.T, feature_norm=1.0)
    inside = RowsBall(given.distance)

    def rate(rank: int) -> float:
        return best_rate(
            distance=given.distance, clip_norm=CLIP_NORM, rank=rank, noise=noise, steps=STEPS
        )

    def risk(size: float, projection: Projection | None) -> Figure:
        ends = [
            descend_privately(
                rows,
                given.objective.labels,
                loss=logistic(),
                clip=abadi(CLIP_NORM),
                descent=Descent(rate=size, average=1.0, projection=projection),
                steps=STEPS,
                epsilon=EPSILON,
                delta=DELTA,
                seed=seed,
            )
            for seed in range(seeds)
        ]
        return Figure(tuple(given.excess(basis.T @ theta) for theta in ends))

    runs = [(rate(RANK), None), (rate(RANK), inside), (rate(p), inside)]
    return {way: risk(*run) for way, run in zip(WAYS, runs, strict=True)}


def _draw(
    risks: dict[int, dict[str, Figure]],
    bounds: dict[int, list[float]],
    start: float,
    settings: StudySettings,
) -> None:
    from matplotlib.figure import Figure as Picture  # takes a second to import

    picture = Picture(figsize=(6, 4), layout="constrained")
    axis, sizes = picture.subplots(), list(risks)
    for way in WAYS:
        means = [risks[p][way].mean for p in sizes]
        axis.errorbar(sizes, means, [risks[p][way].margin for p in sizes], marker="o", label=way)
    for place, name in enumerate(("rank k", "rank p")):
        axis.plot(sizes, [bounds[p][place] for p in sizes], "--", label=f"bound, {name}")
    axis.axhline(start, linestyle=":", color="black", label="θ = 0")
    axis.set(xscale="log", yscale="log", xlabel="p", ylabel="excess risk of DP-GD")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    picture.savefig(settings.out / "glm-dimension.png")
