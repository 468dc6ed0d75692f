"""Which rule serves which operation, and which operations are taken apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from hushgrad.persample.tape import Rule

REGISTERED: dict[Any, Rule] = {}
DECOMPOSED: dict[Any, Callable[..., Any]] = {}
_NAMESPACES = (torch, torch.Tensor, F)


def rule(*operations: str | Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Register a rule for every spelling of an operation: function, method and operator."""

    def register(function: Rule) -> Rule:
        REGISTERED.update(dict.fromkeys(_spellings(operations), function))
        return function

    return register


def decomposition(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that says the operation, with its signature, by simpler ones.

    The operations that it calls are intercepted in turn. Where it returns NotImplemented the
    operation is taken as a whole.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        DECOMPOSED.update(dict.fromkeys(_spellings(names), function))
        return function

    return register


def _spellings(operations: Iterable[str | Callable[..., Any]]) -> list[Any]:
    named = [x for x in operations if isinstance(x, str)]
    found = [getattr(space, name, None) for space in _NAMESPACES for name in named]
    return [x for x in (*found, *operations) if x is not None and not isinstance(x, str)]
