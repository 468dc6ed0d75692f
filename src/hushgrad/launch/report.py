"""The folder of a run, which explains itself: plan, metrics, curves, versions, result, report.

Nothing in it is private but the key of a run that is not over: every number was released, is
public, or was measured on public records. Each file is written whole or not at all, and all of them
can be written again from the run's last checkpoint.
"""

from __future__ import annotations

import csv
import io
import json
import math
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from hushgrad.batches.records import count
from hushgrad.files import open_atomically, write_text
from hushgrad.launch.curves import save_curves
from hushgrad.launch.loop import Outcome
from hushgrad.launch.preflight import UNCOUNTED
from hushgrad.launch.recipe import Recipe
from hushgrad.launch.words import NOT_COVERED, in_words, model_card
from hushgrad.run.training import Run

REQUEST, VERSIONS = "request.json", "versions.txt"
"""The first and the last file that is written when a run starts."""

_PACKAGES = ("hushgrad", "torch", "numpy", "scipy", "dp-accounting", "cryptography", "safetensors")


@dataclass(frozen=True)
class Request:
    """What was asked for, kept in the run's folder so that a resume is of the same run.

    Args:
        recipe: the recipe, as the command line named it.
        options: its options, as text.
        seed: the run's seed, None for a private run.
        weights_seed: what the recipe was called with: public, like the first weights themselves.
        command: the command that repeats the run.
    """

    recipe: str
    options: dict[str, str]
    seed: int | None
    weights_seed: int
    command: str

    def write(self, folder: Path) -> None:
        """Keep it in the folder, for a later resume."""
        _write_json(folder / REQUEST, vars(self))

    @classmethod
    def read(cls, folder: Path) -> Request:
        """The request that the folder's run began with.

        Raises:
            ValueError: the folder has none that can be read.
        """
        path = folder / REQUEST
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"expected the folder of a run to resume, got no readable {path}; name the "
                "folder with --output, or leave --resume out to start a run"
            ) from error


def write_beginning(run: Run, folder: Path, request: Request) -> None:
    """Write what is known when a run starts: the request, the plan, the versions."""
    request.write(folder)
    _write_json(folder / "plan.json", run.plan.describe())
    write_text(folder / VERSIONS, versions())


def write_progress(run: Run, folder: Path) -> None:
    """Write what was released so far: the metrics, their curves, and the ledger's entry."""
    # A plan without metrics leaves no file, not an empty one.
    if run.readings:
        table = io.StringIO(newline="")
        rows = csv.writer(table)
        rows.writerow(["step", *run.readings[0].values])
        rows.writerows([r.step + 1, *r.values.values()] for r in run.readings)
        write_text(folder / "metrics.csv", table.getvalue())
    # Curves and the ledger's extract rest on what was released: they may be written at any time.
    save_curves(run.plan, run.readings, folder / "curves.png", steps=run.steps_taken)
    if run.entry is not None:
        _write_json(folder / "ledger.json", _extract(run))


def write_end(outcome: Outcome, recipe: Recipe, folder: Path, request: Request) -> dict[str, Any]:
    """Write everything that a finished run leaves.

    Args:
        outcome: the run and its accuracy.
        recipe: what was trained.
        folder: the run's.
        request: what was asked for.

    Returns:
        What is in result.json.
    """
    tensors = {
        # Copies of their own, laid out as usual: safetensors takes no shared or strided memory.
        name: x.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, x in recipe.model.state_dict().items()
    }
    with open_atomically(folder / "model.safetensors") as file:
        file.write(save(tensors))
    write_progress(outcome.run, folder)
    found = result(outcome, request, folder)
    write_text(folder / "report.md", report_page(outcome, recipe, request))
    _write_json(folder / "result.json", found)  # last: it marks a folder as complete
    return found


def result(outcome: Outcome, request: Request, folder: Path) -> dict[str, Any]:
    """The numbers of a run, for scripts: what is in result.json.

    Args:
        outcome: the run and its accuracy.
        request: what was asked for.
        folder: the run's.
    """
    facts = outcome.run.guarantee.to_dict()
    return {
        "recipe": request.recipe,
        "options": request.options,
        "seed": request.seed,
        "accuracy": outcome.accuracy,
        "private": facts["private"],
        "epsilon": facts["epsilon_if_secret"],
        "delta": facts["delta"],
        "guarantee": facts,
        "noise_multiplier": facts["plan"]["noise_multiplier"],
        "steps": facts["steps_taken"],
        "seconds": round(outcome.seconds, 3),
        "folder": str(folder),
    }


def versions() -> str:
    """The versions of everything that a result can depend on, one on each line."""
    lines = [f"python {platform.python_version()}"]
    lines += [f"{package} {version(package)}" for package in _PACKAGES]
    lines += [f"platform {platform.platform()}", f"threads {torch.get_num_threads()}"]
    return "\n".join(lines) + "\n"


def report_page(outcome: Outcome, recipe: Recipe, request: Request) -> str:
    """The report of a finished run, in Markdown.

    Args:
        outcome: the run and its accuracy.
        recipe: what was trained.
        request: what was asked for.
    """
    run = outcome.run
    # Frozen weights are public and not what was trained.
    weights = sum(p.numel() for p in recipe.model.parameters() if p.requires_grad)
    kind = type(recipe.model).__name__
    sections = {
        "What was trained": (
            f"The recipe `{request.recipe}`: a {kind} with {weights:,} trained parameters, by "
            f"{type(recipe.optimizer).__name__}, on {run.plan.records:,} records, in "
            f"{run.steps_taken:,} steps ({outcome.seconds:.0f} seconds). The weights are in "
            "`model.safetensors`."
        ),
        "The guarantee": f"{in_words(run.guarantee)}\n\nIn one line: {_first_line(run)}",
        "What the guarantee does not cover": _bullets((*NOT_COVERED, f"Not counted: {UNCOUNTED}.")),
        "Accuracy": _accuracy(outcome, recipe),
        "Curves": (
            "![curves](curves.png)\n\nEvery point was released with noise, within the guarantee "
            "above; the numbers are in `metrics.csv`. No loss or accuracy on training records was "
            "looked at without noise."
            if run.readings
            else "![curves](curves.png)\n\nThe plan has no metrics, so none were looked at."
        ),
        "The plan": _table(run.plan.describe()),
        "Preparation and tuning": _bullets(recipe.notes)
        or "The recipe says nothing about how data were prepared and settings were tuned.",
        "For a model card": (
            "What a model card can say, with its numbers from `result.json`:\n\n"
            + "\n".join(f"    {line}".rstrip() for line in model_card(run.guarantee).splitlines())
        ),
        "To reproduce": (
            f"    {request.command}\n\n"
            + (
                "The same seed gives the same weights, with the same versions and threads."
                if request.seed is not None
                else "The key came from the operating system and is destroyed: another run draws "
                "other batches and noise."
            )
        ),
        "Versions": "".join(f"    {line}\n" for line in versions().splitlines()),
    }
    private = run.guarantee.private
    title = f"# A {'private ' if private else ''}training run{'' if private else ', not private'}"
    parts = [title, *(f"## {title}\n\n{text}" for title, text in sections.items())]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _first_line(run: Run) -> str:
    return str(run.guarantee).splitlines()[0]


def _accuracy(outcome: Outcome, recipe: Recipe) -> str:
    if outcome.accuracy is None:
        return "The recipe has no public test records, so no accuracy was measured."
    return (
        f"{100 * outcome.accuracy:.2f} % of the {count(recipe.test):,} test records. They were not "
        "trained on and are treated as public: this number has no noise, and the guarantee does "
        "not protect them."
    )


def _bullets(lines: tuple[str, ...]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(facts: dict[str, Any]) -> str:
    rows = [f"| {name.replace('_', ' ')} | {value} |" for name, value in facts.items()]
    return "\n".join(["| | |", "| --- | --- |", *rows])


def _extract(run: Run) -> dict[str, Any]:
    assert run.entry is not None
    return {
        "entry": run.entry.id,
        "settled": run.entry.settled,
        "steps_reserved": run.entry.position,
        "charges": [
            {"epsilon": _finite(s.epsilon), "delta": s.delta, "relation": s.relation.value}
            for s in run.entry.spends
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write_json(path: Path, facts: dict[str, Any]) -> None:
    # JSON has no infinity: null stands for it.
    clean = {k: _finite(v) if isinstance(v, float) else v for k, v in facts.items()}
    write_text(path, json.dumps(clean, indent=1, ensure_ascii=False) + "\n")
