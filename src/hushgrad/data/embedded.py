"""Handwritten digits that come with scikit-learn: the default data set, without a download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hushgrad.data.images import Images
from hushgrad.data.split import Split

TRAIN = 1437
"""The number of training records: the first four fifths of 1797, a split that is public."""


def digits(root: Path | None = None) -> Split[Images]:
    """Load scikit-learn's digits: 1437 and 360 grey images of 8 × 8 pixels, in ten classes.

    Args:
        root: ignored; it is there because all loaders take it.

    Example:
        >>> digits().test[0].shape
        torch.Size([360, 1, 8, 8])

    Reference: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits.
    """
    from sklearn.datasets import load_digits  # imported here, as it takes a second

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels.astype(np.float32)).div_(16).reshape(-1, 1, 8, 8)
    classes = torch.from_numpy(labels.astype(np.int64))
    return Split(
        name="digits",
        source="https://archive.ics.uci.edu/dataset/80",
        train=(images[:TRAIN], classes[:TRAIN]),
        test=(images[TRAIN:], classes[TRAIN:]),
        preparation="pixels ÷ 16",
        classes=tuple("0123456789"),
    )
