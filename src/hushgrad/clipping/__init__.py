"""Clipping: rules that bound each record's gradient, groups of parameters, and the bounded sum."""

from hushgrad.clipping.rules import (
    Adaptive,
    Clip,
    abadi,
    automatic,
    custom,
    discard,
    normalize,
    reparameterized,
)

__all__ = [
    "Adaptive",
    "Clip",
    "abadi",
    "automatic",
    "custom",
    "discard",
    "normalize",
    "reparameterized",
]
