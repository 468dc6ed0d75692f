"""Data sets that make several records at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collated import LONGEST, WORDS, N, first_batch, fixed, longest, right_aligned
from torch import Tensor

from hushgrad.types import Refused


class Together:
    """A data set that transforms all the records that are asked for at once."""

    def __init__(self, transform: Callable[[Tensor], Any]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([i])[0]

    def __getitems__(self, positions: list[int]) -> list[Any]:
        return list(self.transform([WORDS[i] for i in positions]))


@pytest.mark.parametrize("transform", [longest, right_aligned, lambda rows: longest(rows).float()])
def test_a_data_set_that_transforms_batches_is_refused(transform: Any) -> None:
    with pytest.raises(Refused, match="a data set that makes each record by itself"):
        first_batch(Together(transform), None)


def random_to_the_longest(rows: list[Tensor]) -> Tensor:
    padded = longest(rows).float()
    return padded + torch.rand(padded.shape)


def test_a_random_one_is_compared_by_its_shapes() -> None:
    with pytest.raises(Refused, match="a data set that makes each record by itself"):
        first_batch(Together(random_to_the_longest), None)
    first_batch(Together(lambda rows: fixed(rows) + torch.rand(len(rows), LONGEST)), None)
