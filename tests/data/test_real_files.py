"""The published files themselves, where HUSHGRAD_DATA names them, and the digits."""

import os
from typing import Any

import pytest
import torch

from hushgrad.data import DATASETS, Split, digits

real = pytest.mark.skipif("HUSHGRAD_DATA" not in os.environ, reason="HUSHGRAD_DATA is not set")


def counts(split: Split[Any]) -> tuple[list[int], list[int]]:
    """Records of each class, to train and to test on."""
    train, test = (torch.bincount(labels).tolist() for _, labels in (split.train, split.test))
    return train, test


@real
@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        (
            "mnist",
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
            [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
        ),
        ("fashion-mnist", [6000] * 10, [1000] * 10),
        ("cifar10", [5000] * 10, [1000] * 10),
    ],
)
def test_image_files_have_the_published_sizes_and_labels(
    name: str, train: list[int], test: list[int]
) -> None:
    split = DATASETS[name]()
    shape = (3, 32, 32) if name == "cifar10" else (1, 28, 28)
    assert counts(split) == (train, test)
    for (images, labels), expected in ((split.train, train), (split.test, test)):
        assert images.shape == (sum(expected), *shape) and len(labels) == len(images)
        assert images.dtype == torch.float32 and labels.dtype == torch.int64
        assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert len(split.classes) == 10 and split.preparation == "pixels ÷ 255"


@real
@pytest.mark.parametrize(
    ("name", "features", "train", "test"),
    [
        ("a9a", 123, [24720, 7841], [12435, 3846]),
        ("ijcnn1", 22, [45137, 4853], [82989, 8712]),
    ],
)
def test_table_files_have_the_published_rows(
    name: str, features: int, train: list[int], test: list[int]
) -> None:
    split = DATASETS[name]()
    assert counts(split) == (train, test)
    assert [len(part[0]) for part in (split.train, split.test)] == [sum(train), sum(test)]
    assert split.train[0].shape[1] == split.test[0].shape[1] == features
    assert len(split.classes) == 2
    if name == "a9a":
        # 14 is a public constant: the number of attributes of a census record.
        assert set(split.train[0].unique().tolist()) == {0.0, 1.0}
        assert max(float(part[0].sum(1).max()) for part in (split.train, split.test)) == 14


@real
def test_sst2_has_the_published_sentences() -> None:
    split = DATASETS["sst2"]()
    assert counts(split) == ([29780, 37569], [428, 444])
    assert split.train[0][0] == "hide new secretions from the parental units "
    assert len(split.train[0]) == 67_349 and len(split.test[0]) == 872


@real
def test_e2e_has_the_published_pairs() -> None:
    split = DATASETS["e2e"]()
    parts = (split.train, split.validation, split.test)
    assert [(len(a), len(b)) for a, b in parts] == [(n, n) for n in (42_061, 4_672, 4_693)]
    assert len(set(split.train[0])) == 4_862
    assert sum("\n" in text for text in split.train[1]) == 2
    assert all("name[" in meaning for meaning in split.test[0])


def test_digits_are_there_without_files() -> None:
    """The embedded default: the split is by position, and every class is on both sides."""
    split = digits()
    train, test = counts(split)
    assert (sum(train), sum(test)) == (1437, 360) and min(train) > 140 and min(test) > 30
    images, labels = split.train
    assert images.shape == (1437, 1, 8, 8) and images.dtype == torch.float32
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert labels[:10].tolist() == list(range(10))
    assert torch.equal(digits().test[0], split.test[0])
