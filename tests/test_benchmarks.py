"""The benchmark: processes take turns, nothing is set for them, and the tables say what was found.

No test looks at how long anything takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import run, tables
from benchmarks.tables import Row
from benchmarks.turns import FEWEST_STEPS, WARM_UP, Comparison, Failed, Worker, take_turns

TOP = Path(__file__).parents[1]
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

LOGGING = """
import os, sys
from benchmarks.turns import channel, serve
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
def step():
    os.write(log, sys.argv[2].encode())
serve(step, channel())
"""
SPINNING = """
import threading
from benchmarks.turns import channel, serve
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
serve(lambda: None, channel())
"""


def child(program: str, *arguments: str, **options: object) -> Worker:
    return Worker([sys.executable, "-c", program, *arguments], **options)


def state(pid: int) -> tuple[str, int]:
    """What a process is doing, and the ticks of processor time that it has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def until(condition: Callable[[], bool]) -> bool:
    """Whether this comes true before one has waited long."""
    for _ in range(2000):
        if condition():
            return True
        time.sleep(0.005)
    return False


def is_gone(pid: int) -> bool:
    try:
        return state(pid)[0] == "Z"
    except FileNotFoundError:
        return True


def test_blocks_alternate_and_the_second_of_a_pair_begins_the_next(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    with child(LOGGING, str(log), "a") as a, child(LOGGING, str(log), "b") as b:
        found = take_turns(a, b, pairs=3, block_seconds=1e-9)
    start = "a" * (1 + WARM_UP) + "b" * (1 + WARM_UP)
    block_a, block_b = "a" * a.block_steps, "b" * b.block_steps
    assert log.read_text() == start + block_a + 2 * block_b + 2 * block_a + block_b
    assert found.block_steps == (a.block_steps, b.block_steps) == (FEWEST_STEPS, FEWEST_STEPS)
    assert len(found.plain) == len(found.other) == 3


def test_short_steps_are_put_together_until_a_block_is_long_enough() -> None:
    program = "from benchmarks.turns import *; serve(lambda: None, channel())"
    with child(program) as worker:
        worker.warm_up(0.02)
        assert worker.block_steps > 1000 * WARM_UP


@linux
def test_a_process_that_spins_is_stopped_while_it_is_not_its_turn() -> None:
    with child(SPINNING) as spinning, child(SPINNING) as other:
        for _ in range(2):
            spinning.run(1)
            before = state(spinning.pid)
            other.run(1)
            time.sleep(0.1)
            assert state(spinning.pid) == before == ("T", before[1])


@linux
def test_a_stopped_process_ends_when_it_is_closed_and_when_its_parent_is_killed() -> None:
    with child(SPINNING) as worker:
        pass
    assert is_gone(worker.pid)
    parent = (
        "import os, sys, time\nfrom benchmarks.turns import Worker\n"
        f"worker = Worker([sys.executable, '-c', {SPINNING!r}])\n"
        "print(worker.pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], cwd=TOP, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        assert state(pid)[0] == "T"
        started.kill()
    assert until(lambda: is_gone(pid))


@linux
def test_a_child_that_has_ended_by_itself_leaves_its_answer() -> None:
    class Late(Worker):
        def _answer(self) -> Row:
            found = super()._answer()
            assert until(lambda: is_gone(self.pid))
            return found

    with Late([sys.executable, "-c", "print('{\"error\": 0.5}', flush=True)"]) as worker:
        assert worker.ready == {"error": 0.5}
        with pytest.raises(Failed, match=r"^no message$"):
            worker.run(1)


def test_what_a_child_prints_is_no_answer_and_what_it_says_last_is_the_reason() -> None:
    program = "from benchmarks.turns import *\nsend = channel()\nprint('hello')\n"
    with child(f"{program}serve(lambda: print('more'), send, threads=3)") as worker:
        assert worker.ready == {"threads": 3}
        assert worker.run(2) >= 0
    with pytest.raises(Failed, match=r"^ValueError: too small$"):
        child(f"{program}raise ValueError('too small')")
    with pytest.raises(Failed, match=r"^no batch$"):
        child(f"{program}send({{'refuses': 'no batch'}})")
    with pytest.raises(Failed, match=r"^killed$"):
        child("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(Failed, match=r"^not done after 0 s$"):
        child("import time; time.sleep(60)", patience=0.1)
    with (
        child(f"{program}serve(lambda: exit('no more'), send)") as worker,
        pytest.raises(Failed, match=r"^no more$"),
    ):
        worker.run(1)


def test_nothing_is_set_in_the_environment_but_in_the_column_that_says_so(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program = "import os; from benchmarks.turns import *; channel()(dict(os.environ))"

    def told(command: list[str], *, environment: dict[str, str]) -> Worker:
        assert command[1:] == ["-m", "benchmarks.measure", "steps", "tiny", "hushgrad"]
        return child(program, environment=environment)

    monkeypatch.setattr(run, "Worker", told)
    seen = {}
    for column in run.ALLOCATORS:
        with run.child("steps", "tiny", "hushgrad", column) as worker:
            seen[column] = {k: v for k, v in worker.ready.items() if k != "LC_CTYPE"}
    here = {k: v for k, v in os.environ.items() if k != "LC_CTYPE"}
    assert seen["default"] == here
    assert seen["memory kept"].keys() - here.keys() == {
        "MALLOC_MMAP_MAX_",
        "MALLOC_TRIM_THRESHOLD_",
    }
    about = run.conditions(run.Effort(1, 0.1, ["default"]))
    assert about["environment"]["OMP_NUM_THREADS"] == "1"


def test_no_benchmark_sets_how_many_threads_there_are_but_that_of_releases() -> None:
    setting = {
        path.name
        for path in (TOP / "benchmarks").glob("*.py")
        if any(text in path.read_text() for text in ("set_num_threads", "environ[", "putenv"))
    }
    assert setting == {"release.py"}  # where the number of threads heads a table


def test_the_ratio_is_the_median_of_pairs() -> None:
    turns = Comparison([1.0, 2.0, 4.0], [3.0, 2.0, 8.0], 0.5, 0.7, (10, 5))
    found = turns.facts()
    assert (found["ratio"], found["least"], found["largest"]) == (2.0, 1.0, 3.0)
    assert (found["plain_seconds"], found["seconds"]) == (2.0, 3.0)
    pairs = [
        ({"seconds": 1.0, "process_seconds": 2.0}, {"seconds": 3.0, "process_seconds": 5.0}),
        ({"seconds": 2.0, "process_seconds": 4.0}, {"seconds": 2.0, "process_seconds": 4.0}),
    ]
    for pair in pairs:
        pair[1]["threads"] = 2
    found = run.facts_of_runs(pairs)
    assert (found["ratio"], found["process_ratio"]) == (2.0, 1.75)


def row(workload: str, library: str, ratio: float, **more: object) -> Row:
    figures = {
        "ratio": ratio, "least": ratio, "largest": ratio, "plain_seconds": 0.0123,
        "first_seconds": 1.5, "plain_first_seconds": 0.02, "threads": 2, "process_ratio": ratio,
        "plain_process_seconds": 3.0,
    }  # fmt: skip
    about = {
        "date": "2026-01-02", "torch": "2.13.0", "machine": "x86_64", "processors": 2,
        "repeats": 7, "environment": {"OMP_NUM_THREADS": "1"}, "busy_percent": 3.0,
    }  # fmt: skip
    title = f"the {workload}"
    given = {"workload": workload, "title": title, "library": library, "about": about}
    return given | {"error": 2e-5, "allocators": {"default": figures}} | more


def test_a_file_keeps_what_is_not_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    for found in (row("cnn", "a", 1.0), row("cnn", "b", 2.0), row("cnn", "a", 3.0)):
        tables.save(path, found)
    assert tables.load(path) == [row("cnn", "a", 3.0), row("cnn", "b", 2.0)]


def test_the_tables_say_what_is_wrong_refused_or_set() -> None:
    rows = [
        row("cnn", "good", 1.234, peak_bytes=3 * 2**20, plain_peak_bytes=2 * 2**20),
        row("cnn", "none", 1.0, refuses="tied weights"),
        row("cnn", "compiled", 1.0, notes=["not compiled: a loop"]),
        row("tiny", "bad", 250.0, error=0.5, peak_bytes=2**19, plain_peak_bytes=1),
        row("mnist_run", "good", 2.0),
    ]
    page = tables.pages(rows)
    assert "| the cnn | plain |  | 12.3 ms | – | 2 MiB | 20 ms |\n" in page
    assert "|  | good | 2.0e-05 | 1.23 (1.23–1.23) | – | 1.50 | 1.5 s |\n" in page
    assert "|  | bad | WRONG 5.0e-01 | 250 (250–250) | – | 0.5 MiB | 1.5 s |\n" in page
    assert "|  | none | refuses: tied weights |  |  |  |  |\n" in page
    assert "|  | compiled; not compiled: a loop |" in page
    assert "| the mnist_run | plain | 12.3 ms | – | 3 s |\n" in page
    assert "|  | good | 2.00 (2.00–2.00) | – | 2.00 |\n" in page
    assert "set by whoever ran it: OMP_NUM_THREADS=1" in page
    beside = [*rows, row("cnn", "hushgrad", 1.5), row("cnn", "opacus-ghost", 2.5)]
    assert "| the cnn | 1.50 | – | 2.50 |\n" in tables.overview_table(beside)


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md"])
def test_a_pages_tables_are_made_from_the_figures(name: str) -> None:
    page = (TOP / name).read_text(encoding="utf-8")
    rows = tables.load(TOP / "docs" / "benchmarks.json")
    assert tables.filled(page, rows) == page, (
        f"run python -m benchmarks.tables docs/benchmarks.json --page {name}"
    )
    other = tables.filled(page, [row("cnn", "hushgrad", 1.56), row("vit_small", "hushgrad", 1.78)])
    assert other != page and "1.56" in other
    assert tables.filled(other, rows) == page


def test_a_page_without_both_marks_is_refused() -> None:
    filled = tables.filled("<!-- runs -->\nold\n<!-- end of runs -->\nmore", [])
    assert filled.startswith("<!-- runs -->\n*To be measured: `python -m benchmarks.run ")
    assert filled.endswith("`.*\n<!-- end of runs -->\nmore")
    for page in ("", "<!-- runs -->\nold", "<!-- runs --> <!-- end of runs -->"):
        with pytest.raises(ValueError, match="runs"):
            tables.filled(page, [])


@pytest.mark.slow
def test_a_quick_benchmark_measures_steps_and_a_whole_run(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--json", str(path)]
    done = subprocess.run(command, cwd=TOP, check=True, capture_output=True, text=True)
    steps, whole = json.loads(path.read_text())["rows"]
    assert steps["workload"] == "tiny" and whole["workload"] == "tiny_run"
    assert steps["library"] == whole["library"] == "hushgrad"
    assert steps["error"] < tables.TOLERANCE and steps["peak_bytes"] >= 0
    for found in (steps, whole):
        (column,) = found["allocators"].values()
        assert column["ratio"] > 0 and column["threads"] == torch.get_num_threads()
    assert "| hushgrad |" in done.stdout and "tiny_run" in done.stderr
