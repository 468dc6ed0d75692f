"""The programs on the pages run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

TOP = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page", ["README.md", "docs/training.md", "docs/algorithms.md", "docs/glm.md"]
)
def test_the_loop_on_a_page_trains_and_prints_its_guarantee(
    page: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    """The last program of each page is a whole one."""
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"```python\n(.*?)```", (TOP / page).read_text(encoding="utf-8"), re.S)
    torch.manual_seed(0)
    exec(compile(programs[-1], page, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "1e-05)-DP, add/remove one record" in printed
    assert printed.rstrip().endswith("timing and other side channels")
