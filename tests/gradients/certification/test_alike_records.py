"""Mixing is seen where all records of a batch are alike: they are varied."""

from __future__ import annotations

import pytest
import torch
from compare import private
from torch import Tensor, nn

from hushgrad import Refused
from hushgrad.gradients import per_sample


@pytest.mark.parametrize("value", [torch.ones(8, 3), torch.zeros(8, 3)], ids=["ones", "zeros"])
def test_mixing_is_seen_when_all_records_are_alike(value: Tensor) -> None:
    layer = nn.Linear(3, 5)

    def loss(x: Tensor) -> Tensor:
        h = layer(x)
        return (h - h.mean(0)).square().sum(1) + h.square().sum(1)

    with pytest.raises(Refused, match="depends on other records"):
        per_sample(loss, private(layer), value)


def test_mixing_is_seen_when_whole_numbers_are_alike() -> None:
    """One token for each record: there is nothing to shuffle within a record."""
    table = nn.Embedding(5, 3)

    def loss(index: Tensor) -> Tensor:
        h = table(index)
        return (h - h.mean(0)).square().sum(1) + h.square().sum(1)

    with pytest.raises(Refused, match=r"depends on other records|alike|differ"):
        per_sample(loss, private(table), torch.full((8,), 2))


MEETING = "depends on other records"

ALIKE = {
    "one of yes and no": torch.tensor([[True, False, True, True]]),
    "one of zeros": torch.zeros(1, 4, dtype=torch.long),
    "many of one": torch.full((8, 4), 3),
}


@pytest.mark.parametrize("batch", ALIKE.values(), ids=ALIKE)
def test_records_that_are_alike_are_varied(batch: Tensor) -> None:
    layer = nn.Linear(4, 1)

    def loss(x: Tensor) -> Tensor:
        h = layer(x.float())[:, 0]
        return (h - 0.9 * h.mean().detach()).square()

    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), batch)


def test_where_they_cannot_be_varied_the_next_batch_is_tested() -> None:
    """A loss that takes no other record than the first."""
    layer = nn.Linear(4, 1)
    taken = [torch.ones(4)]

    def loss(x: Tensor) -> Tensor:
        for row in x:
            if not any(torch.equal(row, known) for known in taken):
                raise IndexError("no such record")
        h = layer(x)[:, 0]
        return (h - 0.9 * h.mean().detach()).square()

    per_sample(loss, private(layer), torch.ones(8, 4))
    taken.append(torch.zeros(4))
    batch = torch.ones(8, 4)
    batch[::2] = 0
    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), batch)
