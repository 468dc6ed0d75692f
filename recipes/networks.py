"""The networks of the papers."""

from __future__ import annotations

from torch import nn


def tanh_cnn() -> nn.Sequential:
    """The 4-layer tanh network for 28 × 28 grey images: 26 010 parameters.

    Reference: Papernot et al. 2021, Tempered Sigmoid Activations; used by Automatic Clipping, G.1.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def cnn5() -> nn.Sequential:
    """CNN5, a 5-layer network for 32 × 32 colour images: 62 006 parameters.

    Reference: PyTorch's tutorial on CIFAR-10; used by the paper on DP-SRM.
    """
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )
