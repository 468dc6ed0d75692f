"""A certificate serves the loss it was made for: no other, and that one at every step."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hushgrad import Refused
from hushgrad.gradients import per_sample


class Counting(nn.Linear):
    """A layer that counts its forward passes; a certification takes more than one."""

    def __init__(self) -> None:
        super().__init__(3, 5)
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return super().forward(x)


def passes(layer: Counting, losses: list[Callable[[Tensor], Tensor]]) -> list[int]:
    """How many passes each of the losses takes, one after the other."""
    counts = []
    for loss in losses:
        before = layer.calls[0]
        per_sample(loss, dict(layer.named_parameters()), torch.randn(8, 3))
        counts.append(layer.calls[0] - before)
    return counts


# Steps 1, 2 and 4 after a certification are tested again, step 3 is not.
STEPS = 4


def _annealed(layer: Counting, step: int) -> Callable[[Tensor], Tensor]:
    weight = 0.5 + step / 10
    return lambda x: weight * layer(x).square().sum(1)


def _anew(layer: Counting, step: int) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x).square().sum(1)


def _by_parts(layer: Counting, step: int) -> Callable[[Tensor], Tensor]:
    def energy(power: int, x: Tensor) -> Tensor:
        return layer(x).pow(power).sum(1)

    return functools.partial(energy, 2)


@pytest.mark.parametrize("make", [_annealed, _anew, _by_parts])
def test_a_loss_made_anew_is_certified_once(make: Callable[..., Any]) -> None:
    layer = Counting()
    counts = passes(layer, [make(layer, step) for step in range(STEPS)])
    assert counts[0] > 10
    assert counts[3] == 1


def test_a_whole_number_may_change_what_is_mixed() -> None:
    layer = nn.Linear(3, 5)

    def over(dim: int) -> Callable[[Tensor], Tensor]:
        return lambda x: layer(x).softmax(dim).square().sum(1)

    params = dict(layer.named_parameters())
    for _ in range(STEPS):
        per_sample(over(1), params, torch.randn(8, 3))
    with pytest.raises(Refused, match="depends on other records"):
        per_sample(over(0), params, torch.randn(8, 3))


DIMENSION = 1


def _over_a_global(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x).softmax(DIMENSION).square().sum(1)


def test_a_global_may_change_what_is_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(3, 5)
    params = dict(layer.named_parameters())
    for _ in range(STEPS):
        per_sample(_over_a_global(layer), params, torch.randn(8, 3))
    monkeypatch.setitem(globals(), "DIMENSION", 0)
    with pytest.raises(Refused, match="depends on other records"):
        per_sample(_over_a_global(layer), params, torch.randn(8, 3))


def test_the_same_code_around_another_function_is_another_loss() -> None:
    layer = nn.Linear(3, 5)
    params = dict(layer.named_parameters())

    def around(inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: inner(layer(x)).square().sum(1)

    for _ in range(STEPS):
        per_sample(around(lambda h: h - h.mean(1, True)), params, torch.randn(8, 3))
    with pytest.raises(Refused, match="depends on other records"):
        per_sample(around(lambda h: h - h.mean(0, True)), params, torch.randn(8, 3))


def test_a_certificate_does_not_outlive_its_parameters() -> None:
    """An id may pass to another object as soon as the first is gone."""
    for attempt in range(5):
        layer = nn.Linear(3, 5)
        mixing = attempt == 4

        def loss(x: Tensor, layer: nn.Module = layer, mixing: bool = mixing) -> Tensor:
            h = layer(x)
            return (h - h.mean(0) if mixing else h).square().sum(1)

        params = dict(layer.named_parameters())
        if mixing:
            with pytest.raises(Refused, match="depends on other records"):
                per_sample(loss, params, torch.randn(8, 3))
        else:
            per_sample(loss, params, torch.randn(8, 3))
        del layer, loss, params
        gc.collect()


def test_the_form_that_was_taken_is_told(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.Linear(3, 5)
    params = dict(layer.named_parameters())

    def loss(x: Tensor) -> Tensor:
        h = layer(x)
        return h.square().sum(1)

    with caplog.at_level("INFO", logger="hushgrad"):
        assert per_sample(loss, params, torch.randn(8, 3)).form == "traced"
    assert caplog.messages == [
        "certifying the model: its gradients are compared with those of single records",
        "certifying the form traced",
        "certified the form traced for 2 parameters",
    ]


@dataclass
class _Switched:
    """A loss with an attribute that is no field of it."""

    layer: nn.Module

    def __post_init__(self) -> None:
        self.mixing = False

    def __call__(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return (h - h.mean(0) if self.mixing else h).square().sum(1)


def test_an_attribute_that_is_no_field_of_a_loss_is_seen_to_change() -> None:
    layer = nn.Linear(3, 5)
    params, loss = dict(layer.named_parameters()), _Switched(layer)
    for _ in range(STEPS + 1):  # the next step is no step at which independence is tested anyway
        per_sample(loss, params, torch.randn(8, 3))
    loss.mixing = True
    with pytest.raises(Refused, match="depends on other records"):
        per_sample(loss, params, torch.randn(8, 3))
