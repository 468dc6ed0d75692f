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
    """a9a, the UCI Adult census: 32 561 and 16 281 rows of 123 binary features, at most 14 set."""
    return from_libsvm(A9A, 123, classes=("at most 50K", "above 50K"), root=root)


def ijcnn1(root: Path | None = None) -> Split[LabelledTable]:
    """ijcnn1, of the IJCNN 2001 challenge: 49 990 and 91 701 rows of 22 features."""
    return from_libsvm(IJCNN1, 22, classes=("-1", "+1"), root=root)


def from_libsvm(
    files: PublishedFiles, features: int, *, classes: tuple[str, str], root: Path | None
) -> Split[LabelledTable]:
    """A data set of two classes in two files, `NAME` and `NAME.t`, compressed by bzip2 or not."""

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
    """The table in `text`: for each line a label, −1 or +1, and index:value pairs from 1."""
    from sklearn.datasets import load_svmlight_file  # takes a second: only who needs it waits

    try:
        sparse, labels = load_svmlight_file(
            io.BytesIO(text), n_features=features, dtype=np.float32, zero_based=False
        )
    except ValueError as e:
        raise ValueError(
            f"expected lines of a label and index:value pairs in {file}, with {features} features, "
            f"got: {e}; get it again"
        ) from None
    if not np.isin(labels, (-1, 1)).all():
        raise ValueError(
            f"expected labels -1 and +1 in {file}, got {np.unique(labels)[:5]}; get it again"
        )
    return torch.from_numpy(sparse.toarray()), torch.from_numpy((labels > 0).astype(np.int64))


def _text(files: PublishedFiles, file: str, root: Path | None) -> bytes:
    """The verified text of a file, compressed or not."""
    if files.path(file, root=root).exists():
        return files.read(file, root=root)
    path = files.path(f"{file}.bz2", root=root)
    text = decompress(files.read_unverified(path), bz2.decompress, file=path.name)
    return files.verify(file, text, path=path)
