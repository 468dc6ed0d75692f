"""Which rule serves which operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hushgrad.persample.tape import Rule

REGISTERED: dict[Any, Rule] = {}
_NAMESPACES = (torch, torch.Tensor, F)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for every spelling of an operation: function, method and operator."""

    def register(function: Rule) -> Rule:
        spellings = [getattr(space, name, None) for space in _NAMESPACES for name in names]
        for spelling in spellings:
            if spelling is not None:
                REGISTERED[spelling] = function
        return function

    return register
