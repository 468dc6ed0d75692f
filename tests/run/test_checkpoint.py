"""Checkpoints: what goes in comes out, whole or not at all, and no code runs."""

from __future__ import annotations

import errno
import math
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hushgrad import Refused
from hushgrad.files import open_atomically, write_text
from hushgrad.run import checkpoint

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers()
trees = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(tree=trees)
def test_nested_state_comes_back_as_it_was(tree, tmp_path_factory) -> None:
    path = tmp_path_factory.getbasetemp() / "state"
    checkpoint.write(path, {"tree": tree})
    found = checkpoint.read(path)["tree"]
    assert found == tree and type(found) is type(tree)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_tensors_keep_their_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    x = (10 * torch.randn(3, 4, dtype=torch.float64)).to(dtype)
    state = {"x": x, "view": x.t(), "scalar": x[0, 0], "none": x[:0], "inf": math.inf}
    checkpoint.write(tmp_path / "c", state)
    found = checkpoint.read(tmp_path / "c")
    assert found["inf"] == math.inf
    for name in ("x", "view", "scalar", "none"):
        assert found[name].dtype == dtype
        assert torch.equal(found[name], state[name])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam])
def test_optimizers_and_schedules_go_on_as_they_were(kind, tmp_path: Path) -> None:
    def made():
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([p], lr=0.1)
        return p, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def step(p, optimizer, schedule, times):
        for _ in range(times):
            p.grad = p.detach() ** 2
            optimizer.step()
            schedule.step()

    one = made()
    step(*one, 3)
    state = {"p": one[0], "optimizer": one[1].state_dict(), "schedule": one[2].state_dict()}
    checkpoint.write(tmp_path / "c", state)
    step(*one, 4)
    other = made()
    found = checkpoint.read(tmp_path / "c")
    other[0].data.copy_(found["p"])
    other[1].load_state_dict(found["optimizer"])
    other[2].load_state_dict(found["schedule"])
    step(*other, 4)
    assert torch.equal(one[0], other[0])


def test_a_write_that_fails_leaves_the_older_checkpoint(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "c"
    checkpoint.write(path, {"n": 1})

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Refused, match="no space left on device; make sure that its folder"):
        checkpoint.write(path, {"n": 2})
    assert checkpoint.read(path) == {"n": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"got a function at state\['a'\]\[1\]"):
        checkpoint.write(tmp_path / "c", {"a": [0, lambda: 0]})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"x" * 100, bytes(9), b"\xff" * 99])
def test_a_file_that_is_no_checkpoint_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(Refused, match=r"expected a checkpoint in .*put an older copy"):
        checkpoint.read(tmp_path / "c")


def test_a_checkpoint_of_another_version_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "_VERSION", 7)
    checkpoint.write(tmp_path / "c", {})
    monkeypatch.undo()
    with pytest.raises(Refused, match=r"version 2 in .*, got 7"):
        checkpoint.read(tmp_path / "c")


def test_no_checkpoint_and_a_folder_in_its_place_are_named(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "c", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(Refused, match=f"{said}.*; name the folder of a run"):
            checkpoint.read(path)
    assert checkpoint.stamp(tmp_path / "c") == b""


# --- damage ---


def written(path: Path) -> bytes:
    weights = {"weight": torch.randn(8, 4), "bias": torch.zeros(4, dtype=torch.float64)}
    checkpoint.write(path, {"step": 3, "model": weights, "name": "a"})
    return path.read_bytes()


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    whole, chance = written(tmp_path / "c"), random.Random(0)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        (tmp_path / "c").write_bytes(damaged)
        with pytest.raises(Refused, match="damaged or of another kind; put an older copy"):
            checkpoint.read(tmp_path / "c")
    (tmp_path / "c").write_bytes(whole)
    assert checkpoint.read(tmp_path / "c")["step"] == 3


@given(data=st.data())
def test_any_damage_is_refused(data, tmp_path_factory) -> None:
    """Cut, doubled, overwritten, moved: one refusal, and no other error."""
    path = tmp_path_factory.getbasetemp() / "damaged"
    whole = written(path)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    between = data.draw(st.binary(max_size=40) | st.just(whole[start:stop][::-1]))
    damaged = whole[:start] + between + whole[stop:]
    path.write_bytes(damaged)
    if damaged == whole:
        checkpoint.read(path)
    else:
        with pytest.raises(Refused, match="damaged or of another kind"):
            checkpoint.read(path)


def test_a_stamp_tells_one_checkpoint_from_the_next(tmp_path: Path) -> None:
    stamps = []
    for n in (1, 2):
        checkpoint.write(tmp_path / "c", {"n": n})
        stamps += [checkpoint.stamp(tmp_path / "c") for _ in range(2)]
    assert stamps[0] == stamps[1] != stamps[2] == stamps[3]
    assert len(stamps[0]) == 64


def test_everything_that_is_no_tensor_may_be_large(tmp_path: Path) -> None:
    """A header of the safetensors format may not be longer than 100 MB; no state is in it."""
    checkpoint.write(tmp_path / "c", {"text": "x" * 1_000_000})
    assert checkpoint._header_size((tmp_path / "c").read_bytes()) < 1000
    assert checkpoint.read(tmp_path / "c")["text"] == "x" * 1_000_000


# --- files ---


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_file_is_written_whole_or_not_at_all(call: str, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "f"
    write_text(path, "old")

    def full(*arguments) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write() -> None:
        with open_atomically(path) as file:
            file.write(b"new")
            if call == "write":
                full()

    if call != "write":
        monkeypatch.setattr(os, call, full)
    with pytest.raises(Refused, match=r"expected to write .*f, got: No space left on device"):
        write()
    monkeypatch.undo()
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "new"


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"No such file or directory; make sure that its folder"):
        write_text(tmp_path / "gone" / "f", "x")
