"""What an installed hushgrad says of itself, and that the README's commands need no more."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from hushgrad.data import CLASSIFIED

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
    for target in commands:  # a data set, or a file that the reader is to write
        assert target in CLASSIFIED or target.startswith("my_recipe.py:")


def test_a_wheel_holds_the_package_its_page_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling to build")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        found = email.message_from_bytes(archive.read(metadata))
    assert "hushgrad/py.typed" in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"hushgrad"}
    assert found["Author"] == "The hushgrad authors"
    assert found["Description-Content-Type"] == "text/markdown"
    assert "differential privacy" in str(found.get_payload())
