"""The tests' own type checker: it checks types and shapes, and is in force."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

import checker
from hushgrad.bits import digests
from hushgrad.types import Bounded

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
from jaxtyping import Float
from torch import Tensor


def scaled(x: float, factor: float) -> float:
    return x * factor


def paired(x: Float[Tensor, "batch d"], y: Float[Tensor, "batch"]) -> Float[Tensor, "batch"]:
    return y


def halved(x: Float[Tensor, "batch d"]) -> Float[Tensor, "batch"]:
    return x[: len(x) // 2, 0]


@dataclass
class Pair:
    x: Float[Tensor, "batch d"]
    y: Float[Tensor, "batch"]

    def size(self, more: int) -> int:
        return len(self.x) + more
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "checked_example.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    hooks = sys.meta_path[:]
    checker.check("checked_example")
    import checked_example

    yield checked_example
    sys.meta_path[:] = hooks
    del sys.modules["checked_example"]


def test_types_are_checked(package: ModuleType) -> None:
    assert package.scaled(2, 1.5) == 3.0
    with pytest.raises(BeartypeCallHintViolation):
        package.scaled("2", 3)
    with pytest.raises(BeartypeCallHintViolation):
        package.Pair(torch.zeros(3, 2), torch.zeros(3)).size("1")


def test_shapes_are_checked_with_one_another(package: ModuleType) -> None:
    assert len(package.paired(torch.zeros(3, 2), torch.zeros(3))) == 3
    for make in (package.paired, package.Pair):
        with pytest.raises(TypeError, match="batch"):
            make(torch.zeros(3, 2), torch.zeros(4))
    with pytest.raises(TypeError, match="batch"):
        package.halved(torch.zeros(4, 2))


def test_the_library_is_checked() -> None:
    with pytest.raises(BeartypeCallHintViolation):
        digests(3)
    with pytest.raises(BeartypeCallHintViolation):
        Bounded(sum={}, l2="1")
