"""Stages do not import one another; only the modules above them compose."""

import ast
from pathlib import Path

import pytest

PACKAGE = "hushgrad"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# What each top-level module may import from the package, besides itself. Every module has a place
# here: a new stage in STAGES, anything that puts stages together in COMPOSERS.
GROUND = {
    "bits": frozenset(),
    "nested": frozenset(),
    "numerics": frozenset(),
    "rng": frozenset(),
    "types": frozenset({"numerics", "rng"}),
    "points": frozenset({"types"}),
    "events": frozenset({"types"}),
    "pieces": frozenset({"rng", "types"}),
    "files": frozenset({"types"}),
    "processes": frozenset({"types"}),
}
STAGES = frozenset(
    {"data", "sampling", "persample", "grouping", "clipping", "metrics", "aggregate", "noise"}
    | {"comm", "checkpoint"}
)
COMPOSERS = frozenset(
    {
        "__init__",
        "__main__",
        "step",
        "plan",
        "guarantee",
        "training",
        "algorithms",
        "glm",
        "accounting",
    }
    | {"ledger", "audit", "theory", "execution", "diagnosis", "batchnorm", "report", "testing"}
    | {"demo", "cli", "recipe", "augmentation", "charging", "folder", "resuming"}
    | {
        "evaluation",
        "builtin",
        "curves",
        "launch",
        "odometer",
        "preflight",
        "words",
        "admission",
        "drawn",
        "penalties",
        "randomness",
        "snapshot",
        "reproductions",
    }
)

EVERYTHING = GROUND.keys() | STAGES | COMPOSERS
MAY_IMPORT: dict[str, frozenset[str]] = (
    GROUND
    | dict.fromkeys(STAGES, frozenset(GROUND))
    | dict.fromkeys(COMPOSERS, frozenset(EVERYTHING))
)


def imported_modules(tree: ast.AST, parts: tuple[str, ...]) -> set[str]:
    """Top-level modules of the package that the module at `parts` imports.

    `parts` is its path below the package, `("persample", "tape")`, with `"__init__"` kept.
    A name taken from the package itself, `from hushgrad import clipped_sum`, counts as an import
    of `__init__` unless it is a module.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [PACKAGE, *parts][: -node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for root, *rest in targets:
            if root == PACKAGE:
                top = rest[0] if rest else "__init__"
                found.add(top if top in EVERYTHING else "__init__")
    return found


def breaches(source: Path) -> list[str]:
    """Every breach of the layering below `source`, as sentences."""
    found = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        top = parts[0]
        if top not in MAY_IMPORT:
            found.append(f"{top} has no layer; add it to STAGES or COMPOSERS in this test")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for target in sorted(imported_modules(tree, parts) - MAY_IMPORT[top] - {top}):
            found.append(
                f"{'.'.join(parts)} imports {target}, but {top} may import only "
                f"{sorted(MAY_IMPORT[top])}; compose them in a module above"
            )
    return found


def test_the_package_keeps_its_layers() -> None:
    assert list(SOURCE.rglob("*.py")), f"no modules below {SOURCE}"
    assert breaches(SOURCE) == []


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("clipping.py", "import hushgrad.noise"),
        ("clipping.py", "import hushgrad"),
        ("clipping.py", "from hushgrad import clipped_sum"),
        ("clipping.py", "from hushgrad import noise as n"),
        ("clipping.py", "from hushgrad.noise import add_noise"),
        ("clipping.py", "from . import noise"),
        ("clipping.py", "from .noise import add_noise"),
        ("clipping.py", "def late():\n    from hushgrad.step import step"),
        ("persample/tape.py", "from ..clipping import abadi"),
        ("persample/rules/linear.py", "from ...aggregate import total"),
        ("persample/__init__.py", "from ..clipping import abadi"),
        ("types.py", "from hushgrad.clipping import abadi"),
        ("numerics.py", "from .types import Params"),
        ("novelty.py", "import torch"),
    ],
)
def test_a_planted_breach_is_caught(tmp_path: Path, module: str, statement: str) -> None:
    planted = tmp_path / module
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(statement, encoding="utf-8")
    assert len(breaches(tmp_path)) == 1


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("clipping.py", "from hushgrad.types import Bounded\nfrom .numerics import exact"),
        ("persample/tape.py", "from .factors import Outer\nfrom ..types import PerSample"),
        ("persample/__init__.py", "from .tape import Tape\nfrom . import dense"),
        ("types.py", "from hushgrad.numerics import exact"),
        ("step.py", "from hushgrad import clipping, noise"),
        ("__init__.py", "from .step import step"),
        ("clipping.py", "import hushgradient, torch"),
    ],
)
def test_an_allowed_import_passes(tmp_path: Path, module: str, statement: str) -> None:
    allowed = tmp_path / module
    allowed.parent.mkdir(parents=True, exist_ok=True)
    allowed.write_text(statement, encoding="utf-8")
    assert breaches(tmp_path) == []
