"""Losses and batches of a wrong shape or kind are refused, and told what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compare import private
from torch import Tensor, nn

from hushgrad import Refused
from hushgrad.gradients import auto, dense, loop, per_sample

FORMS = pytest.mark.parametrize("form", [auto, dense, loop], ids=["auto", "dense", "loop"])

SHAPES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "scalar": (lambda h: h.sum(), r"float32 tensor of 0 dimensions, as after a mean"),
    "mean": (lambda h: h.mean(), r"float32 tensor of 0 dimensions, as after a mean"),
    "too short": (lambda h: h.sum(1)[1:], r"tensor of 1 dimension, not as long as the batch"),
    "too long": (lambda h: h.flatten(), r"tensor of 1 dimension, not as long as the batch"),
    "two dimensions": (lambda h: h, r"tensor of 2 dimensions, as long as the batch"),
    "a column": (lambda h: h.sum(1, keepdim=True), r"tensor of 2 dimensions, as long as the batch"),
    "whole numbers": (
        lambda h: h.sum(1).long(),
        r"int64 tensor of 1 dimension, as long as the batch",
    ),
    "a list": (lambda h: list(h.sum(1)), "got a list"),
    "a number": (lambda h: float(h.detach().sum()), "got a float"),
    "nothing": (lambda h: None, "got a NoneType"),
}


@FORMS
@pytest.mark.parametrize(("reduce", "came"), SHAPES.values(), ids=SHAPES)
def test_a_loss_that_is_not_one_value_for_each_record_is_refused(
    reduce: Callable[[Tensor], Any], came: str, form: Any
) -> None:
    layer = nn.Linear(3, 5)
    message = rf"one loss for each record.*{came}.*; use reduction='none'"
    with pytest.raises(Refused, match=message):
        per_sample(lambda x: reduce(layer(x)), private(layer), torch.randn(8, 3), form=form)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(8, 3), torch.zeros(7)), "tensors of different lengths"),
        ({"x": torch.zeros(8, 3), "t": torch.zeros(())}, "a tensor without dimensions"),
        (torch.zeros(()), "a tensor without dimensions"),
        ([1, 2, 3], "no tensor in a list"),
        ({}, "no tensor in a dict"),
        (None, "no tensor in a NoneType"),
    ],
    ids=["uneven", "0-dim among others", "0-dim", "list", "dict", "None"],
)
def test_a_batch_without_records_in_front_is_refused(batch: Any, message: str) -> None:
    layer = nn.Linear(3, 5)
    with pytest.raises(ValueError, match=f"in their first dimension, got {message}.*to the front"):
        per_sample(lambda x: layer(x).sum(1), private(layer), batch)


def test_an_array_in_the_batch_is_refused() -> None:
    layer = nn.Linear(3, 1)
    batch = {"x": torch.randn(8, 3), "y": np.zeros(8)}
    with pytest.raises(Refused, match=r"NumPy array in it.*torch\.from_numpy"):
        per_sample(lambda b: layer(b["x"])[:, 0], private(layer), batch)
