"""How much of each record's gradient counts: rules, groups of parameters, and the bounded sum."""

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
