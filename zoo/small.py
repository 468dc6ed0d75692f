"""Small networks of plain layers."""

from __future__ import annotations

from torch import nn


def perceptron() -> nn.Sequential:
    """3-6-4 with tanh."""
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))


def mlp() -> nn.Sequential:
    """5-7-3 with tanh."""
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
