"""MNIST and its successors, in compressed IDX files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hushgrad.data.files import PublishedFiles, decompress
from hushgrad.data.images import Images, unit_pixels
from hushgrad.data.split import Split

MNIST = PublishedFiles(
    name="MNIST",
    folder="mnist",
    source="http://yann.lecun.com/exdb/mnist/",
    sha256={
        "train-images-idx3-ubyte.gz": (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
        ),
        "train-labels-idx1-ubyte.gz": (
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
        ),
        "t10k-images-idx3-ubyte.gz": (
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
        ),
        "t10k-labels-idx1-ubyte.gz": (
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
        ),
    },
)

FASHION_MNIST = PublishedFiles(
    name="Fashion-MNIST",
    folder="fashion-mnist",
    source="https://github.com/zalandoresearch/fashion-mnist",
    sha256={
        "train-images-idx3-ubyte.gz": (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
        ),
        "train-labels-idx1-ubyte.gz": (
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
        ),
        "t10k-images-idx3-ubyte.gz": (
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
        ),
        "t10k-labels-idx1-ubyte.gz": (
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
        ),
    },
)

DIGITS = tuple("0123456789")

CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


def mnist(root: Path | None = None) -> Split[Images]:
    """Load MNIST: 60 000 and 10 000 grey images of 28 × 28 pixels, ten digits.

    Args:
        root: the folder of the data sets; if None, the one that `HUSHGRAD_DATA` names.

    Raises:
        ValueError: if a file is missing, or is not the published one.

    Example:
        >>> split = mnist()  # doctest: +SKIP
        >>> split.train[0].shape  # doctest: +SKIP
        torch.Size([60000, 1, 28, 28])

    Reference: LeCun et al. 1998, Gradient-based Learning Applied to Document Recognition.
    """
    return from_idx(MNIST, DIGITS, root=root)


def fashion_mnist(root: Path | None = None) -> Split[Images]:
    """Load Fashion-MNIST: 60 000 and 10 000 grey images of 28 × 28 pixels, ten kinds of clothes.

    Args:
        root: the folder of the data sets; if None, the one that `HUSHGRAD_DATA` names.

    Raises:
        ValueError: if a file is missing, or is not the published one.

    Example:
        >>> fashion_mnist().classes[9]  # doctest: +SKIP
        'Ankle boot'

    Reference: Xiao, Rasul and Vollgraf 2017, Fashion-MNIST.
    """
    return from_idx(FASHION_MNIST, CLOTHES, root=root)


def from_idx(
    files: PublishedFiles, classes: tuple[str, ...], *, root: Path | None
) -> Split[Images]:
    """Load a data set whose four files are in MNIST's format."""

    def part(prefix: str) -> Images:
        images_file = f"{prefix}-images-idx3-ubyte.gz"
        labels_file = f"{prefix}-labels-idx1-ubyte.gz"
        pixels = parse_idx(files.read(images_file, root=root), file=images_file, dimensions=3)
        labels = parse_idx(files.read(labels_file, root=root), file=labels_file, dimensions=1)
        if len(pixels) != len(labels):
            raise ValueError(
                f"expected a label for each of the {len(pixels)} images of {images_file}, got "
                f"{len(labels)}; take both files from {files.source}"
            )
        return unit_pixels(pixels[:, None]), torch.from_numpy(labels.astype(np.int64))

    return Split(
        name=files.name,
        source=files.source,
        train=part("train"),
        test=part("t10k"),
        preparation="pixels ÷ 255",
        classes=classes,
    )


def parse_idx(content: bytes, *, file: str, dimensions: int) -> NDArray[np.uint8]:
    """Return the array in a compressed IDX file: 0, 0, type 8, dimensions, their sizes, bytes."""
    raw = decompress(content, gzip.decompress, file=file)
    header = 4 + 4 * dimensions
    if len(raw) < header or raw[:4] != bytes((0, 0, 8, dimensions)):
        raise ValueError(
            f"expected {file} to start with 0 0 8 {dimensions} and {dimensions} sizes, got "
            f"{raw[:4].hex(' ') or 'nothing'}; download it again"
        )
    shape = [int.from_bytes(raw[4 * i : 4 * i + 4], "big") for i in range(1, dimensions + 1)]
    values = np.frombuffer(raw, np.uint8)[header:]
    if values.size != np.prod(shape):
        raise ValueError(
            f"expected {np.prod(shape)} bytes after the header of {file}, got {values.size}; "
            "download it again"
        )
    return values.reshape(shape)
