"""Networks for pictures: a convolution net with dropout, a residual one, one of few channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def small_cnn() -> nn.Sequential:
    """Convolution, GroupNorm, ReLU in place, dropout and a linear head, on 3×6×6."""
    layers = (nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Flatten())
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(8 * 16, 3))


class Block(nn.Module):
    """Two 3×3 convolutions with GroupNorm and a shortcut, 1×1 where the shape changes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = outputs // inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)
        same = inputs == outputs
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.short(x))


RESNET20 = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)


def resnet(widths: Sequence[int] = RESNET20, classes: int = 10) -> nn.Sequential:
    """A residual network with GroupNorm on 3 channels; a block from each width to the next."""
    return nn.Sequential(
        nn.Conv2d(3, widths[0], 3, padding=1, bias=False),
        nn.GroupNorm(8, widths[0]),
        nn.ReLU(),
        *(Block(a, b) for a, b in pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], classes),
    )


class SqueezeExcite(nn.Module):
    """Channels weighted by what the whole picture says."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(pooled))))


class Inverted(nn.Module):
    """Widen, filter each channel by itself, narrow; as MobileNetV2 and EfficientNet do."""

    def __init__(self, width: int, expand: int, act: Callable[..., nn.Module], se: bool) -> None:
        super().__init__()
        wide = width * expand
        self.body = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False),
            nn.GroupNorm(2, wide),
            act(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.GroupNorm(2, wide),
            act(inplace=True),
            SqueezeExcite(wide) if se else nn.Identity(),
            nn.Conv2d(wide, width, 1, bias=False),
            nn.GroupNorm(2, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def depthwise(act: Callable[..., nn.Module], *, se: bool) -> nn.Module:
    """Depthwise convolutions and inverted bottlenecks, as MobileNet has them."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(2, 4),
        act(inplace=True),
        Inverted(4, 2, act, se),
        nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4, bias=False),
        Inverted(4, 2, act, se),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


class Mixer(nn.Module):
    """Patches mixed along positions, then along channels, by layers alone."""

    def __init__(self, positions: int = 4, width: int = 6) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.along = nn.Sequential(nn.Linear(positions, 5), nn.GELU(), nn.Linear(5, positions))
        self.across = nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Linear(7, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).mT
        h = h + self.along(self.norms[0](h).mT).mT
        h = h + self.across(self.norms[1](h))
        return self.head(self.norms[2](h).mean(1))
