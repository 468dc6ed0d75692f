"""A user's own loader: believed, unless torch's own samplers contradict it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from hushgrad.sampling import FullBatch, Poisson, Scheme, Shuffled, Stated, WithoutReplacement
from hushgrad.types import Refused

DATA: Dataset[Any] = torch.utils.data.TensorDataset(torch.arange(10))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **options)


def values(stated: Stated, steps: range) -> list[list[int]]:
    return [batch[0].tolist() for batch in stated.batches(num_records=10, steps=steps)]


def test_a_loader_is_gone_through_as_often_as_it_takes() -> None:
    stated = Stated([1, 2, 3], Poisson(0.1))
    assert list(stated.batches(num_records=10, steps=range(7))) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("shuffle", [False, True])
def test_shuffled_epochs_are_whole_passes(shuffle: bool) -> None:
    stated = Stated(loader(batch_size=4, shuffle=shuffle), Shuffled(4))
    batches = values(stated, range(7))
    assert len(batches) == 7
    for epoch in (batches[:3], batches[3:6]):
        assert sorted(value for batch in epoch for value in batch) == list(range(10))
    assert len(values(stated, range(3, 7))) == 4


def test_a_statement_says_whose_it_is() -> None:
    stated = Stated(loader(batch_size=4), Shuffled(4))
    assert stated.statement.endswith(", as stated by the user")


@pytest.mark.parametrize("scheme", [Poisson(0.4), WithoutReplacement(4), Shuffled(5), FullBatch()])
@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_in_disguise_are_refused(scheme: Scheme, shuffle: bool) -> None:
    with pytest.raises(Refused, match=r"expected the statement Shuffled\(4\) for a DataLoader"):
        Stated(loader(batch_size=4, shuffle=shuffle), scheme)


def test_drawing_with_replacement_is_refused() -> None:
    sampler = RandomSampler(range(10), replacement=True)
    with pytest.raises(Refused, match=r"got a DataLoader that draws with replacement; pass the"):
        Stated(loader(batch_size=4, sampler=sampler), Shuffled(4))


def test_short_epochs_are_refused() -> None:
    with pytest.raises(Refused, match=r"drop_last=True, whose epochs are shorter than accounted"):
        Stated(loader(batch_size=4, drop_last=True), Shuffled(4))
    stated = Stated([[torch.arange(4)]] * 2, Shuffled(4))
    with pytest.raises(Refused, match=r"expected 3 batches from each pass over the loader, got 2"):
        values(stated, range(5))


def test_a_pass_ends_with_the_epoch() -> None:
    """What a loader deals beyond it could be a record that the next epoch holds again."""
    stated = Stated([[torch.tensor([i])] for i in range(5)], Shuffled(4))
    assert values(stated, range(7)) == [[0], [1], [2], [0], [1], [2], [0]]


def test_an_epoch_is_not_entered_in_its_middle() -> None:
    stated = Stated(loader(batch_size=4), Shuffled(4))
    with pytest.raises(Refused, match=r"expected a first step that begins an epoch of 3 steps, g"):
        values(stated, range(2, 5))


def test_a_loader_that_cannot_start_anew_is_refused() -> None:
    def once() -> Iterator[int]:
        yield from (1, 2)

    batches = Stated(once(), Poisson(0.1)).batches(num_records=10, steps=range(3))
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(Refused, match=r"expected a batch from each pass .*, got 0; pass an itera"):
        next(batches)


def test_a_sampler_of_the_users_own_is_believed() -> None:
    batches = [[0, 3], [], [7]]
    stated = Stated(DataLoader(DATA, batch_sampler=batches[::2]), Poisson(0.1))
    assert values(stated, range(3)) == [[0, 3], [7], [0, 3]]
