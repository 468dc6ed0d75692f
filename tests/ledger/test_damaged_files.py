"""A full disk, files that cannot be written, damaged and foreign files: said, and nothing lost."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from charged_runs import forked, opened, spend
from hushgrad.ledger import Ledger
from hushgrad.types import Refused


def filled(path: Path, runs: int = 4) -> Ledger:
    ledger = Ledger(path)
    budget = ledger.set_budget("census", epsilon=1e4, delta=0.5)
    for _ in range(runs):
        entry = opened(budget, spend(1.0, 1e-6))
        entry.reserve(8)
        entry.note(1, b"digest")
    return ledger


# --- a full disk ---


def until_full(ledger: Ledger) -> int:
    """Open runs until there is no room for another; how many there are then."""
    budget = ledger.budget("census")
    for runs in range(len(budget.account.rows), 2000):  # noqa: B007
        try:
            opened(budget, spend(1.0, 1e-6))
        except Refused as refusal:
            said = str(refusal)
            break
    assert (
        "got a full disk; free some space and continue: nothing of this transaction was written"
        in said
    )
    return runs


def check_whole(path: Path, runs: int) -> None:
    account = Ledger(path).budget("census").account
    assert len(account.rows) == len(account.charges) == runs
    assert account.spent == pytest.approx((runs * 1.0, runs * 1e-6))


def test_a_full_file_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger.sqlite")
    connection = ledger._file._connection()
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 3}")
    runs = until_full(ledger)
    assert runs > 4
    check_whole(ledger.path, runs)
    connection.execute(f"PRAGMA max_page_count = {2 * pages + 100}")
    opened(ledger.budget("census"), spend(1.0, 1e-6))
    check_whole(ledger.path, runs + 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=480k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_refuses_and_keeps_what_it_has(small_disk: Path) -> None:
    ledger = filled(small_disk / "ledger.sqlite")
    (small_disk / "other").write_bytes(bytes(40_000))
    runs = until_full(ledger)
    (small_disk / "other").unlink()
    check_whole(ledger.path, runs)
    opened(ledger.budget("census"), spend(1.0, 1e-6))
    check_whole(ledger.path, runs + 1)
    ledger.close()


def test_no_ledger_is_begun_on_a_full_disk(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (small_disk / "other").write_bytes(bytes(500_000))
    with pytest.raises(Refused, match="full"):
        Ledger(small_disk / "ledger.sqlite")
    assert [path.name for path in small_disk.iterdir()] == ["other"]


# --- what cannot be written ---


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that users other than root can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def as_nobody(work: Callable[[], object]) -> str:
    """Run `work` in a process without root's rights; the refusal that it ends with."""
    report, end = os.pipe()

    def child() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        try:
            work()
        except Refused as refusal:
            os.write(end, str(refusal).encode())

    os.waitpid(forked(child), 0)
    os.close(end)
    with os.fdopen(report, "rb") as answer:
        return answer.read().decode()


def test_a_folder_that_cannot_be_written_is_said(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    said = as_nobody(lambda: Ledger(open_folder / "ledger.sqlite"))
    assert "got: Permission denied; name a file in a folder that you may write to" in said
    assert list(open_folder.iterdir()) == []


def test_a_file_that_cannot_be_written_is_said(open_folder: Path) -> None:
    path = open_folder / "ledger.sqlite"
    filled(path).close()
    path.chmod(0o444)
    open_folder.chmod(0o777)
    said = as_nobody(lambda: opened(Ledger(path).budget("census")))
    assert "expected a writable ledger at" in said
    assert "change their permissions" in said
    path.chmod(0o600)
    check_whole(path, 4)


def test_a_file_in_a_folder_that_cannot_be_written_is_said(open_folder: Path) -> None:
    path = open_folder / "ledger.sqlite"
    filled(path).close()
    path.chmod(0o666)
    open_folder.chmod(0o555)
    said = as_nobody(lambda: opened(Ledger(path).budget("census")))
    assert "in a writable folder" in said
    check_whole(path, 4)


def test_a_file_that_can_be_written_is_written(open_folder: Path) -> None:
    path = open_folder / "ledger.sqlite"
    open_folder.chmod(0o777)
    assert as_nobody(lambda: opened(filled(path).budget("census"), spend(1.0, 1e-6))) == ""
    check_whole(path, 5)


def test_no_folder_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="No such file or directory; name a file in a folder"):
        Ledger(tmp_path / "nowhere" / "ledger.sqlite")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_taken_away_is_noticed(tmp_path: Path, replaced: bool) -> None:
    ledger = filled(tmp_path / "ledger.sqlite")
    budget = ledger.budget("census")
    ledger.path.rename(tmp_path / "moved.sqlite")
    if replaced:
        filled(tmp_path / "new.sqlite").close()
        (tmp_path / "new.sqlite").rename(ledger.path)
    with pytest.raises(Refused, match="another file in its place" if replaced else "No such file"):
        opened(budget)


# --- damage while a run goes on ---


def cut_to(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def cut_log(path: Path) -> None:
    os.truncate(path.with_name(path.name + "-wal"), 0)


def cut_half_of_log(path: Path) -> None:
    log = path.with_name(path.name + "-wal")
    os.truncate(log, log.stat().st_size // 2)


@pytest.mark.parametrize(
    "damage", [cut_to(0), cut_to(4096), cut_to(40_000), cut_log, cut_half_of_log]
)
@pytest.mark.parametrize("call", ["reserve", "note", "charge", "settle", "open", "read"])
def test_a_ledger_that_is_cut_in_mid_run_is_noticed_by_the_next_call(
    tmp_path: Path, damage: Callable[[Path], None], call: str
) -> None:
    budget = filled(tmp_path / "ledger.sqlite").budget("census")
    entry = opened(budget, spend(1.0, 1e-6))
    entry.reserve(8)
    damage(tmp_path / "ledger.sqlite")
    calls: dict[str, Callable[[], object]] = {
        "reserve": lambda: entry.reserve(16),
        "note": lambda: entry.note(0, b"x"),
        "charge": lambda: entry.charge(spend(), reason="again"),
        "settle": lambda: entry.settle(steps=0, event=None),
        "open": lambda: opened(budget),
        "read": lambda: budget.spent,
    }
    for _ in range(2):
        with pytest.raises(Refused, match=r"expected an undamaged ledger|expected a ledger at"):
            calls[call]()


def test_a_log_that_is_taken_away_or_put_into_the_file_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    budget = filled(path).budget("census")
    entry = opened(budget, spend(1.0, 1e-6))
    log = path.with_name(path.name + "-wal")
    for step in range(6):
        if step % 2:
            log.unlink()
        else:
            with sqlite3.connect(path) as other:
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            other.close()
            assert log.stat().st_size == 0
        entry.reserve(step + 1)
        entry.note(step, b"x")
    check_whole(path, 5)
    assert [Ledger(path).budget("census").entry(entry.id).digests(s) for s in range(6)] == [
        [b"x"]
    ] * 6


def test_an_older_state_that_is_put_back_in_mid_run_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    filled(path).close()
    before = path.read_bytes()
    ledger = Ledger(path)
    budget = ledger.budget("census")
    opened(budget, spend(1.0, 1e-6))
    ledger.close()  # so that SQLite holds nothing of it in memory
    path.write_bytes(before)
    with pytest.raises(Refused, match="an older state than it had before"):
        opened(budget)


# --- damaged and foreign files ---


def test_garbage_anywhere_is_noticed_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    filled(path).close()
    whole, chance, refused = path.read_bytes(), random.Random(0), 0
    true = (4.0, 4e-6)
    for start in range(0, len(whole), 192):
        damaged = bytearray(whole)
        damaged[start : start + 64] = chance.randbytes(len(damaged[start : start + 64]))
        path.write_bytes(damaged)
        try:
            account = Ledger(path).budget("census").account
        except Refused:
            refused += 1
        else:
            assert account.spent == pytest.approx(true)
            assert account.limit == (1e4, 0.5)
            assert [row.position for row in account.rows] == [8] * 4
    assert refused > 5


def test_garbage_in_the_header_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    filled(path).close()
    path.write_bytes(b"garbage" * 4 + path.read_bytes()[28:])
    with pytest.raises(Refused, match="another file or a damaged one"):
        Ledger(path)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE charges SET cost = '[0.5, 1e-06]' WHERE number = 2",
        "DELETE FROM charges WHERE number = 2",
        "UPDATE budgets SET epsilon = 2e4",
        "UPDATE entries SET position = 4 WHERE rowid = 1",
        "UPDATE entries SET settled = 'now' WHERE rowid = 1",
    ],
)
def test_a_changed_number_is_noticed(tmp_path: Path, change: str) -> None:
    ledger = filled(tmp_path / "ledger.sqlite")
    budget = ledger.budget("census")
    with sqlite3.connect(ledger.path) as connection:
        connection.execute(change)
    connection.close()
    for look in (lambda: budget.account, lambda: opened(budget)):
        with pytest.raises(Refused, match="other records of census than were written; restore it"):
            look()


@pytest.mark.parametrize("content", [b"", b"not a database at all\n" * 100], ids=["empty", "text"])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(Refused, match=r"expected a ledger at .*, got another file"):
        Ledger(path)
    assert path.read_bytes() == content


def test_a_foreign_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "foreign.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (x)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(Refused, match="name a file of its own"):
        Ledger(path)
    assert path.read_bytes() == before


def test_a_ledger_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    filled(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 3")
    connection.close()
    with pytest.raises(Refused, match="got version 3; use a newer version of hushgrad"):
        Ledger(path)


def test_a_ledger_of_the_first_version_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    filled(path).close()
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE changes")
    connection.execute("DROP TABLE homes")
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    check_whole(path, 4)
    budget = Ledger(path).budget("census")
    opened(budget, spend(1.0, 1e-6)).reserve(8)
    check_whole(path, 5)
    assert budget.entry(budget.account.rows[0].id).copied  # where it was begun is not known
