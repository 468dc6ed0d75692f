"""a9a and ijcnn1, in LIBSVM's text format."""

from __future__ import annotations

import bz2
import io
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from hushgrad.data.files import PublishedFiles, decompress
from hushgrad.data.split import Split

LabelledTable = tuple[Float32[Tensor, "record feature"], Int64[Tensor, " record"]]
"""Features, and the class of each record."""

LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html"

# Checksums of the text: the same text can be compressed in more than one way.
A9A = PublishedFiles(
    name="a9a",
    folder="a9a",
    source=LIBSVM,
    sha256={
        "a9a": "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906",
        "a9a.t": "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9",
    },
)
IJCNN1 = PublishedFiles(
    name="ijcnn1",
    folder="ijcnn1",
    source=LIBSVM,
    sha256={
        "ijcnn1": "7fe291672c3fefe6a7e3c51529becd23f0e985ba05ffb8d53c9c648c1e91cc19",
        "ijcnn1.t": "e7b0bbd518641980dc322746c6bc59d019d3153934e6258e48f9d8cfae2c4bb8",
    },
)


def a9a(root: Path | None = None) -> Split[LabelledTable]:
    """Load a9a, the UCI Adult census: 32 561 and 16 281 rows of 123 binary features.

    At most 14 features of a row are 1, so its norm is at most √14.

    Args:
        root: the folder of the data sets; if None, the one that `HUSHGRAD_DATA` names.

    Raises:
        ValueError: if a file is missing, or is not the published one.

    Example:
        >>> a9a().train[0].shape  # doctest: +SKIP
        torch.Size([32561, 123])

    Reference: Platt 1998, Fast Training of Support Vector Machines; Becker and Kohavi 1996, Adult.
    """
    return from_libsvm(A9A, 123, classes=("at most 50K", "above 50K"), root=root)


def ijcnn1(root: Path | None = None) -> Split[LabelledTable]:
    """Load ijcnn1, from the IJCNN 2001 challenge: 49 990 and 91 701 rows of 22 features.

    Args:
        root: the folder of the data sets; if None, the one that `HUSHGRAD_DATA` names.

    Raises:
        ValueError: if a file is missing, or is not the published one.

    Example:
        >>> ijcnn1().train[0].shape  # doctest: +SKIP
        torch.Size([49990, 22])

    Reference: Prokhorov 2001, IJCNN 2001 Neural Network Competition.
    """
    return from_libsvm(IJCNN1, 22, classes=("-1", "+1"), root=root)


def from_libsvm(
    files: PublishedFiles, features: int, *, classes: tuple[str, str], root: Path | None
) -> Split[LabelledTable]:
    """Load a two-class data set from the files `NAME` and `NAME.t`, with or without bzip2."""

    def part(file: str) -> LabelledTable:
        return parse_libsvm(_text(files, file, root), features, file=file)

    return Split(
        name=files.name,
        source=files.source,
        train=part(files.name),
        test=part(f"{files.name}.t"),
        preparation="features as published, labels −1 and +1 as 0 and 1",
        classes=classes,
    )


def parse_libsvm(text: bytes, features: int, *, file: str) -> LabelledTable:
    """Parse lines of a label, −1 or +1, and index:value pairs with indices from 1."""
    from sklearn.datasets import load_svmlight_file  # imported here, as it takes a second

    try:
        sparse, labels = load_svmlight_file(
            io.BytesIO(text), n_features=features, dtype=np.float32, zero_based=False
        )
    except ValueError as e:
        raise ValueError(
            f"expected lines of a label and index:value pairs in {file}, with {features} features, "
            f"got: {e}; download it again"
        ) from None
    if not np.isin(labels, (-1, 1)).all():
        raise ValueError(
            f"expected labels -1 and +1 in {file}, got {np.unique(labels)[:5]}; download it again"
        )
    return torch.from_numpy(sparse.toarray()), torch.from_numpy((labels > 0).astype(np.int64))


def _text(files: PublishedFiles, file: str, root: Path | None) -> bytes:
    """Return the verified text of a file, which may be compressed."""
    if files.path(file, root=root).exists():
        return files.read(file, root=root)
    path = files.path(f"{file}.bz2", root=root)
    text = decompress(files.read_unverified(path), bz2.decompress, file=path.name)
    return files.verify(file, text, path=path)
