"""No command answers nonsense by a traceback, a hang or gigabytes: one message and exit code 2.

Every option gets every value of a table. What makes sense after all may succeed.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hushgrad.cli import app
from hushgrad.cli.chart import draw_chart
from hushgrad.launch.plugins import REPRODUCTIONS, plugin_names
from hushgrad.ledger import Ledger
from hushgrad.run.guarantee import up

NUMBERS = (
    *("0", "-1", "nan", "inf", "-inf", "1e308", "1e-308", "5e-324", "-0.0", "1e22", "", "x", "½"),
    *(str(10**12), str(10**26)),
)
PLACES = (
    *("folder", "file", "empty", "binary", "/dev/null", "/dev/null/x", "/dev/full", "missing/a/b"),
    *("file/x", "", "folder/", "/proc/x", "x" * 300, "ünï☃/é", "nul\0", "picture.xyz"),
)
SAMPLED = ("account", "--noise-multiplier=1", "--steps=10", "--delta=1e-5", "--rate=0.01")
ONE_RELEASE = ("account", "--sampling=full", "--noise-multiplier=4", "--steps=1", "--delta=0.1")
PLANNED = ("plan", "--records=1000", "--batch=10", "--epochs=1", "--delta=1e-5")
BUDGET = ("ledger", "set-budget", "a", "--epsilon=1", "--delta=1e-5", "--ledger=new.sqlite")
TYPICAL = (
    *("--filter=renyi", "--typical-records=1000", "--typical-batch=10", "--typical-epochs=1"),
    "--typical-noise-multiplier=1",
)
DIGITS = ("train", "digits", "--epochs=0.01", "--batch=64", "--quiet")
_SECONDS = 60  # only a hang takes as long, on any machine


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HUSHGRAD_DATA", raising=False)
    Path("folder").mkdir()
    Path("file").write_text("hello\n", encoding="utf-8")
    Path("empty").touch()
    Path("binary").write_bytes(bytes(range(256)))


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """End a command that does not end by itself."""

    def ring(number: int, frame: Any) -> None:
        raise AssertionError("the command hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def require_sentence(*arguments: str, succeeds: bool = True) -> None:
    """The command succeeds, or ends with code 2 and one message."""
    result = run(*arguments)
    if isinstance(result.exception, AssertionError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), arguments
    assert result.exit_code in ((0, 2) if succeeds else (2,)), (arguments, result.output)
    if result.exit_code == 2:
        said = result.stderr
        assert len(re.findall(r"^(Error: |╭─ Error)", said, re.MULTILINE)) == 1, (arguments, said)
        assert "Traceback" not in said


def changed(base: Sequence[str], option: str, value: str) -> list[str]:
    return [word for word in base if not word.startswith(option + "=")] + [f"{option}={value}"]


OPTIONS: list[tuple[Sequence[str], str]] = [
    *(
        ((*SAMPLED, "--json", f"--accountant={accountant}"), option)
        for accountant in ("pld", "rdp", "gdp", "zcdp")
        for option in ("--noise-multiplier", "--steps", "--delta", "--rate")
    ),
    ((*SAMPLED, "--json"), "--group"),
    *(
        ((*PLANNED, "--noise-multiplier=1", "--accountant=rdp", "--json"), option)
        for option in ("--records", "--batch", "--epochs", "--delta", "--noise-multiplier")
    ),
    ((*PLANNED, "--accountant=rdp", "--json"), "--epsilon"),
    *((BUDGET, option) for option in ("--epsilon", "--delta")),
    ((*BUDGET, "--filter=renyi"), "--order"),
    *(((*BUDGET, *TYPICAL), option.partition("=")[0]) for option in TYPICAL[1:]),
    (("audit", "noise", "--trials=2", "--draws=16"), "--trials"),
    (("audit", "noise", "--trials=2", "--draws=16"), "--draws"),
    (("clipping-bias", "--rules=abadi", "--output=o.png"), "--norms"),
    (("reproduce", "lazy-region"), "--seeds"),
]


@pytest.mark.parametrize(("base", "option"), OPTIONS, ids=lambda x: x if isinstance(x, str) else "")
def test_an_option_of_any_number_ends_in_a_result_or_a_sentence(
    base: Sequence[str], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever goes through must not be run for minutes.
    monkeypatch.setattr("hushgrad_reproductions.lazy_region.lazy_regions", lambda settings: None)
    for value in NUMBERS:
        require_sentence(*changed(base, option, value))


def not_here(*_: Any, **__: Any) -> None:
    raise ValueError("expected nothing to be trained, got a run; this is a test")


@pytest.mark.parametrize(
    ("option", "values"),
    [
        pytest.param("--epsilon", NUMBERS, marks=pytest.mark.slow),
        *((option, NUMBERS) for option in ("--delta", "--batch", "--epochs", "--lr")),
        ("--noise-multiplier", NUMBERS),
        ("--seed", NUMBERS),
        ("--checkpoint-every", NUMBERS),
        ("--data", PLACES),
        ("--device", ("cuda:99", "meta", "cpu:x", "hpu", *PLACES)),
        ("--model", PLACES),
    ],
)
def test_training_with_nonsense_ends_in_a_result_or_a_sentence(
    option: str, values: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["hushgrad.cli.train"], "start", not_here)
    base = DIGITS if option in ("--epsilon", "--delta") else (*DIGITS, "--noise-multiplier=1")
    for value in values:
        require_sentence(*changed(base, option, value))


@pytest.mark.slow
def test_training_into_any_place_ends_in_a_result_or_a_sentence() -> None:
    for place in PLACES:
        require_sentence(*changed(DIGITS, "--output", place))


def test_rates_and_noise_that_overflow_are_refused_before_the_run() -> None:
    for option in ("--lr=1e308", "--noise-multiplier=1e308"):
        require_sentence(*DIGITS, option, "--output=out", succeeds=False)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("base", "option"),
    [
        (
            ("account", "--sampling=full", "--noise-multiplier=4", "--steps=1", "--delta=0.1"),
            "--plot",
        ),
        ((*PLANNED, "--dataset=a"), "--ledger"),
        ((*DIGITS, "--dataset-name=a"), "--ledger"),
        ((*DIGITS, "--resume"), "--output"),
        (("clipping-bias", "--rules=abadi", "--norms=0.2"), "--output"),
        (("clipping-bias", "--rules=abadi", "--norms=0.2", "--output=o.png"), "--data"),
        (BUDGET, "--ledger"),
        (("ledger", "show"), "--ledger"),
        (("ledger", "history"), "--ledger"),
        (("ledger", "export", "--ledger=known.sqlite"), "--output"),
        (("reproduce", "lazy-region", "--seeds=1"), "--out"),
        (("reproduce", "srm-mnist", "--seeds=1", "--out=o"), "--data"),
    ],
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_any_place_ends_in_a_result_or_a_sentence(
    base: Sequence[str], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hushgrad_reproductions.lazy_region.lazy_regions", lambda settings: None)
    Ledger(Path("known.sqlite")).set_budget("a", epsilon=1.0, delta=1e-5)
    for place in PLACES:
        require_sentence(*changed(base, option, place))


@pytest.mark.parametrize("name", plugin_names(REPRODUCTIONS))
def test_a_reproduction_that_cannot_write_says_so(name: str) -> None:
    require_sentence("reproduce", name, "--out=/dev/null/x", succeeds=False)


@pytest.mark.parametrize(
    "target",
    [
        *("..:..", ".:x", "a..b:c", "", ":", "a:", "::", ":b", "☃:f", "nul\0:x", "x.py\0:f"),
        *("builtins:exit", "builtins:quit", "sys:exit", "math:pi", "os:getcwd", "json:loads"),
        *("builtins:int", "folder:f", "file:f", "missing.py:f", "x" * 5000),
    ],
)
def test_a_target_that_is_no_recipe_is_one_sentence(target: str) -> None:
    require_sentence("train", target, succeeds=False)
    require_sentence("doctor", target, succeeds=False)


FAULTY = {
    "raises when imported": "raise KeyError(1)",
    "ends the process": "raise SystemExit(3)",
    "is no Python": "def f(:",
    "holds a null": "\0",
    "names another module": "import no_such_module",
    "has no function": "x = 1",
    "divides by zero": "def f(): return 1 / 0",
    "recurses": "def f(): return f()",
    "ends the process later": "def f():\n    import sys; sys.exit(4)",
    "returns something else": "def f(): return 1, 2, 3",
    "has no name": "import functools\nf = functools.partial(print)",
    "has no loss": "import torch\ndef f(): return torch.nn.Linear(1, 1), None, torch.ones(2, 1)",
}


@pytest.mark.parametrize("source", FAULTY.values(), ids=FAULTY.keys())
def test_a_faulty_recipe_is_one_sentence(source: str) -> None:
    Path("mine.py").write_text(source, encoding="utf-8")
    require_sentence("train", "mine.py:f", succeeds=False)
    require_sentence("doctor", "mine.py:f", succeeds=False)


def test_an_error_in_a_recipe_says_where_it_is() -> None:
    Path("mine.py").write_text("def f():\n    return {}['weights']\n", encoding="utf-8")
    said = run("train", "mine.py:f").stderr
    assert "KeyError: 'weights' (mine.py, line 2)" in said


def test_a_loss_that_raises_is_one_sentence_of_the_doctor() -> None:
    source = (
        "import torch\ndef f(): return torch.nn.Linear(1, 1), lambda b: 1 / 0, torch.ones(2, 1)"
    )
    Path("mine.py").write_text(source, encoding="utf-8")
    result = run("doctor", "mine.py:f")
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stdout and "mine.py, line 2" in result.stdout


@pytest.mark.parametrize(
    "rows", ["", "1,2,3\n", "nan,1\n", "1\n", "a,b\n", "0,1\n", "1e308,1e308\n"]
)
@pytest.mark.parametrize("loss", ["logistic", "squared", "poisson"])
def test_records_that_cannot_be_drawn_are_one_sentence(rows: str, loss: str) -> None:
    Path("d.csv").write_text(rows, encoding="utf-8")
    options = ("--data=d.csv", "--output=o.png", f"--loss={loss}", "--rules=abadi", "--norms=0.2")
    require_sentence("clipping-bias", *options)


def test_a_large_group_takes_little_memory() -> None:
    """It took 3.8 GiB."""
    pid = os.fork()
    if pid == 0:  # a process of its own, whose memory is limited
        import resource

        used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        limit = used * os.sysconf("SC_PAGE_SIZE") + 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        os._exit(run(*SAMPLED, "--group=1000", "--json").exit_code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_is_infinite_or_huge_is_drawn_and_written() -> None:
    chart = draw_chart([(1, 1.0), (2, float("inf"))], width=8, height=2)
    assert "█" in chart
    assert float(up(1e305)) >= 1e305
    assert up(float("inf")) == "∞"
