"""A run's folder: what a refused start leaves there, what it never touches, who may begin in it."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hushgrad as hg
from hushgrad import Refused, Rng
from hushgrad.algorithms import Sgd, average
from hushgrad.ledger import Entry, Ledger
from hushgrad.run import checkpoint
from hushgrad.run.folder import Claim


def plan(**changes: Any) -> hg.Plan:
    options = {"records": 40, "batch": 10, "epochs": 1, "delta": 1e-3, "noise_multiplier": 1.0}
    return hg.plan(**(options | changes))


def train(folder: Path, *, chosen: hg.Plan | None = None, **options: Any) -> hg.Run:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = (torch.ones(40, 3),)
    asked = chosen or plan()
    return hg.train(net, optimizer, data, plan=asked, rng=Rng.from_os(), folder=folder, **options)


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- a refused start ---


def refused_by_a_budget(folder: Path, tmp_path: Path) -> None:
    budget = Ledger(tmp_path / "books.sqlite").set_budget("people", epsilon=0.01, delta=1e-2)
    train(folder, budget=budget)


def refused_by_the_output(folder: Path, tmp_path: Path) -> None:
    train(folder, chosen=plan(algorithm=Sgd(output=average(skipped=100))))


def refused_by_a_full_disk(folder: Path, tmp_path: Path) -> None:
    write = checkpoint.write

    def full(path: Path, state: Any) -> None:
        if path.parent == folder:
            raise Refused("no room")
        write(path, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        train(folder)


REFUSALS = [refused_by_a_budget, refused_by_the_output, refused_by_a_full_disk]


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("there", ["", "runs", "runs/first"])
def test_a_refused_start_leaves_what_was_there(
    tmp_path: Path, refusal: Callable[[Path, Path], None], there: str
) -> None:
    home = tmp_path / "home"
    (home / there).mkdir(parents=True)
    (home / there / "mine").write_text("x", encoding="utf-8")
    before = tree(home)
    with pytest.raises((Refused, ValueError)):
        refusal(home / "runs" / "first", tmp_path)
    assert tree(home) == before


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refused_start_removes_nothing_of_another_process(
    tmp_path: Path, refusal: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both began while the outer folder was missing; the other one's run is there by now."""
    begin = Claim.__enter__

    def late(claim: Claim) -> Claim:
        found = begin(claim)
        monkeypatch.undo()
        other = train(tmp_path / "runs" / "other")
        other.finish()
        (tmp_path / "runs" / "first" / "notes").write_text("of somebody else", encoding="utf-8")
        return found

    monkeypatch.setattr(Claim, "__enter__", late)
    with pytest.raises((Refused, ValueError)):
        refusal(tmp_path / "runs" / "first", tmp_path)
    if refusal is not refused_by_the_output:  # that one is refused before anything is made
        assert tree(tmp_path / "runs" / "first") == ["notes"]
        assert checkpoint.read(tmp_path / "runs" / "other" / "checkpoint.safetensors")


def test_a_start_that_is_refused_after_its_charge_gives_it_back(tmp_path: Path) -> None:
    budget = Ledger(tmp_path / "books.sqlite").set_budget("people", epsilon=50.0, delta=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Entry, "require_held", lambda entry: refuse())
        with pytest.raises(Refused, match="on purpose"):
            train(tmp_path / "run", budget=budget)
    assert budget.spent == {"epsilon": 0.0, "delta": 0.0}
    (row,) = budget.account.rows
    assert row.settled


def refuse() -> None:
    raise Refused("on purpose")


# --- two processes ---


def test_two_processes_do_not_begin_in_one_folder(tmp_path: Path) -> None:
    with Claim(tmp_path / "a" / "b"):
        with pytest.raises(Refused, match="in which no other process begins"):
            train(tmp_path / "a" / "b")
        assert tree(tmp_path) == ["a", "a/b"]
        train(tmp_path / "a" / "c")
    train(tmp_path / "a" / "b")


def test_a_folder_that_was_removed_meanwhile_is_not_begun_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = os.open

    def late(path: Any, *arguments: Any, **options: Any) -> int:
        opened = lock(path, *arguments, **options)
        if Path(path) == tmp_path / "run":
            (tmp_path / "run").rmdir()
            (tmp_path / "run").mkdir()
        return opened

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(Refused, match="in which one does"), Claim(tmp_path / "run"):
        pass


def test_a_file_in_the_place_of_a_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(Refused, match="Not a directory; make sure that its folder exists"):
            train(folder)
    with pytest.raises(Refused, match="Not a directory"):
        train(Path("/dev/null/run"))


# --- while it goes on ---


@pytest.mark.parametrize("with_budget", [True, False])
def test_a_folder_that_vanishes_is_said(tmp_path: Path, with_budget: bool) -> None:
    budget = Ledger(tmp_path / "books.sqlite").set_budget("people", epsilon=50.0, delta=1e-2)
    run = train(tmp_path / "run", budget=budget if with_budget else None)
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    (tmp_path / "run").rmdir()
    for call in (run.save, run.finish):
        with pytest.raises(Refused, match="No such file or directory"):
            call()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_while_it_goes_on_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    run = train(tmp_path / "run")
    before = tree(tmp_path)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    for write in (run.save, run.finish):
        with pytest.raises(Refused, match="No space left on device"):
            write()
    assert run.entry is not None and not run.entry.settled
    assert tree(tmp_path) == before
    monkeypatch.undo()
    run.finish()
    assert run.entry.settled


# --- the key ---


@pytest.mark.parametrize("with_budget", [True, False])
def test_a_key_whose_kind_was_edited_is_refused(tmp_path: Path, with_budget: bool) -> None:
    budget = Ledger(tmp_path / "books.sqlite").set_budget("people", epsilon=50.0, delta=1e-2)
    options: dict[str, Any] = {"budget": budget} if with_budget else {}
    train(tmp_path / "run", **options)
    key = tmp_path / "run" / "key"
    text = key.read_text(encoding="ascii")
    for other in (
        text.replace("secret", "reproducible"),
        text.replace("secret", "1"),
        text[:-3] + "\n",
        text.replace(text[25], "g", 1),
        "\0" * len(text),
        "",
    ):
        key.write_text(other, encoding="ascii")
        with pytest.raises(ValueError, match="another file or an edited key; remove the"):
            train(tmp_path / "run", resume=True, **options)
    key.write_text(text, encoding="ascii")
    train(tmp_path / "run", resume=True, **options)


def test_a_key_that_is_no_secret_is_not_charged(tmp_path: Path) -> None:
    budget = Ledger(tmp_path / "books.sqlite").set_budget("people", epsilon=50.0, delta=1e-2)
    train(tmp_path / "run", budget=budget)
    (tmp_path / "run" / "key").unlink()
    Rng.fixed(0).write(tmp_path / "run" / "key")
    with pytest.raises(Refused, match=r"a secret key with a budget, got Rng\.fixed"):
        train(tmp_path / "run", budget=budget, resume=True)


@pytest.mark.parametrize("content", [b"", bytes(120)])
def test_a_run_that_is_over_needs_no_key(tmp_path: Path, content: bytes) -> None:
    """Killed while its key was being destroyed."""
    run = train(tmp_path / "run")
    run.finish()
    (tmp_path / "run" / "key").write_bytes(content)
    again = train(tmp_path / "run", resume=True)
    assert list(again) == []
    assert not (tmp_path / "run" / "key").exists()
    assert again.guarantee.epsilon == run.guarantee.epsilon == math.inf  # of no step


def test_a_seed_stays_no_secret_when_its_run_is_over(tmp_path: Path) -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = (torch.ones(40, 3),)
    folder = tmp_path / "run"
    hg.train(net, optimizer, data, plan=plan(), rng=Rng.fixed(0), folder=folder).finish()
    assert train(folder, resume=True).guarantee.epsilon == float("inf")


# --- copies, and what does not fit ---


def test_a_copied_folder_draws_other_batches_and_is_charged_for_them(tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = train(tmp_path / "moved", resume=True)
    assert moved._memory.sampling.name == run._memory.sampling.name
    assert moved.guarantee.charges == ()
    copy = train(tmp_path / "copy", resume=True)
    assert copy._memory.sampling.name != run._memory.sampling.name
    assert [charge.epsilon for charge in copy.guarantee.charges] == [plan().epsilon]
    again = train(tmp_path / "copy", resume=True)
    assert again._memory.sampling.name == copy._memory.sampling.name
    assert len(again.guarantee.charges) == 1


def test_a_run_without_its_ledger_is_said(tmp_path: Path) -> None:
    train(tmp_path / "run")._memory.entry._file.close()  # type: ignore[union-attr]
    for path in (tmp_path / "run").glob("ledger.sqlite*"):
        path.unlink()
    before = tree(tmp_path)
    with pytest.raises(Refused, match="expected the ledger of the run at"):
        train(tmp_path / "run", resume=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"entry": 3}, "entry"),
        ({"keep": None}, "keep"),
        ({"reproducible": 1}, "reproducible"),
        ({"step": 10**9}, "run"),
        ({"step": -1}, "run"),
        ({"taken": 5}, "run"),
        ({"step": True}, "run"),
        ({"step": "1"}, "run"),
    ],
)
def test_a_checkpoint_that_cannot_be_so_is_refused(
    tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    train(tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.safetensors"
    state = checkpoint.read(path)
    place = state["run"] if name == "run" else state
    place.update(change)
    checkpoint.write(path, state)
    with pytest.raises(Refused, match=f"got one with invalid {name}"):
        train(tmp_path / "run", resume=True)


def test_another_model_is_refused_before_the_run_is_taken_over(tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = (torch.ones(40, 4),)
    with pytest.raises(Refused, match="expected the same kind of model"):
        hg.train(
            net,
            optimizer,
            data,
            plan=plan(),
            rng=Rng.from_os(),
            folder=tmp_path / "run",
            resume=True,
        )
    run.save()


def test_checkpoints_grow_by_a_few_bytes_with_each_reading(tmp_path: Path) -> None:
    run = train(tmp_path / "run", chosen=plan(metrics=hg.run.metrics.Metrics()))
    names = run.plan.metrics.names  # type: ignore[union-attr]
    sizes = []
    for count in (1000, 3000):
        run.readings = [
            hg.run.metrics.Reading(step, dict.fromkeys(names, step / 7)) for step in range(count)
        ]
        run.save()
        sizes.append((tmp_path / "run" / "checkpoint.safetensors").stat().st_size)
    assert (sizes[1] - sizes[0]) / 2000 == 8 * (1 + len(names))
    again = train(tmp_path / "run", chosen=run.plan, resume=True)
    assert again.readings == run.readings
