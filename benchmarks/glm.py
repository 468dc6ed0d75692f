"""Private linear models: accuracy and time of a whole fit beside other ways to get one.

    python -m benchmarks.glm --data DIR --peer-python PATH     # a9a and digits
    python -m benchmarks.glm choose                            # how the defaults' constants came

Every method sees rows of norm at most 1 (a9a ÷ √14, a public bound; digits' rows to norm 1) and
states (ε, 1e-5) under add/remove. diffprivlib's is ε under replace-one, δ = 0: it has no other.
Every method is fitted in a process of its own, after one fit that does not count.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from sklearn.linear_model import LogisticRegression

import hushgrad as hg
from benchmarks.turns import Worker, channel
from hushgrad import data
from hushgrad.accounting import Target, gaussian, least_noise
from hushgrad.glm import PrivateLogisticRegression, losses
from hushgrad.glm.defaults import INTERCEPT, Public, descent_settings
from hushgrad.glm.rows import LONGEST
from hushgrad.run.plan import Plan
from hushgrad.types import Relation

EPSILONS = (0.1, 0.2, 0.5, 1.0, 3.0)
DELTA = 1e-5
PEER, NOT_PRIVATE = "diffprivlib", "scikit-learn, not private"
PARTS = ("x", "y", "x_test", "y_test")
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Outcome = tuple[float, float]
"""Test accuracy, and seconds of the whole fit."""


def load(name: str, root: Path | None) -> Arrays:
    """Rows of norm at most 1 and labels, to train on and to test on."""
    if name == "a9a":
        split = data.a9a(root)
        (x, y), (x_test, y_test) = split.train, split.test
        parts = (x / math.sqrt(14), y, x_test / math.sqrt(14), y_test)
    else:
        split = data.digits()
        (x, y), (x_test, y_test) = split.train, split.test
        x, x_test = (F.normalize(part.flatten(1)) for part in (x, x_test))
        parts = (x, y, x_test, y_test)
    return tuple(part.numpy() for part in parts)  # type: ignore[return-value]


def estimator(arrays: Arrays, epsilon: float, **options: object) -> Outcome:
    """One of ours, with nothing tuned."""
    x, y, x_test, y_test = arrays
    start = time.perf_counter()
    model = PrivateLogisticRegression(
        epsilon=epsilon, delta=DELTA, records=len(x), classes=np.unique(y_test), **options
    ).fit(x, y)
    return model.score(x_test, y_test), time.perf_counter() - start


def torch_path(arrays: Arrays, epsilon: float) -> Outcome:
    """The same steps, batches, noise and clipping by `hg.train`, calibrated alike."""
    x, y, x_test, y_test = arrays
    classes = len(np.unique(y_test))
    loss = losses.logistic() if classes == 2 else losses.multinomial()
    outputs, norm = 1 if classes == 2 else classes, math.hypot(1, INTERCEPT) * LONGEST
    public = Public(
        len(x), epsilon, DELTA, Relation.ADD_REMOVE, outputs, norm, loss.lipschitz,
        loss.smoothness, 30.0,
    )  # fmt: skip
    start = time.perf_counter()
    chosen = descent_settings(public, full=False)
    sigma, _ = least_noise(
        lambda z: chosen.sampling.run_event(
            gaussian(z), num_records=len(x), num_steps=chosen.steps
        ),
        Target(epsilon, DELTA),
    )
    plan = Plan(
        records=len(x), sampling=chosen.sampling, steps=chosen.steps, noise_multiplier=sigma,
        delta=DELTA, clip=hg.abadi(loss.lipschitz * norm),
    )  # fmt: skip
    constant = torch.full((len(x), 1), INTERCEPT)
    rows = torch.cat([torch.from_numpy(x), constant], 1)
    model = torch.nn.Linear(rows.shape[1], outputs, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen.rate)
    run = hg.train(model, optimizer, (rows, torch.from_numpy(y)), plan=plan, rng=hg.Rng.from_os())
    mean = torch.zeros_like(model.weight)
    for step, batch in enumerate(run):
        if classes == 2:
            run.step(lambda b: F.softplus((1 - 2 * b[1]) * model(b[0])[:, 0]), batch)
        else:
            run.step(lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none"), batch)
        if step >= plan.steps // 2:
            mean += model.weight.detach()
    seconds = time.perf_counter() - start
    scores = x_test @ mean[:, :-1].numpy().T + INTERCEPT * mean[:, -1].numpy()
    guessed = (scores[:, 0] > 0).astype(int) if classes == 2 else scores.argmax(1)
    return float((guessed == y_test).mean()), seconds


def not_private(arrays: Arrays, epsilon: float) -> Outcome:
    """scikit-learn's, without privacy."""
    x, y, x_test, y_test = arrays
    start = time.perf_counter()
    model = LogisticRegression(C=100.0, max_iter=2000).fit(x, y)
    return model.score(x_test, y_test), time.perf_counter() - start


METHODS: dict[str, Callable[[Arrays, float], Outcome]] = {
    "sgd": lambda arrays, epsilon: estimator(arrays, epsilon),
    "gd": lambda arrays, epsilon: estimator(arrays, epsilon, algorithm="gd"),
    "sgd, AUTO-S": lambda arrays, epsilon: estimator(arrays, epsilon, clip_norm=hg.automatic()),
    "objective": lambda arrays, epsilon: estimator(arrays, epsilon, algorithm="objective"),
    "output": lambda arrays, epsilon: estimator(arrays, epsilon, algorithm="output"),
    "hg.train": torch_path,
    NOT_PRIVATE: not_private,
}


def fits(method: str, arrays: Arrays, epsilon: float, seeds: int) -> list[Outcome]:
    """So many fits of a method, after one that does not count: it loads code and wakes threads."""
    return [METHODS[method](arrays, epsilon) for _ in range(1 + seeds)][1:]


def apart(method: str, arrays: Arrays, epsilon: float, seeds: int, python: str) -> list[Outcome]:
    """The same in a process of its own; diffprivlib's with another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arrays.npz"
        np.savez(path, **dict(zip(PARTS, arrays, strict=True)))
        command = [sys.executable, "-m", "benchmarks.glm", "fits", "--method", method]
        command += ["--arrays", str(path), "--epsilon", str(epsilon), "--seeds", str(seeds)]
        if method == PEER:
            script = Path(__file__).with_name("glm_peer.py")
            command = [python, str(script), str(path), str(epsilon), str(seeds)]
        with Worker(command) as worker:
            found = worker.ready["fits"]
    return [(score, seconds) for score, seconds in found]


def compare(root: Path | None, seeds: int, python: str | None) -> None:
    """Print accuracy and seconds of every method at every ε."""
    show = Console(highlight=False, soft_wrap=True).print
    for name in ("a9a", "digits"):
        arrays = load(name, root)
        show(f"\n{name}: test accuracy in % (standard error), seconds of the whole fit")
        for method in (*METHODS, *([PEER] if python else [])):
            cells = []
            for epsilon in EPSILONS[:1] if method == NOT_PRIVATE else EPSILONS:
                found = apart(method, arrays, epsilon, seeds, python or "")
                scores = 100 * np.array([score for score, _ in found])
                error = scores.std(ddof=1) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0
                seconds = np.median([s for _, s in found])
                said = "" if method == NOT_PRIVATE else f"ε={epsilon:g}: "
                cells.append(f"{said}{scores.mean():5.2f} ({error:.2f}) {seconds:5.2f}s")
            show(f"{method:26} " + "  ".join(cells))


def simulated(records: int, width: int, norm: float, seed: int) -> Arrays:
    """Rows of norm 1 with decaying variances, labels by a logistic model of this norm."""
    rng = np.random.default_rng(seed)
    scales = np.arange(1, width + 1) ** -0.5
    x = rng.standard_normal((records + 5000, width)) * scales
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    theta = rng.standard_normal(width)
    theta *= norm / np.linalg.norm(theta)
    y = (rng.random(len(x)) < 1 / (1 + np.exp(-x @ theta))).astype(int)
    return x[:records], y[:records], x[records:], y[records:]


def choose(seeds: int) -> None:
    """Print the accuracy that each r loses to the best r, over simulated problems."""
    from hushgrad.glm import estimators

    show = Console(highlight=False, soft_wrap=True).print
    reaches = (3.0, 10.0, 30.0, 100.0)
    lost = []
    for records, width, norm in (
        (2000, 20, 10),
        (2000, 100, 30),
        (20_000, 100, 10),
        (20_000, 50, 40),
    ):
        for epsilon in (0.3, 1.0, 3.0):
            row = []
            for reach in reaches:

                class Model(estimators.PrivateLogisticRegression):
                    def _linear(self, classes: int, reach: float = reach) -> estimators.Linear:
                        loss = losses.logistic()
                        return estimators.Linear(loss, loss, 1, 1.0, 0.25, reach)

                scores = []
                for seed in range(seeds):
                    x, y, x_test, y_test = simulated(records, width, norm, seed)
                    model = Model(epsilon=epsilon, records=records, algorithm="gd", rng=seed)
                    scores.append(model.fit(x, y).score(x_test, y_test))
                row.append(100 * np.mean(scores))
            lost.append(max(row) - np.array(row))
            cells = "  ".join(f"{score:5.2f}" for score in row)
            show(f"n={records:6} p={width:4} ‖θ‖={norm:3} ε={epsilon:g}:  {cells}")
    for reach, column in zip(reaches, np.array(lost).T, strict=True):
        show(f"r={reach:5g}: lost {column.mean():.2f} on average, {column.max():.2f} at most")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="compare", choices=("compare", "choose", "fits"))
    parser.add_argument("--data", type=Path, help="the folder of the data sets")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peer-python", help="an interpreter that has diffprivlib")
    for name, kind in (("--method", str), ("--arrays", Path), ("--epsilon", float)):
        parser.add_argument(name, type=kind, help="of `fits`, which `compare` runs")
    given = parser.parse_args()
    if given.what == "choose":
        choose(given.seeds)
    elif given.what == "fits":
        send, loaded = channel(), np.load(given.arrays)
        arrays = tuple(loaded[part] for part in PARTS)
        send({"fits": fits(given.method, arrays, given.epsilon, given.seeds)})
    else:
        compare(given.data, given.seeds, given.peer_python)


if __name__ == "__main__":
    main()
