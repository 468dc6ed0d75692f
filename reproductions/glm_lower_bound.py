"""What clipping costs whatever the number of records: clipped DP-GD's Theorems 3.2 and B.4.

Two data sets of one parameter on which gradients that are clipped too short cancel at a wrong
point. Exact minimisers and excess risks come from the Huberised loss, and DP-GD is trained beside
them: its excess risk goes to that of the clipped minimiser as records grow in number, which is 0
only where the clipping norm is large enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hushgrad.clipping.rules import abadi
from hushgrad.glm.descent import Descent, Projection
from hushgrad.glm.huberised import ClippedObjective, Huberised
from hushgrad.glm.losses import ScoreLoss, custom, logistic
from hushgrad.glm.rows import scaled_rows
from hushgrad.launch.reproduction import StudySettings
from hushgrad_reproductions.descending import descend_privately
from hushgrad_reproductions.study import Cell, Figure, Table

EPSILON, DELTA, STEPS = 1.0, 1e-6, 200
COPIES = (10, 100, 1000, 3000)
"""n of the theorems: there are 3n records."""


@dataclass(frozen=True)
class Lure:
    """Three records, as features and labels, of which there are n copies each.

    Args:
        name: what its files are called.
        title: the heading of its table.
        features: one for each of the three records.
        labels: one for each of the three records.
        loss: the loss of a score.
        norms: the clipping norms L that are tried.
        rate: the step size at a clipping norm.
        predicted: the clipped minimiser that the paper derives, at a clipping norm.
        least: the excess risk that the paper's proof gives for large n, or None.
        projection: where θ is kept, None for everywhere.
    """

    name: str
    title: str
    features: tuple[float, float, float]
    labels: tuple[float, float, float]
    loss: ScoreLoss
    norms: tuple[float, ...]
    rate: Callable[[float], float]
    predicted: Callable[[float], float]
    least: Callable[[float], float | None]
    projection: Projection | None = None

    def records(self, copies: int) -> tuple[Tensor, Tensor]:
        """Features and labels of n copies."""
        x = torch.tensor(self.features, dtype=torch.float64).repeat(copies)
        return x[:, None], torch.tensor(self.labels, dtype=torch.float64).repeat(copies)

    def objective(self, clip_norm: float) -> ClippedObjective:
        """Both objectives, which do not depend on n."""
        return ClippedObjective(Huberised(self.loss, abadi(clip_norm)), *self.records(1))


LOGISTIC = Lure(
    name="glm-lower-bound",
    title="Theorem 3.2: logistic loss, {(1/2, +1)}²ⁿ ∪ {(1, −1)}ⁿ",
    features=(0.5, 0.5, 1.0),
    labels=(1.0, 1.0, -1.0),
    loss=logistic(),
    norms=(0.01, 0.05, 0.1, 0.2, 0.4, 1.0),
    rate=lambda norm: 1 / norm,  # the clipped objective is flatter, the shorter its gradients
    predicted=lambda norm: 2 * math.log(1 / norm - 1) if norm < 0.5 else 0.0,
    least=lambda norm: (
        2 / 3 * math.log(norm**-0.5 + (1 - norm) ** -0.5) - math.log(2) if norm < 0.25 else None
    ),
)
SQUARED = Lure(
    name="glm-lower-bound-squared",
    title="Theorem B.4: (θ − x)², {0}ⁿ ∪ {1}ⁿ ∪ {8}ⁿ, projected onto [0, 8]",
    features=(1.0, 1.0, 1.0),
    labels=(0.0, 1.0, 8.0),
    loss=custom(
        lambda z, y: (z - y).square(),
        lambda z, y: 2 * (z - y),
        name="(z − y)²",
        smoothness=2.0,
        convex=True,
    ),
    norms=(1.0, 16.0),
    rate=lambda norm: 0.5,  # 1 ÷ the smoothness
    predicted=lambda norm: 1.0 if norm <= 1 else 3.0,
    least=lambda norm: None,
    projection=lambda theta: theta.clamp(0.0, 8.0),
)


def glm_lower_bound(settings: StudySettings, *, copies: Sequence[int] = COPIES) -> None:
    """Tabulate and draw the excess risk of clipped DP-GD against n, for several clipping norms.

    Args:
        settings: where to, and how many seeds.
        copies: the values of n.
    """
    found = {}
    for lure in (LOGISTIC, SQUARED):
        table = Table(
            lure.title,
            ["L", "θ clipped", "θ paper", "excess there", "paper, at least"]
            + [f"DP-GD, n = {n}" for n in copies],
        )
        for norm in lure.norms:
            settings.progress(f"{lure.name}: L = {norm:g}")
            objective = lure.objective(norm)
            risks = [trained_risk(lure, norm, n, seeds=settings.seeds) for n in copies]
            found[lure.name, norm] = objective.excess_risk(), risks
            # Rounded to the digits that the search finds: an exact 0 must not read 1e-13.
            cells: list[Cell] = [
                norm,
                round(float(objective.minimiser()), 12),
                lure.predicted(norm),
            ]
            table.add(*cells, max(0.0, objective.excess_risk()), lure.least(norm), *risks)
        table.notes += [
            "θ clipped and the excess risk there are of the Huberised objective, exactly, and do "
            "not depend on n. DP-GD's are excess risks of the original objective.",
            f"DP-GD: 3n records, {STEPS} full-batch steps from θ = 0, mean of the last half, "
            f"ε = {EPSILON:g}, δ = {DELTA:g}, add/remove, public n, exact accountant; "
            f"{settings.seeds} seeds, means ± 95 %.",
            "The paper's least excess risk is that of Theorem 3.2's proof, for L < 1/4 and large "
            "n; it is Ω(log 1/L).",
        ]
        table.save(settings.out, lure.name)
    _draw(found, copies, settings)


def trained_risk(lure: Lure, norm: float, copies: int, *, seeds: int) -> Figure:
    """The excess risk of DP-GD on n copies, clipped at a norm.

    Args:
        lure: the three records.
        norm: the clipping norm L.
        copies: n.
        seeds: how many runs.
    """
    objective = lure.objective(norm)
    features, labels = lure.records(copies)
    rows = scaled_rows(features, feature_norm=1.0)
    # Against the minimum that is not clipped: the paper's excess risk is of the original loss.
    best = objective.original(objective.minimiser(clipped=False))
    ends = [
        descend_privately(
            rows,
            labels,
            loss=lure.loss,
            clip=abadi(norm),
            descent=Descent(rate=lure.rate(norm), projection=lure.projection),
            steps=STEPS,
            epsilon=EPSILON,
            delta=DELTA,
            seed=seed,
        )
        for seed in range(seeds)
    ]
    return Figure(tuple(objective.original(theta) - best for theta in ends))


def _draw(
    found: dict[tuple[str, float], tuple[float, list[Figure]]],
    copies: Sequence[int],
    settings: StudySettings,
) -> None:
    from matplotlib.figure import Figure as Picture  # takes a second to import

    picture = Picture(figsize=(10, 4), layout="constrained")
    for axis, lure in zip(picture.subplots(1, 2), (LOGISTIC, SQUARED), strict=True):
        for norm in lure.norms:
            exact, risks = found[lure.name, norm]
            (line,) = axis.plot(copies, [risk.mean for risk in risks], "o-", label=f"L = {norm:g}")
            if exact > 1e-9:
                axis.axhline(exact, linestyle=":", color=line.get_color())
        axis.set(xscale="log", yscale="log", xlabel="n", ylabel="excess risk of DP-GD")
        axis.set_title(lure.title, fontsize="small")
        axis.grid(alpha=0.3)
        axis.legend(title="dotted: the clipped minimiser", fontsize="small")
    picture.savefig(settings.out / "glm-lower-bound.png")
