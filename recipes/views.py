"""Random views of small images: shifts by whole pixels, and mirror images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hushgrad.run.augmentation import Augment


def random_shifts(pixels: int, *, mirrored: bool = False) -> Augment:
    """Move each image by up to so many pixels either way, and mirror half of them if asked.

    Args:
        pixels: the longest shift, down or across.
        mirrored: whether every second image, on average, is turned left to right.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator ...>
    >>> images, labels = random_shifts(2)((torch.rand(4, 1, 9, 9), torch.arange(4)))
    >>> images.shape, labels.tolist()
    (torch.Size([4, 1, 9, 9]), [0, 1, 2, 3])
    """

    def view(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        count, _, height, width = images.shape
        draws = torch.rand(count, 3, device=images.device)
        down, right = (draws[:, :2] * (2 * pixels + 1)).long().unbind(1)
        columns = torch.arange(width, device=images.device).expand(count, -1)
        if mirrored:
            columns = torch.where(draws[:, 2:] < 0.5, columns.flip(1), columns)
        rows = torch.arange(height, device=images.device) + down[:, None]
        columns = columns + right[:, None]
        # What is moved in from outside has the image's own darkest value, not 0.
        edge = images.amin((1, 2, 3), keepdim=True)  # of each image by itself
        padded = F.pad(images - edge, [pixels] * 4) + edge
        each = torch.arange(count, device=images.device)[:, None, None]
        moved = padded.movedim(1, -1)[each, rows[:, :, None], columns[:, None, :]]
        return moved.movedim(-1, 1), labels

    return view
