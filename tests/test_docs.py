"""The programs on the pages run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hushgrad.data import CLASSIFIED

TOP = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page", ["README.md", "docs/training.md", "docs/algorithms.md", "docs/glm.md"]
)
def test_the_loop_on_a_page_trains_and_prints_its_guarantee(
    page: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    """The last program of each page is a whole one; of linear models it is the first."""
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"```python\n(.*?)```", (TOP / page).read_text(encoding="utf-8"), re.S)
    torch.manual_seed(0)
    whole = programs[0 if page == "docs/glm.md" else -1]
    exec(compile(whole, page, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "1e-05)-DP, add/remove one record" in printed
    assert printed.rstrip().endswith("timing and other side channels")


def test_the_private_way_to_choose_settings_counts_both_fits(capsys) -> None:
    programs = re.findall(r"```python\n(.*?)```", (TOP / "docs/glm.md").read_text("utf-8"), re.S)
    exec(compile(programs[1], "docs/glm.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "2e-05)-DP for 2 fits on shares of the same records" in printed
    assert float(printed[1:].partition(",")[0]) <= 1.0


EXTENDING = re.findall(
    r"^## (.*?)$|```python\n(.*?)```", (TOP / "docs/extending.md").read_text("utf-8"), re.S | re.M
)


def _titled(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each program below the heading that it stands under."""
    programs, title = [], ""
    for heading, program in found:
        title = heading or title
        if program:
            programs.append((title, program))
    return programs


@pytest.mark.parametrize(("title", "program"), _titled(EXTENDING), ids=lambda x: x[:20])
def test_what_one_adds_works_as_it_is_written(
    title: str, program: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(CLASSIFIED)
    torch.manual_seed(0)
    try:
        exec(compile(program, title, "exec"), {"__name__": "__main__"})
    finally:
        CLASSIFIED.clear()
        CLASSIFIED.update(before)


def test_every_row_of_the_table_has_its_example() -> None:
    page = (TOP / "docs/extending.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(.*?)\]\(#(.*?)\)", page, re.M)
    headings = [heading for heading, _ in EXTENDING if heading]
    assert [row.lower() for row, _ in rows] == [heading.lower() for heading in headings]
