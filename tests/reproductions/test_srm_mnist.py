"""Figure 2 of paper C: the methods' plans, and the whole of it on a few drawn images."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from hushgrad.algorithms import Sgd, Srm
from hushgrad.data.split import Split
from hushgrad.reproductions import srm_mnist
from hushgrad.reproductions.study import Settings


def stripes(records: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that are bright in the rows of their class."""
    labels = torch.arange(records) % 10
    images = 0.1 * torch.rand(records, 1, 28, 28)
    for i, label in enumerate(labels.tolist()):
        images[i, 0, 2 * label + 4 : 2 * label + 6] += 0.9
    return images, labels


def test_srm_has_three_tenths_of_the_iterations_and_a_difference_of_its_own() -> None:
    sgd, srm = (method.plan(60_000, 3.0) for method in srm_mnist.METHODS)
    assert isinstance(sgd.algorithm, Sgd) and isinstance(srm.algorithm, Srm)
    assert srm.steps / sgd.steps == pytest.approx(0.3, abs=0.001)
    assert sgd.epsilon <= 3 and srm.epsilon <= 3
    assert srm.algorithm.gamma == srm.algorithm.difference_clip.clip_norm  # γ = C2


def test_the_network_takes_mnists_images() -> None:
    assert srm_mnist.network()(torch.rand(2, 1, 28, 28)).shape == (2, 10)


def test_the_whole_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    split = Split("mnist", "nowhere", stripes(200), stripes(50), "drawn")
    monkeypatch.setattr(srm_mnist, "mnist", lambda root: split)
    short = [dataclasses.replace(m, batch=50, passes=2) for m in srm_mnist.METHODS]
    monkeypatch.setattr(srm_mnist, "METHODS", short)
    monkeypatch.setattr(srm_mnist, "EPSILONS", (20.0, 50.0))
    srm_mnist.srm_mnist(Settings(tmp_path, seeds=1))
    assert {path.name for path in tmp_path.iterdir()} == {
        "srm-mnist.json",
        "srm-mnist.md",
        "srm-mnist.png",
    }
    table = json.loads((tmp_path / "srm-mnist.json").read_text())
    assert [row[:2] for row in table["rows"]] == [
        [epsilon, name] for epsilon in (20.0, 50.0) for name in ("DP-SGD", "DP-SRM")
    ]
    assert all(0 <= row[2][0] <= 100 for row in table["rows"])
