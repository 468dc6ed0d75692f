"""Checkpoints: what goes in comes out, whole or not at all, and no code runs."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hushgrad import Refused, checkpoint

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
    with pytest.raises(OSError, match="no space"):
        checkpoint.write(path, {"n": 2})
    assert checkpoint.read(path) == {"n": 1}


def test_what_is_no_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"got a function at state\['a'\]\[1\]"):
        checkpoint.write(tmp_path / "c", {"a": [0, lambda: 0]})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"x" * 100])
def test_a_file_that_is_no_checkpoint_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(Refused, match=r"expected a checkpoint in .*use an older copy"):
        checkpoint.read(tmp_path / "c")


def test_a_checkpoint_of_another_version_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "_VERSION", 7)
    checkpoint.write(tmp_path / "c", {})
    monkeypatch.undo()
    with pytest.raises(Refused, match=r"version 1 in .*, got 7"):
        checkpoint.read(tmp_path / "c")
