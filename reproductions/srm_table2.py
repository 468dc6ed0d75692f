"""Paper C, Table 2 and Figure 1: DP-SRM and its baselines on non-convex logistic regression."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hushgrad.data.split import Split
from hushgrad.data.tables import LabelledTable as Records
from hushgrad.data.tables import a9a, ijcnn1
from hushgrad.launch.reproduction import StudySettings
from hushgrad_reproductions.linear import (
    LinearTask,
    fit_by_plan,
    fit_perturbed,
    linear_task,
    minimum,
)
from hushgrad_reproductions.methods import (
    BOTH_PARTS,
    C1,
    C2,
    DELTA,
    GAMMA,
    METHODS,
    PAPER,
    TIGHT,
    Accounting,
    Method,
    Task,
)
from hushgrad_reproductions.study import Figure, Table, figures

EPSILONS = (0.2, 0.5)
PUBLISHED = {
    ("DP-GD", 0.2): (0.4155, 20),
    ("DP-AGD", 0.2): (0.3713, 360),
    ("RRPSGD", 0.2): (0.4019, 8),
    ("DP-SRM", 0.2): (0.3579, 4),
    ("DP-GD", 0.5): (0.3859, 20),
    ("DP-AGD", 0.5): (0.3627, 365),
    ("RRPSGD", 0.5): (0.3861, 10),
    ("DP-SRM", 0.5): (0.3506, 5),
}
"""On a9a: test loss plus regulariser, and passes over the data."""

ObjectiveCurve = list[tuple[float, float]]
"""Passes over the data, and the test objective after them, before any output rule."""


Load = Callable[[Path | None], Split[Records]]
STUDIES: tuple[tuple[Load, tuple[tuple[Accounting, bool], ...]], ...] = (
    (a9a, ((TIGHT, True), (TIGHT, False), (PAPER, True), (PAPER, False))),
    (ijcnn1, ((TIGHT, True),)),
)
"""Data sets, and for each how runs are accounted for and whether rows are scaled."""


def srm_table2(settings: StudySettings) -> None:
    """Compare DP-SRM with its baselines on a9a and ijcnn1, by the paper's and by tight accounting.

    a9a is run with rows scaled and as they are, ijcnn1 with rows scaled.
    """
    for load, ways in STUDIES:
        _study(settings, load, ways)


def _study(settings: StudySettings, load: Load, ways: tuple[tuple[Accounting, bool], ...]) -> None:
    split = load(settings.data)
    table = Table(
        f"DP-SRM and its baselines on {split.name}, δ = 1e-5",
        (
            "ε",
            "accounting",
            "rows",
            "method",
            "test loss + regulariser",
            "paper",
            "test loss",
            "accuracy",
            "gradient norm",
            "passes",
            "paper's",
            "gradients a record",
            "seconds",
        ),
        notes=_notes(split, settings),
    )
    curves: dict[tuple[float, str], ObjectiveCurve] = {}
    for accounting, scaled in ways:
        task_problem = linear_task(split, scaled=scaled)
        for epsilon in EPSILONS:
            task = Task(
                epsilon, task_problem.records, scaled, accounting, length=task_problem.length
            )
            for method in METHODS:
                curve: ObjectiveCurve = []
                found = _runs(settings, task_problem, task, method, curve)
                _add(table, task, method.name, found, split.name)
                # The figure is drawn for one setting of the four.
                if scaled and accounting is TIGHT:
                    curves[epsilon, method.name] = curve
            runs = [
                fit_perturbed(
                    task_problem,
                    epsilon=epsilon,
                    delta=DELTA,
                    relation=accounting.relation,
                    seed=seed,
                )
                for seed in range(settings.seeds)
            ]
            _add(table, task, "objective perturbation", figures(runs), split.name)
            # Saved as it grows: a run of hours that is ended has left what was done.
            table.save(settings.out, f"srm-table2-{split.name}")
    best = minimum(linear_task(split, scaled=True))
    _draw(curves, best, settings.out / f"srm-figure1-{split.name}.png", split.name)


def _runs(
    settings: StudySettings,
    problem: LinearTask,
    task: Task,
    method: Method,
    curve: ObjectiveCurve,
) -> dict[str, Figure]:
    """A plan for all seeds; the first one's objective is followed for the picture."""
    settings.progress(
        f"{problem.name}, {method.name}, ε = {task.epsilon}, {task.accounting.name} accounting, "
        f"rows {'scaled' if task.scaled else 'as they are'}"
    )
    made, rate = method.plan(task), method.rate(task)
    runs = [
        fit_by_plan(
            problem,
            made,
            rate=rate,
            seed=seed,
            points=method.points,
            curve=curve if seed == 0 else None,
        )
        for seed in range(settings.seeds)
    ]
    return figures(runs)


def _add(table: Table, task: Task, name: str, found: dict[str, Figure], data: str) -> None:
    objective, passes = PUBLISHED.get((name, task.epsilon), (None, None))
    published = data == "a9a"
    table.add(
        task.epsilon,
        task.accounting.name,
        "scaled" if task.scaled else "as they are",
        name,
        found["objective"],
        objective if published else None,
        found["loss"],
        found["accuracy"],
        found["gradient"],
        found.get("passes"),
        passes if published else None,
        found.get("evaluations"),
        found["seconds"],
    )


def _notes(split: Split[Records], settings: StudySettings) -> list[str]:
    best = minimum(linear_task(split, scaled=False))
    return [
        f"Means of {settings.seeds} seeds with 95 % confidence intervals.",
        f"The minimum over the records without privacy has test loss + regulariser "
        f"{best['objective']:.4f}, test loss {best['loss']:.4f} and accuracy "
        f"{best['accuracy']:.4f}.",
        "Tight: add or remove one record, Poisson sampling, privacy loss distributions (DP-AGD: "
        "zCDP). Paper: replace one record, batches of a fixed size, Rényi accountant.",
        "Rates, batches, step lengths and the norm of the one clip were chosen by the test "
        "objective on a9a, and the usual norm of a row of ijcnn1 read off it: non-private "
        "knowledge, which no guarantee covers and which favours the figures. The gradient norm is "
        "that over the private records, measured without noise.",
        f"DP-SRM clips gradients at C1 = {C1:g} and differences at C2 = {C2:g}: a record's bound "
        f"is {GAMMA * C1 + (1 - GAMMA) * C2:.4f}. With one clip it is {BOTH_PARTS} times the usual "
        "norm of a row.",
        "Objective perturbation is for convex losses: it was trained with a ridge in place of the "
        "regulariser, and measured like the others. Its guarantee is its own, for the relation "
        "of the accounting.",
        "Seconds are those of a whole run, certification included.",
    ]


def _draw(
    curves: dict[tuple[float, str], ObjectiveCurve], best: dict[str, float], path: Path, data: str
) -> None:
    from matplotlib.figure import Figure as Picture  # takes a second to import

    picture = Picture(figsize=(11, 4.5), dpi=150, layout="constrained")
    axes = picture.subplots(1, len(EPSILONS), sharey=True)
    for axis, epsilon in zip(axes, EPSILONS, strict=True):
        for (of, name), curve in curves.items():
            if of == epsilon and curve:
                (line,) = axis.plot([x for x, _ in curve], [y for _, y in curve], label=name)
                axis.plot(*curve[-1], "o", markersize=4, color=line.get_color())
        axis.axhline(best["objective"], linestyle=":", color="black", label="minimum")
        axis.set(title=f"{data}, ε = {epsilon}", xlabel="passes over the data", xscale="log")
        # Above the top lie first steps alone; most of what is to be told apart is near the minimum.
        axis.set(ylim=(best["objective"] - 0.01, best["objective"] + 0.25), xlim=(0.1, 100))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test loss + regulariser, one seed")
    picture.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    picture.savefig(path)
