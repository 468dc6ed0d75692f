"""Which rule serves which operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hushgrad.gradients.tracing.call import OperationRule

Decomposition = Callable[..., Any]

REGISTERED: dict[Any, OperationRule] = {}
DECOMPOSITIONS: dict[Any, Decomposition] = {}
_NAMESPACES = (torch, torch.Tensor, F)


def rule(*names: str) -> Callable[[OperationRule], OperationRule]:
    """Register a rule for every spelling of an operation: function, method and operator."""

    def register(function: OperationRule) -> OperationRule:
        spellings = [getattr(space, name, None) for space in _NAMESPACES for name in names]
        for spelling in spellings:
            if spelling is not None:
                REGISTERED[spelling] = function
        return function

    return register


def decomposition(*operations: Any) -> Callable[[Decomposition], Decomposition]:
    """Register a function, of the same signature, that runs these operations as simpler ones.

    It is called with the arguments as they came; the operations in it are seen in turn. Where it
    returns NotImplemented the operation is taken as a whole.
    """

    def register(function: Decomposition) -> Decomposition:
        DECOMPOSITIONS.update(dict.fromkeys(operations, function))
        return function

    return register
