"""Handwritten digits that come with scikit-learn: the default, for which nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hushgrad.data.images import Images
from hushgrad.data.split import Split

TRAIN = 1437
"""The first four fifths of the 1797 records train. The split is by position, so it is public."""


def digits(root: Path | None = None) -> Split[Images]:
    """Digits: 1437 and 360 grey images of 8 × 8 pixels; `root` is not needed and not read."""
    from sklearn.datasets import load_digits  # takes a second, which other loaders need not wait

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
