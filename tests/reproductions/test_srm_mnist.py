"""Figure 2 of paper C: the methods' plans, and the whole of it on a few drawn images."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from hushgrad.algorithms import Sgd, Srm
from hushgrad.data.split import Split
from hushgrad.iterates import copy_values, distance
from hushgrad.launch.reproduction import StudySettings
from hushgrad_reproductions import srm_mnist


def stripes(records: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that are bright in the rows of their class."""
    labels = torch.arange(records) % 10
    images = 0.1 * torch.rand(records, 1, 28, 28)
    for i, label in enumerate(labels.tolist()):
        images[i, 0, 2 * label + 4 : 2 * label + 6] += 0.9
    return images, labels


def test_srm_has_three_tenths_of_the_iterations_and_a_difference_of_its_own() -> None:
    sgd, short, srm = (method.plan(60_000, 3.0) for method in srm_mnist.METHODS)
    assert isinstance(sgd.algorithm, Sgd) and isinstance(srm.algorithm, Srm)
    assert srm.steps / sgd.steps == pytest.approx(0.3, abs=0.001)
    assert isinstance(short.algorithm, Sgd) and short.steps == srm.steps
    assert all(2.9 < plan.epsilon <= 3 for plan in (sgd, short, srm))
    assert srm.algorithm.gamma == srm.algorithm.difference_clip.clip_norm  # γ = C2


def test_a_curve_ends_at_what_the_run_gives_out(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    data = stripes(200)
    model = srm_mnist.network()
    monkeypatch.setattr(srm_mnist, "network", lambda: model)
    seen: list[dict[str, torch.Tensor]] = []

    def noted(model: torch.nn.Module, test: object) -> float:
        seen.append(copy_values(dict(model.named_parameters())))
        return 0.0

    monkeypatch.setattr(srm_mnist, "_error", noted)
    method = srm_mnist.TunedMethod("DP-SGD", batch=20, passes=4.1, rate=0.5)
    curve = srm_mnist._train_with_curve(method.plan(200, 50.0), method.rate, data, data, 0)
    assert [steps for steps, _, _ in curve] == list(range(3, 42, 2))
    assert distance(seen[-1], copy_values(dict(model.named_parameters()))) == 0
    assert distance(seen[-2], seen[-1]) > 0


def test_the_network_takes_mnists_images() -> None:
    assert srm_mnist.network()(torch.rand(2, 1, 28, 28)).shape == (2, 10)


def test_the_whole_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    split = Split("mnist", "nowhere", stripes(200), stripes(50), "drawn")
    monkeypatch.setattr(srm_mnist, "mnist", lambda root: split)
    short = [dataclasses.replace(m, batch=50, passes=2) for m in srm_mnist.METHODS]
    monkeypatch.setattr(srm_mnist, "METHODS", short)
    monkeypatch.setattr(srm_mnist, "EPSILONS", (20.0, 50.0))
    srm_mnist.srm_mnist(StudySettings(tmp_path, seeds=1))
    assert {path.name for path in tmp_path.iterdir()} == {
        "srm-mnist.json",
        "srm-mnist.md",
        "srm-mnist.png",
    }
    table = json.loads((tmp_path / "srm-mnist.json").read_text())
    assert [row[:2] for row in table["rows"]] == [
        [epsilon, name]
        for epsilon in (20.0, 50.0)
        for name in ("DP-SGD", "DP-SGD, 0.3 × iterations", "DP-SRM")
    ]
    assert all(0 <= row[2][0] <= 100 for row in table["rows"])
