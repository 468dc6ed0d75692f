"""What an installed hushgrad says of itself, and that the README's commands need no more."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest

from hushgrad.data import CLASSIFIED
from hushgrad.launch.plugins import RECIPES, load_plugin, recipes_in

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text(encoding="utf-8")


def test_the_metadata_are_those_of_a_package_that_can_be_found() -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["readme"] == "README.md"
    assert project["authors"] == [{"name": "The hushgrad authors"}]
    assert "Typing :: Typed" in project["classifiers"]
    assert (TOP / "src" / "hushgrad" / "py.typed").is_file()


def test_the_first_commands_need_nothing_that_is_not_installed() -> None:
    section = README.partition("## One command")[2].partition("\n## ")[0]
    commands = re.findall(r"^    hushgrad train (\S+)", section, re.MULTILINE)
    assert commands, "no commands in the section"
    for target in commands:  # a data set, a recipe, or a file that the reader is to write
        place, _, function = target.partition(":")
        known = target in CLASSIFIED or target.startswith("my_recipe.py:")
        assert known or function in recipes_in(load_plugin(RECIPES, place))


def test_the_installed_package_offers_what_pyproject_says() -> None:
    """Where it does not: run make, or pip install --editable, again."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for group, entries in project["entry-points"].items():
        installed = {
            entry.name: entry.value
            for entry in distribution("hushgrad").entry_points
            if entry.group == group
        }
        assert installed == entries
        for entry in entry_points(group=group):
            assert entry.load() is not None


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A wheel from the clone, and one from the source archive, as `python -m build` makes it."""
    pytest.importorskip("hatchling", reason="needs hatchling to build")
    folder = tmp_path_factory.mktemp("built")

    def build(kind: str, source: Path, to: Path) -> Path:
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(to)]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (made,) = (path for path in to.iterdir() if path.is_file())
        return made

    with tarfile.open(build("sdist", TOP, folder / "source")) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.glob("hushgrad-*")
    return [build("wheel", TOP, folder / "direct"), build("wheel", source, folder / "by-source")]


def test_a_wheel_holds_its_packages_its_page_and_nothing_else(wheels: list[Path]) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (metadata,) = (name for name in names if name.endswith("/METADATA"))
            found = email.message_from_bytes(archive.read(metadata))
        assert len(names) == len(set(names))
        assert "hushgrad/py.typed" in names
        packages = {name.split("/")[0].partition("-")[0] for name in names}
        assert packages == {"hushgrad", "hushgrad_recipes", "hushgrad_reproductions"}
        for folder in ("recipes", "reproductions"):
            files = {path.name for path in (TOP / folder).glob("*.py")}
            assert files <= {name.partition("/")[2] for name in names}
        assert found["Author"] == "The hushgrad authors"
        assert found["Description-Content-Type"] == "text/markdown"
        assert "differential privacy" in str(found.get_payload())


def test_recipes_and_reproductions_are_reached_from_a_wheel(
    wheels: list[Path], tmp_path: Path
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheels[1]) as archive:
        archive.extractall(site)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = dict(os.environ, PYTHONPATH=str(site))
        command = [sys.executable, "-m", "hushgrad", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    assert "srm-table2" in run("reproduce", "list").stdout
    for target in ("mnist:automatic", "a9a:abadi"):
        tried = run("train", target, "--epsilon", "1", "--data", "nowhere")
        assert tried.returncode == 2 and "nowhere" in tried.stderr  # the recipe looked for its data
    where = "import hushgrad_recipes.mnist as m, hushgrad; print(m.__file__, hushgrad.__file__)"
    environment = dict(os.environ, PYTHONPATH=str(site))
    told = subprocess.run(
        [sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert all(Path(path).is_relative_to(site) for path in told.stdout.split())
