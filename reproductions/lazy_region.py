"""Where clipped gradients cancel and nothing moves: Automatic Clipping's Figures 3 and 12.

Two problems of one parameter with two kinds of records that pull in opposite directions. A rule
that keeps no lengths lets them cancel far from the minimum, so that θ stays where it starts;
AUTO-S keeps enough of them to arrive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float64
from torch import Tensor

from hushgrad.clipping.rules import Clip, abadi, automatic, normalize
from hushgrad.glm.descent import Descent
from hushgrad.glm.huberised import ClippedObjective, Huberised
from hushgrad.glm.losses import ScoreLoss, custom, squared
from hushgrad.glm.rows import scaled_rows
from hushgrad.launch.reproduction import StudySettings
from hushgrad_reproductions.descending import descend_privately
from hushgrad_reproductions.study import Figure, Table

EACH = 10_000
"""Records of each kind, as in the paper."""

CLIP_NORM = 0.01
EPSILON, DELTA = 1.0, 1e-5
STEPS, STRIDE = 150, 4.0
"""Of the trained runs: how many, and R × the rate, the longest that a step can be."""

STILL = 1e-3
"""A region is lazy where the mean clipped gradient is below this share of R."""


@dataclass(frozen=True)
class Tug:
    """Records of two kinds that pull θ in opposite directions, and what the paper says of them.

    Args:
        name: what its files are called.
        title: the heading of its table.
        features: ±1 for each record.
        labels: one for each record.
        loss: the loss of a score.
        gamma: γ of AUTO-S.
        shift: 1 or −1: a start θ_0 other than 0 is a shift of the labels by `shift`·θ_0·feature.
        starts: the θ_0 that are tried.
        paper: the lazy regions that the paper's figure shows.
    """

    name: str
    title: str
    features: Float64[Tensor, "n 1"]
    labels: Float64[Tensor, " n"]
    loss: ScoreLoss
    gamma: float
    shift: float
    starts: tuple[float, ...]
    paper: str

    def rules(self) -> dict[str, Clip]:
        """The three rules that the figures compare."""
        return {
            "Abadi": abadi(CLIP_NORM),
            "AUTO-V": normalize(CLIP_NORM),
            "AUTO-S": automatic(self.gamma, CLIP_NORM),
        }

    def objective(self, clip: Clip) -> ClippedObjective:
        """The objective under a rule."""
        return ClippedObjective(Huberised(self.loss, clip), self.features, self.labels)

    def labels_from(self, start: float) -> Float64[Tensor, " n"]:
        """The labels with which a descent from 0 is one from `start`."""
        return self.labels + self.shift * start * self.features[:, 0]


def intercept(each: int = EACH, *, seed: int = 0) -> Tug:
    """A logistic regression of which only the intercept is trained: x ~ N(y, 1).

    The score is y·θ and the label y·x, so that the loss is log(1 + e^(−y(θ + x))).
    """
    y = np.repeat([1.0, -1.0], each)
    x = np.random.default_rng(seed).normal(y, 1.0)
    offset = custom(
        lambda z, m: F.softplus(-(z + m)),
        lambda z, m: -torch.sigmoid(-(z + m)),
        name="logistic with an offset",
        lipschitz=1.0,
        smoothness=0.25,
        convex=True,
    )
    return Tug(
        name="intercept",
        title="logistic intercept (Figure 3)",
        features=torch.from_numpy(y)[:, None],
        labels=torch.from_numpy(y * x),
        loss=offset,
        gamma=0.01,
        shift=1.0,
        starts=(-3.0, 1.0, 3.0),
        paper="Abadi, AUTO-V: [−2, 2]",
    )


def mixture(each: int = EACH, *, seed: int = 0) -> Tug:
    """The mean of a mixture of N(−4, 1) and N(4, 1); the paper prints 4 for both means."""
    means = np.repeat([4.0, -4.0], each)
    return Tug(
        name="mixture",
        title="mean of a mixture (Figure 12)",
        features=torch.ones(2 * each, 1, dtype=torch.float64),
        labels=torch.from_numpy(np.random.default_rng(seed).normal(means, 1.0)),
        loss=squared(),
        gamma=0.1,
        shift=-1.0,
        starts=(-3.0, 1.0, 3.0),
        paper="Abadi, AUTO-V: (−1, 1)",
    )


def pull(objective: ClippedObjective, theta: float) -> float:
    """The mean clipped gradient at θ, as a share of R: 0 where nothing moves.

    Args:
        objective: the records under a clipping rule.
        theta: θ.
    """
    point = torch.tensor([theta], dtype=torch.float64)
    return float(objective.gradient(point, clipped=True)) / CLIP_NORM


def lazy_region(
    objective: ClippedObjective, *, reach: float = 10.0, still: float = STILL
) -> tuple[float, float]:
    """The ends of the interval within ±`reach` in which |mean clipped gradient| <= `still`·R.

    The gradient increases with θ, so that each end is found by halving.

    Args:
        objective: the records under a clipping rule.
        reach: how far from 0 is looked.
        still: the share of R below which θ counts as standing still.
    """

    def edge(level: float) -> float:
        low, high = -reach, reach
        for _ in range(40):  # 20 / 2⁴⁰: as near as float64 is worth here
            middle = (low + high) / 2
            low, high = (middle, high) if pull(objective, middle) <= level else (low, middle)
        return (low + high) / 2

    return edge(-still), edge(still)


def end(tug: Tug, clip: Clip, start: float, *, epsilon: float, seed: int = 0) -> float:
    """Where a run from `start` ends.

    Args:
        tug: the records.
        clip: the clipping rule.
        start: θ_0.
        epsilon: ε of the run; infinite for one without noise.
        seed: that of the noise.
    """
    rows = scaled_rows(tug.features, feature_norm=1.0)
    moved = descend_privately(
        rows,
        tug.labels_from(start),
        loss=tug.loss,
        clip=clip,
        descent=Descent(rate=STRIDE / CLIP_NORM, average=0.0),
        steps=STEPS,
        epsilon=epsilon,
        delta=DELTA,
        seed=seed,
    )
    return start + float(moved)


def lazy_regions(settings: StudySettings, *, each: int = EACH) -> None:
    """Tabulate lazy regions and where runs end, and draw the mean clipped gradients.

    Args:
        settings: where to, and how many seeds.
        each: the number of records of each kind.
    """
    tugs = [intercept(each), mixture(each)]
    for tug in tugs:
        table = Table(
            f"Lazy regions: {tug.title}",
            ["rule", "lazy from", "to", "paper, by eye"]
            + [f"θ from {start:g}{how}" for start in tug.starts for how in ("", ", with DP")],
        )
        for rule, clip in tug.rules().items():
            settings.progress(f"lazy-region: {tug.name}, {rule}")
            cells: list[float | Figure] = []
            for place, start in enumerate(tug.starts):
                # Sums that are alike get like noise from one key, so each start has its own keys.
                keys = [1000 * place + seed for seed in range(settings.seeds)]
                ends = [end(tug, clip, start, epsilon=EPSILON, seed=key) for key in keys]
                cells += [end(tug, clip, start, epsilon=math.inf), Figure(tuple(ends))]
            low, high = lazy_region(tug.objective(clip))
            table.add(rule, low, high, tug.paper if rule != "AUTO-S" else "none", *cells)
        optimum = float(tug.objective(abadi(CLIP_NORM)).minimiser(clipped=False))
        table.notes += [
            f"{each} records of each kind, R = {CLIP_NORM:g}, γ = {tug.gamma:g}; the minimum is at "
            f"θ = {optimum:.3g}. Lazy: |mean clipped gradient| <= {STILL:g} R, looked for within "
            "±10.",
            f"Runs: {STEPS} full-batch steps of at most {STRIDE:g} (rate × R), the last point; DP "
            f"is ε = {EPSILON:g}, δ = {DELTA:g}, add/remove, public n, the mean of "
            f"{settings.seeds} seeds ± 95 %.",
        ]
        table.save(settings.out, f"lazy-region-{tug.name}")
    _draw(tugs, settings)


def _draw(tugs: Sequence[Tug], settings: StudySettings) -> None:
    from matplotlib.figure import Figure as Picture  # takes a second to import

    picture = Picture(figsize=(10, 4), layout="constrained")
    grid = np.linspace(-5, 5, 101)
    for axis, tug in zip(picture.subplots(1, len(tugs)), tugs, strict=True):
        for rule, clip in tug.rules().items():
            objective = tug.objective(clip)
            style = "--" if rule == "AUTO-V" else "-"  # the mixture's lies upon Abadi's
            axis.plot(grid, [pull(objective, theta) for theta in grid], style, label=rule)
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set(title=tug.title, xlabel="θ", ylabel="mean clipped gradient ÷ R")
        axis.grid(alpha=0.3)
        axis.legend()
    picture.savefig(settings.out / "lazy-region.png")
