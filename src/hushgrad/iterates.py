"""Iterates: copies of the parameters' values, restored for a while or for good."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hushgrad.types import Params

Values = Mapping[str, Tensor]
"""A tensor for each parameter, by name."""


def copy_values(params: Params) -> dict[str, Tensor]:
    """Return a copy of the parameters' values, the current iterate."""
    return {name: p.detach().clone() for name, p in params.items()}


def set_values(params: Params, values: Values) -> None:
    """Set the parameters to these values."""
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(values[name])


@contextmanager
def exchange_values(params: Params, values: Values) -> Iterator[None]:
    """Give the parameters other values within a `with` block.

    The storages are exchanged, not written, so that graphs built from the old values stay valid.
    """
    kept = {name: p.data for name, p in params.items()}
    try:
        for name, p in params.items():
            p.data = values[name].to(p.device, p.dtype)
        yield
    finally:
        for name, p in params.items():
            p.data = kept[name]


def norm(values: Values) -> float:
    """Return the Euclidean norm of all values together, in float64."""
    squares = [x.double().square().sum() for x in values.values()]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def distance(one: Values, other: Values) -> float:
    """Return the Euclidean distance between two iterates."""
    return norm({name: one[name].double() - other[name].double() for name in one})
