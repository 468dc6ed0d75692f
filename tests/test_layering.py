"""Every module has a rank, and imports from lower ranks only: the way of the data, upwards."""

import ast
from pathlib import Path

import pytest

PACKAGE = "hushgrad"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# Experiments: they import the library and their own folder, and nothing imports them.
EXPERIMENTS = {"hushgrad_recipes": "recipes", "hushgrad_reproductions": "reproductions"}
# The papers' networks are in the recipes; a reproduction may use them.
ALSO = {"hushgrad_reproductions": {"hushgrad_recipes"}, "hushgrad_recipes": set[str]()}

# Lowest first. A room is a package, whose modules may import one another, unless they have ranks of
# their own. Rooms on one line do not import each other.
RANKS = (
    ("types", "rng", "numerics", "bits", "moved"),
    ("files", "batches", "events", "iterates", "batchnorm", "parallel"),
    ("data", "sampling", "noise", "clipping", "run.metrics", "run.augmentation"),
    # per-sample gradients
    ("gradients.errors", "gradients.constants", "gradients.probes", "gradients.guards"),
    ("gradients.objective", "gradients.factors"),
    ("gradients.structure", "gradients.comparison", "gradients.tracing"),
    ("gradients.forms",),
    ("gradients.certification",),
    ("gradients.observed", "gradients.taking", "gradients.reference"),
    ("gradients",),
    # what is asked of them, and what it costs
    ("run.execution", "accounting"),
    ("run.query", "ledger"),
    ("run.permit",),
    ("run.step",),
    ("algorithms",),
    # a run
    ("run.plan",),
    (
        "run.admission",
        "run.charging",
        "run.checkpoint",
        "run.drawn",
        "run.folder",
        "run.saved_state",
    ),
    ("run.guarantee", "run.odometer", "run.penalties", "run.randomness", "run.snapshot"),
    ("run.resuming", "run.evaluation"),
    ("run.run",),
    ("run.training", "run"),
    # those who use it
    ("glm", "audit", "diagnosis", "testing"),
    ("__init__",),
    ("launch",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}


def place_of(module: str) -> str | None:
    """The longest listed name that a module's begins with."""
    parts = module.split(".")
    heads = (".".join(parts[:k]) for k in range(len(parts), 0, -1))
    return next((head for head in heads if head in RANK), None)


def imported(tree: ast.AST, parts: tuple[str, ...], modules: frozenset[str]) -> set[str]:
    """The modules of the package that the module at `parts` imports, `"__init__"` for itself.

    `parts` is its path below the package, `("gradients", "guards")`, with `"__init__"` kept. A name
    that is no module is one of the module it is taken from.
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
                names = (".".join(rest[:k]) for k in range(len(rest), 0, -1))
                found.add(next((name for name in names if name in modules), "__init__"))
    return found


def modules_below(source: Path) -> frozenset[str]:
    """Their dotted names below the package, and the listed ones."""
    paths = [path.relative_to(source).with_suffix("").parts for path in source.rglob("*.py")]
    named = (parts[:-1] if parts[-1] == "__init__" else parts for parts in paths)
    return frozenset(".".join(parts) for parts in named if parts) | (RANK.keys() - {"__init__"})


def breaches(source: Path) -> list[str]:
    """Every breach of the layering below `source`, as sentences."""
    found, modules = [], modules_below(source)
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        own = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        place = place_of(own)
        if place is None:
            found.append(f"{own} has no rank; give it one in this test")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for target in sorted(imported(tree, parts, modules)):
            there = place_of(target)
            if there is None or (there != place and RANK[there] >= RANK[place]):
                found.append(f"{own} imports {target}, which is not below it")
    return found


def test_the_package_keeps_its_layers() -> None:
    assert list(SOURCE.rglob("*.py")), f"no modules below {SOURCE}"
    assert breaches(SOURCE) == []


# Whoever is outside of a room knows no more of it than these modules.
DOORS = {"gradients": {"gradients", "gradients.factors", "gradients.reference"}}


def intrusions(source: Path) -> list[str]:
    """Every import of a room's inner module by a module outside of the room, as sentences."""
    found, modules = [], modules_below(source)
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for target in sorted(imported(tree, parts, modules)):
            room = target.split(".")[0]
            if room in DOORS and parts[0] != room and target not in DOORS[room]:
                found.append(f"{'.'.join(parts)} imports {target}, which is inside of {room}")
    return found


def test_rooms_are_entered_by_their_doors() -> None:
    assert intrusions(SOURCE) == []


@pytest.mark.parametrize(
    ("module", "statement", "count"),
    [
        ("run/step.py", "from hushgrad.gradients.guards import restored", 1),
        ("run/step.py", "from hushgrad.gradients import guards", 1),
        ("testing.py", "import hushgrad.gradients.tracing.tape", 1),
        ("run/step.py", "from ..gradients.forms.choices import traced", 1),
        ("run/step.py", "from hushgrad.gradients import per_sample, traced", 0),
        ("glm/closed.py", "from hushgrad.gradients.factors import Dense", 0),
        ("glm/closed.py", "from hushgrad.gradients.factors.kinds import Dense", 1),
        ("gradients/taking.py", "from hushgrad.gradients.guards import restored", 0),
    ],
)
def test_a_planted_intrusion_is_caught(
    tmp_path: Path, module: str, statement: str, count: int
) -> None:
    for inner in ("guards", "tracing/tape", "forms/choices", "factors/__init__", "factors/kinds"):
        path = tmp_path / "gradients" / f"{inner}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    planted = tmp_path / module
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(statement, encoding="utf-8")
    assert len(intrusions(tmp_path)) == count


def roots(path: Path) -> set[str]:
    """The packages that a file imports from, at any place in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


def imports_of_experiments(source: Path) -> dict[str, set[str]]:
    """The files below `source` that import a recipe or a reproduction, by either name."""
    forbidden = {*EXPERIMENTS, *EXPERIMENTS.values()}
    found = {str(path.relative_to(source)): roots(path) for path in source.rglob("*.py")}
    return {name: names & forbidden for name, names in found.items() if names & forbidden}


def test_the_library_imports_no_recipe_and_no_reproduction() -> None:
    assert imports_of_experiments(SOURCE) == {}


@pytest.mark.parametrize(
    "statement",
    [
        "import hushgrad_recipes.mnist",
        "from reproductions import study",
        "def late():\n    from hushgrad_reproductions.study import Table",
    ],
)
def test_a_planted_import_of_an_experiment_is_caught(tmp_path: Path, statement: str) -> None:
    (tmp_path / "cli.py").write_text(statement, encoding="utf-8")
    assert imports_of_experiments(tmp_path).keys() == {"cli.py"}


@pytest.mark.parametrize("package", EXPERIMENTS)
def test_experiments_import_the_library_and_their_own_folders(package: str) -> None:
    folder = SOURCE.parents[1] / EXPERIMENTS[package]
    assert (SOURCE.parent / package).samefile(folder)  # a link, so that there is one copy
    paths = list(folder.glob("*.py"))
    assert paths
    for path in paths:
        ours = {name for name in roots(path) if name.startswith(PACKAGE)} | (
            roots(path) & {*EXPERIMENTS.values(), "benchmarks", "tests"}
        )
        assert ours <= {PACKAGE, package} | ALSO[package], path.name
        tree = ast.parse(path.read_text(encoding="utf-8"))
        library = imported(tree, (EXPERIMENTS[package], path.stem), modules_below(SOURCE))
        assert not [name for name in library if name.split(".")[0] == "cli"], path.name
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_every_listed_module_is_there() -> None:
    paths = {name: SOURCE.joinpath(*name.split(".")) for name in RANK}
    assert [n for n, p in paths.items() if not (p.is_dir() or p.with_suffix(".py").exists())] == []


def test_few_modules_stand_outside_of_a_room() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 18


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("clipping/rules.py", "import hushgrad.run.plan"),
        ("clipping/rules.py", "import hushgrad.noise"),
        ("clipping/rules.py", "import hushgrad"),
        ("clipping/rules.py", "from hushgrad import clipped_sum"),
        ("clipping/rules.py", "from hushgrad import noise as n"),
        ("clipping/rules.py", "from hushgrad.noise import add_noise"),
        ("clipping/rules.py", "from .. import noise"),
        ("clipping/rules.py", "from ..noise import add_noise"),
        ("run/step.py", "def late():\n    from hushgrad.run.training import train"),
        ("run/step.py", "from hushgrad.algorithms import Sgd"),
        ("run/metrics.py", "from hushgrad.run.step import step"),
        ("gradients/tracing/tape.py", "from ...run.step import step"),
        ("gradients/tracing/tape.py", "from hushgrad.gradients import per_sample"),
        ("gradients/tracing/rules/linear.py", "from hushgrad.gradients.forms import traced"),
        ("gradients/forms/compiled.py", "from hushgrad.gradients.certification import oracle"),
        ("gradients/__init__.py", "from hushgrad.run.step import step"),
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
        ("clipping/rules.py", "from hushgrad.types import Bounded\nfrom ..numerics import exact"),
        ("clipping/__init__.py", "from .rules import abadi\nfrom . import groups"),
        ("gradients/tracing/tape.py", "from ..factors import kinds\nfrom ...types import Params"),
        (
            "gradients/__init__.py",
            "from .forms import dense\nfrom hushgrad.gradients import guards",
        ),
        ("run/step.py", "from hushgrad import clipping, noise"),
        ("run/plan.py", "from hushgrad.algorithms import Sgd\nfrom .step import step"),
        ("__init__.py", "from .run.step import step"),
        ("clipping/rules.py", "import hushgradient, torch"),
    ],
)
def test_an_allowed_import_passes(tmp_path: Path, module: str, statement: str) -> None:
    allowed = tmp_path / module
    allowed.parent.mkdir(parents=True, exist_ok=True)
    allowed.write_text(statement, encoding="utf-8")
    assert breaches(tmp_path) == []


# The attacks of the audit look at the bits of noise itself; nothing private goes through them.
RELEASES = {"run/step.py", "audit/floating_point.py"}


def users_of_release(source: Path) -> set[str]:
    """The modules outside of `noise/` that name the function which adds noise."""
    found = set()
    for path in source.rglob("*.py"):
        name = path.relative_to(source).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            taken = isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "hushgrad.noise"
            )
            if taken and any(alias.name == "release" for alias in node.names):
                found.add(name)
            if isinstance(node, ast.Attribute) and node.attr == "release":
                base = node.value
                if isinstance(base, ast.Name) and base.id in ("noise", "releasing"):
                    found.add(name)
    return {name for name in found if not name.startswith("noise/")}


def test_one_function_leads_to_a_release() -> None:
    assert users_of_release(SOURCE) == RELEASES


@pytest.mark.parametrize(
    "statement",
    [
        "from hushgrad.noise import release",
        "from hushgrad.noise.releasing import release as add",
        "from hushgrad import noise\nnoise.release(1)",
    ],
)
def test_a_planted_way_around_it_is_caught(tmp_path: Path, statement: str) -> None:
    (tmp_path / "algorithms.py").write_text(statement, encoding="utf-8")
    assert users_of_release(tmp_path) == {"algorithms.py"}
