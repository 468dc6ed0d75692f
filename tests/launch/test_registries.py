"""A name that is added to a registry appears in the command's help and is accepted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hushgrad.accounting import ACCOUNTANTS
from hushgrad.algorithms.named import NAMED
from hushgrad.cli import app
from hushgrad.clipping.named import CLIPS
from hushgrad.data import CLASSIFIED
from hushgrad.launch.builtin import MODELS
from hushgrad.launch.plugins import RECIPES, REPRODUCTIONS, load_plugin, plugin_names, recipes_in
from hushgrad.sampling.named import SAMPLERS

TOP = Path(__file__).parents[2]
ENVIRONMENT = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p), COLUMNS="400")

# A name is added before the command line is imported, as a line in the registry's file would be.
ADDING = """
import json
from typer.testing import CliRunner
from hushgrad.accounting import ACCOUNTANTS, RDP
from hushgrad.algorithms.named import NAMED
from hushgrad.clipping.named import CLIPS
from hushgrad.data import CLASSIFIED, digits
from hushgrad.launch import builtin
from hushgrad.sampling.named import SAMPLERS, Sampler, shuffled_batches

CLIPS["my-clip"] = lambda clip_norm: CLIPS["abadi"](clip_norm / 2)
NAMED["my-algorithm"] = NAMED["rrpsgd"]
CLASSIFIED["my-data"] = digits
builtin.MODELS["my-model"] = builtin.linear_model
SAMPLERS["my-sampler"] = Sampler(shuffled_batches)
ACCOUNTANTS["my-accountant"] = RDP

from hushgrad.cli import app

COST = "--noise-multiplier=4 --steps=10 --delta=1e-5 --records=100 --batch=10 --json"
COMMANDS = {
    "train help": "train --help",
    "account help": "account --help",
    "plan help": "plan --help",
    "bias help": "clipping-bias --help",
    "bias": "clipping-bias --rules=my-clip --norms=0.2 --output=bias.png --json",
    "train": "train my-data --model=my-model --clip=my-clip --algorithm=my-algorithm --json "
    "--epochs=1 --noise-multiplier=3 --output=run",
    "my sampler": f"account {COST} --sampling=my-sampler --relation=replace-one",
    "shuffled": f"account {COST} --sampling=shuffled --relation=replace-one",
    "my accountant": f"account {COST} --accountant=my-accountant",
    "rdp": f"account {COST} --accountant=rdp",
}
found = {}
for name, command in COMMANDS.items():
    result = CliRunner().invoke(app, command.split())
    found[name] = [result.exit_code, result.stdout, result.stderr]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each command printed in a process with one name more in every registry."""
    folder = tmp_path_factory.mktemp("added")
    command = [sys.executable, "-c", ADDING]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert all(code == 0 for code, _, _ in answers.values()), answers
    return {name: out for name, (_, out, _) in answers.items()}


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("train help", {"my-clip", "my-algorithm", "my-data", "my-model"}),
        ("account help", {"my-sampler", "my-accountant"}),
        ("plan help", {"my-sampler", "my-accountant"}),
        ("bias help", {"my-clip"}),
    ],
)
def test_an_added_name_is_in_the_help(found: dict[str, str], command: str, names: set[str]) -> None:
    assert {name for name in names if name in found[command]} == names


def test_an_added_clipping_rule_is_clipped_by(found: dict[str, str]) -> None:
    (row,) = json.loads(found["bias"])
    assert row["rule"] == "my-clip"
    # log odds of Abadi's rule at half the norm: theorem 3.2 of clipped DP-GD, L = 0.1
    assert row["clipped minimiser"] == pytest.approx(4.394449, rel=1e-5)


def test_added_names_train(found: dict[str, str]) -> None:
    facts = json.loads(found["train"])
    plan = facts["guarantee"]["plan"]
    assert plan["clip"] == "abadi(clip_norm=0.5)" and plan["records"] == 1437
    assert "uniform" in plan["algorithm"]  # that of rrpsgd


def test_an_added_sampler_and_accountant_cost_what_they_stand_for(found: dict[str, str]) -> None:
    for added, known in (("my sampler", "shuffled"), ("my accountant", "rdp")):
        assert json.loads(found[added])["epsilon"] == json.loads(found[known])["epsilon"] > 0


@pytest.mark.parametrize(
    ("command", "registries"),
    [
        ("train", (CLIPS, NAMED, CLASSIFIED, MODELS)),
        ("account", (SAMPLERS, ACCOUNTANTS)),
        ("clipping-bias", (CLIPS,)),
        ("reproduce", (plugin_names(REPRODUCTIONS),)),
    ],
)
def test_every_name_is_in_the_help(command: str, registries: tuple[dict[str, object], ...]) -> None:
    # Wide enough that no name is broken over two lines.
    said = CliRunner(env={"COLUMNS": "400"}).invoke(app, [command, "--help"]).stdout
    assert [name for names in registries for name in names if name not in said] == []


# --- recipes and reproductions, which installed packages offer ---

OFFERING = {
    "census.py": '''
        from hushgrad.launch.builtin import classifier
        from hushgrad.launch.recipe import Recipe

        def small(*, seed: int = 0) -> Recipe:
            """A recipe of another package."""
            return classifier(epochs=0.5, noise_multiplier=3.0, seed=seed)

        def helper() -> int:
            return 3
    ''',
    "broken.py": "import no_such_module_anywhere",
    "figures.py": '''
        def figure(settings):
            """A figure of another package."""
            (settings.out / "figure.txt").write_text(f"{settings.seeds} seeds")
    ''',
    "offering-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n",
    "offering-1.0.dist-info/entry_points.txt": """
        [hushgrad.recipes]
        census = census
        broken = broken

        [hushgrad.reproductions]
        figure-9 = figures:figure
        srm-table2 = figures:figure
    """,
}


@pytest.fixture
def offering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package is installed that offers recipes and reproductions."""
    for name, text in OFFERING.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.usefixtures("offering")
def test_an_installed_recipe_is_listed_and_trained() -> None:
    lines = dict(line.split(None, 1) for line in run("train", "list").splitlines())
    assert lines["census:small"] == "A recipe of another package."
    assert "census:helper" not in lines
    assert lines.keys() >= {"mnist:automatic", "a9a:abadi", "fashion-mnist:strong", "digits"}
    assert "no_such_module_anywhere" in lines["broken:…"]  # and the others are listed all the same
    found = json.loads(run("train", "census:small", "--json"))
    assert found["folder"] == "runs/census-small-1" and found["recipe"] == "census:small"


@pytest.mark.usefixtures("offering")
def test_an_installed_reproduction_is_listed_and_run(tmp_path: Path) -> None:
    lines = dict(line.split(None, 1) for line in run("reproduce", "list").splitlines())
    assert lines["figure-9"] == "A figure of another package."
    assert run("reproduce", "figure-9", "--seeds=2", "--out=out") == "out/figure.txt\n"
    assert (tmp_path / "out" / "figure.txt").read_text() == "2 seeds"


@pytest.mark.usefixtures("offering")
def test_a_name_that_two_packages_offer_is_refused() -> None:
    with pytest.raises(ValueError, match="one package that offers 'srm-table2', got hushgrad and"):
        load_plugin(REPRODUCTIONS, "srm-table2")


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="expected one of a9a, cifar10, fashion-mnist, mnist"):
        load_plugin(RECIPES, "imagenet")


def test_recipes_are_public_functions_of_their_own_module() -> None:
    assert list(recipes_in(load_plugin(RECIPES, "mnist"))) == ["abadi", "automatic", "strong"]


def test_a_recipe_of_a_clone_is_found_by_its_file(tmp_path: Path) -> None:
    given = (str(TOP / "recipes" / "a9a.py") + ":abadi", "--data", str(tmp_path))
    result = CliRunner().invoke(app, ["train", *given])
    assert result.exit_code == 2 and "a file of a9a" in result.stderr  # it was called
    by_name = CliRunner().invoke(app, ["train", "a9a:abadi", "--data", str(tmp_path)])
    assert by_name.stderr == result.stderr
