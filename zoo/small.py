"""Small networks of plain layers."""

from __future__ import annotations

from torch import nn
from uses import Uses


def perceptron() -> nn.Sequential:
    """3-6-4 with tanh."""
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))


def mlp() -> nn.Sequential:
    """5-7-3 with tanh."""
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def small_network() -> nn.Sequential:
    """A convolution, a normalisation and a linear layer."""
    return nn.Sequential(
        nn.Conv1d(3, 4, 2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.LayerNorm(5),
        Uses(lambda h, p, q: (h + p) * q, [(5,), (5,)]),
    )
