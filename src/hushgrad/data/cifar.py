"""CIFAR-10, in the files of its binary version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hushgrad.data.files import PublishedFiles
from hushgrad.data.images import Images, unit_pixels
from hushgrad.data.split import Split

CIFAR10 = PublishedFiles(
    name="CIFAR-10",
    folder="cifar10/cifar-10-batches-bin",
    source="https://www.cs.toronto.edu/~kriz/cifar.html",
    sha256={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
)

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
"""Bytes in a record: its class, then its red, green and blue pixels, row by row."""


def cifar10(root: Path | None = None) -> Split[Images]:
    """Load CIFAR-10: 50 000 and 10 000 colour images of 32 × 32 pixels, in ten classes.

    Args:
        root: the folder of the data sets; if None, the one that `HUSHGRAD_DATA` names.

    Raises:
        ValueError: if a file is missing, or is not the published one.

    Example:
        >>> split = cifar10()  # doctest: +SKIP
        >>> split.train[0].shape  # doctest: +SKIP
        torch.Size([50000, 3, 32, 32])

    Reference: Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images.
    """
    return from_binary(CIFAR10, root=root)


def from_binary(files: PublishedFiles, *, root: Path | None) -> Split[Images]:
    """Load a data set in CIFAR-10's binary format; `test_batch.bin` has the test records."""
    train = [file for file in files.sha256 if file != "test_batch.bin"]
    return Split(
        name=files.name,
        source=files.source,
        train=_images([_content(files, file, root) for file in train]),
        test=_images([_content(files, "test_batch.bin", root)]),
        preparation="pixels ÷ 255",
        classes=CLASSES,
    )


def _content(files: PublishedFiles, file: str, root: Path | None) -> bytes:
    content = files.read(file, root=root)
    if len(content) % RECORD:
        raise ValueError(
            f"expected records of {RECORD} bytes in {file}, got {len(content) % RECORD} bytes at "
            f"its end; download it again from {files.source}"
        )
    return content


def _images(contents: list[bytes]) -> Images:
    records = np.frombuffer(b"".join(contents), np.uint8).reshape(-1, RECORD)
    pixels = unit_pixels(records[:, 1:].reshape(-1, *SHAPE))
    return pixels, torch.from_numpy(records[:, 0].astype(np.int64))
