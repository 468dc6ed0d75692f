"""What the image loaders share."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy.typing import NDArray
from torch import Tensor

Images = tuple[Float32[Tensor, "record channel height width"], Int64[Tensor, " record"]]
"""Pixels in [0, 1], and the class of each image."""


def unit_pixels(
    pixels: NDArray[np.uint8],
) -> Float32[Tensor, "record channel height width"]:
    """Convert bytes to float32 in [0, 1]."""
    return torch.from_numpy(pixels.astype(np.float32)).div_(255)
