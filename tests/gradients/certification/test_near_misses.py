"""Gradients that are off by a ReLU's flip are compared at other weights; all else is refused."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import private
from torch import Tensor, nn
from uses import loss_of

from hushgrad import Refused
from hushgrad.gradients import certificate_for, per_sample, traced

CERTIFY = importlib.import_module("hushgrad.gradients.certification.certify")


class Flips:
    """Make `compare` report gradients that differ by this much at some points, as a flip would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: nn.Linear) -> None:
        self.points: list[float] = []  # each is known by a weight
        self.at: frozenset[int] = frozenset()
        self.by = 0.0
        plain = CERTIFY.compare

        def compare(gradients: Any, oracle: Any, evidence: Any) -> dict[str, float]:
            here = model.weight[0, 0].item()
            if here not in self.points:
                self.points.append(here)
            if self.points.index(here) in self.at:
                return {"bias": 3e-4, "weight": self.by}
            return plain(gradients, oracle, evidence)

        monkeypatch.setattr(CERTIFY, "compare", compare)

    def begin(self, at: set[int], by: float) -> None:
        """Count points from here on."""
        self.points, self.at, self.by = [], frozenset(at), by


@pytest.mark.parametrize(
    ("missed", "by", "points"), [(2, 4e-4, 3), (3, 4e-4, 3), (1, 0.5, 1), (1, math.nan, 1)]
)
def test_a_near_miss_is_looked_at_from_other_points(
    missed: int, by: float, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong by much, or at every point, is refused."""
    model = nn.Linear(4, 3)
    flips = Flips(monkeypatch, model)
    flips.begin(at=set(range(missed)), by=by)
    if missed < points:
        certificate_for(loss_of(model), private(model), torch.randn(8, 4), form=traced)
    else:
        with pytest.raises(Refused, match=f"of weight differs .* by {by:.2g} of its norm"):
            certificate_for(loss_of(model), private(model), torch.randn(8, 4), form=traced)
    assert len(flips.points) == points


@pytest.mark.parametrize(
    ("missed", "by", "points"), [(2, 4e-4, 3), (3, 4e-4, 3), (1, 0.5, 1), (1, math.nan, 1)]
)
def test_a_later_test_begins_at_the_parameters_as_they_are(
    missed: int, by: float, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = nn.Linear(4, 3), torch.randn(8, 4)
    loss, flips = loss_of(model), Flips(monkeypatch, model)
    per_sample(loss, private(model), batch, form=traced)
    flips.begin(at=set(range(missed)), by=by)
    if missed < points:
        per_sample(loss, private(model), batch, form=traced)
    else:
        with pytest.raises(Refused, match=f"of weight differs .* by {by:.2g} of its norm"):
            per_sample(loss, private(model), batch, form=traced)
    assert len(flips.points) == points and flips.points[0] == model.weight[0, 0].item()


def test_records_that_meet_on_the_way_back_are_no_near_miss() -> None:
    """Though it be by little, and at no other point: their bits tell."""
    model, switch = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), SimpleNamespace(on=False)
    place = model[0].weight.data_ptr()

    def loss(x: Tensor) -> Tensor:
        h = model[0](x).tanh()
        if switch.on and model[0].weight.data_ptr() == place:
            h.register_hook(lambda gradient: gradient + 0.02 * gradient.flip(0))
        return model[1](h).square().sum(1)

    batch = torch.randn(8, 4)
    per_sample(loss, private(model), batch, form=traced)
    switch.on = True
    with pytest.raises(Refused, match="depends on other records"):
        per_sample(loss, private(model), batch, form=traced)
