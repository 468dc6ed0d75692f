"""Small grey images, each prepared by itself: no image depends on another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hushgrad.data import Split

Images = Float[Tensor, "batch 1 height width"]
_LARGEST_SLANT = 1.0  # columns a row: an image without a slant of its own must not fall over
_FLAT = 0.05  # added to the spread of an image, so that an even one stays even


def prepare_split(
    split: Split[tuple[Tensor, Tensor]], prepare: Callable[[Images], Images], what: str
) -> Split[tuple[Tensor, Tensor]]:
    """The split with every image prepared, and with `what` was done in its notes.

    Args:
        split: training and test images with labels.
        prepare: from images to images, each by itself: one that looked at others would let a
            record change its neighbours before anything is clipped.
        what: what it does, in words.
    """
    train, test = ((prepare(images), labels) for images, labels in (split.train, split.test))
    return replace(split, train=train, test=test, preparation=f"{split.preparation}, {what}")


def set_upright(images: Images) -> Images:
    """Move each image's centre of mass to the middle, and shear it until it does not slant.

    The slant is the covariance of rows and columns over the variance of rows, of the image's mass.

    >>> bar = torch.zeros(1, 1, 5, 5)
    >>> bar[0, 0, :, 0] = 1.0
    >>> set_upright(bar)[0, 0, 2].round().tolist()
    [0.0, 0.0, 1.0, 0.0, 0.0]
    """
    mass = images[:, 0]
    total = mass.sum((1, 2), keepdim=True).clamp_min(1e-6)
    height, width = mass.shape[1:]
    rows = torch.arange(height, dtype=mass.dtype).view(1, -1, 1)
    columns = torch.arange(width, dtype=mass.dtype).view(1, 1, -1)

    # Each of these is a mean over the pixels of one image; no image enters that of another.
    def mean(x: Tensor) -> Tensor:
        return (mass * x).sum((1, 2), keepdim=True) / total

    row, column = mean(rows), mean(columns)
    down, across = rows - row, columns - column
    slant = mean(down * across) / mean(down.square()).clamp_min(1e-6)
    below = rows - (height - 1) / 2
    y = below + row
    x = columns - (width - 1) / 2 + column + slant.clamp(-_LARGEST_SLANT, _LARGEST_SLANT) * below
    # grid_sample asks where in the old image each new pixel comes from, from −1 to 1.
    places = torch.stack([2 * x / (width - 1) - 1, (2 * y / (height - 1) - 1).expand_as(x)], -1)
    return F.grid_sample(images, places, align_corners=True)


def standardise(images: Images) -> Images:
    """Each image with mean 0 and a spread near 1."""
    mean = images.mean((1, 2, 3), keepdim=True)
    return (images - mean) / (images.std((1, 2, 3), keepdim=True) + _FLAT)
