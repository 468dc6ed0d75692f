"""Faults of a batch or a model are named as what they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compare import private
from torch import Tensor, nn

from hushgrad import Refused
from hushgrad.gradients import certificate_for, per_sample


def classified(layer: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(layer(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("label", [4, -1, 4711])
@pytest.mark.parametrize("function", [per_sample, certificate_for])
def test_a_label_outside_of_the_range(label: int, function) -> None:
    layer, batch = nn.Linear(3, 4), (torch.randn(8, 3), torch.full((8,), label))
    with pytest.raises(Refused, match="label or index is outside of the model's range") as caught:
        function(lambda b: classified(layer, b), private(layer), batch)
    assert str(label) not in str(caught.value)


def test_a_label_outside_of_the_range_at_a_later_step() -> None:
    layer, x, y = nn.Linear(3, 4), torch.randn(32, 3), torch.randint(4, (32,))

    def step(y: Tensor) -> None:
        per_sample(lambda b: classified(layer, b), private(layer), (x, y))

    step(y)
    step(y)
    y[7] = 4
    with pytest.raises(Refused, match="label or index is outside"):
        step(y)


def test_an_index_outside_of_its_table() -> None:
    table = nn.Embedding(5, 3)
    with pytest.raises(Refused, match="below the number of rows of their table"):
        per_sample(lambda b: table(b).sum((1, 2)), private(table), torch.full((8, 2), 9))


def test_tensors_without_values() -> None:
    layer, batch = nn.Linear(3, 4), (torch.randn(8, 3), torch.randint(4, (8,)))
    bare = nn.Linear(3, 4, device="meta")
    with pytest.raises(Refused, match="the parameter weight is on the meta device"):
        per_sample(lambda b: classified(bare, b), private(bare), batch)
    with pytest.raises(Refused, match="got a tensor on the meta device; load the records on cpu"):
        per_sample(lambda b: classified(layer, b), private(layer), (batch[0].to("meta"), batch[1]))


def test_statistics_over_the_batch_that_are_nan_for_equal_records() -> None:
    layer = nn.Linear(3, 4)

    def loss(x: Tensor) -> Tensor:
        return layer((x - x.mean(0)) / x.std(0)).square().sum(1)

    with pytest.raises(Refused, match=r"depends on other records: among copies of itself"):
        per_sample(loss, private(layer), torch.randn(8, 3))


def test_data_without_a_finite_record_are_named_so() -> None:
    layer = nn.Linear(3, 4)
    with pytest.raises(Refused, match="has a finite loss and gradient; clean"):
        per_sample(lambda x: layer(x / 0).sum(1), private(layer), torch.randn(8, 3))
