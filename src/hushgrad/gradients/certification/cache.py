"""Certificates, remembered for as long as what they speak of is alive and the same."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import CodeType
from typing import Any

import torch
from torch import nn

from hushgrad.batches import records
from hushgrad.gradients.certification.certify import Certificate
from hushgrad.gradients.forms.choices import Form
from hushgrad.gradients.objective import Objective, references_of
from hushgrad.gradients.tracing.rules.registry import own_rules
from hushgrad.types import Batch

CacheKey = tuple[Hashable, ...]
_Alive = Callable[[], Any]
_MOST_KEYS = 64
_MOST_VARIANTS = 8
# Hooks that every module has, which `torch.compile` does not look at again.
_HOOKS_OF_ALL: tuple[dict[int, Any], ...] = tuple(
    vars(nn.modules.module)[f"_global_{kind}_hooks"]
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)


class Cache:
    """Certificates by fingerprint; one is forgotten when an object it speaks of is gone."""

    def __init__(self) -> None:
        self._entries: OrderedDict[CacheKey, tuple[list[_Alive], list[Certificate]]] = OrderedDict()

    def get(self, key: CacheKey) -> list[Certificate]:
        alive, certificates = self._entries.get(key, ([], []))
        if _any_gone(alive):
            del self._entries[key]  # its ids may have passed to other objects
            return []
        return list(certificates)

    def add(self, key: CacheKey, certificate: Certificate, objective: Objective) -> None:
        _, certificates = self._entries.pop(key, ([], []))
        for old in [k for k, (alive, _) in self._entries.items() if _any_gone(alive)]:
            del self._entries[old]  # nobody can ask for it again, and it may hold programs
        spoken_of = (*objective.params.values(), *references_of(objective.loss))
        alive = [_reference(x) for x in spoken_of]
        # The last variants only: a loss that is never twice the same must not fill the memory.
        self._entries[key] = (alive, [*certificates, certificate][-_MOST_VARIANTS:])
        while len(self._entries) > _MOST_KEYS:
            self._entries.popitem(last=False)


def _any_gone(alive: list[_Alive]) -> bool:
    return any(reference() is None for reference in alive)


def _reference(x: Any) -> _Alive:
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: (x,)  # lists, numbers and their like are kept: they cannot be watched


def fingerprint(objective: Objective, forms: tuple[Form, ...], batch: Batch) -> CacheKey:
    """What a certificate depends on.

    A lambda made anew at each step has the same code and closes over the same model, and must hit;
    one that closes over something else must not.
    """
    device = next(iter(objective.params.values())).device.type
    # Other arithmetic has other kernels, and so has another number of threads.
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return (
        tuple([(name, id(p), p.dtype, p.shape) for name, p in objective.params.items()]),
        tuple([_switches(child) for module in objective.modules for child in module.modules()]),
        tuple([id(hook) for hooks in _HOOKS_OF_ALL for hook in hooks.values()]),
        tuple([_value(x) for x in references_of(objective.loss)]),
        forms,
        own_rules(),
        objective.idle,
        records.shapes(batch),
        autocast,
        torch.get_num_threads(),
    )


def _switches(module: nn.Module) -> tuple[Hashable, ...]:
    """Type, `training`, `batch_first`, hooks: shapes alone do not tell what they change.

    Numbers are left out: a module may count its own passes in one.
    """
    plain = [x for x in vars(module).values() if isinstance(x, (bool, str))]
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return (id(type(module)), *plain, *map(id, hooks))


def _value(x: Any) -> Hashable:
    """A value where it can be told, else the object's identity.

    Of a real number only the sign counts: one that varies from step to step (an annealed weight)
    is no reason to start anew, one that was zero is.
    """
    if isinstance(x, (bool, int, str, bytes, CodeType, type(None))):
        return (type(x), x)
    if isinstance(x, float):
        return (float, (x > 0) - (x < 0))
    if isinstance(x, dict):
        return (dict, *((str(key), _shallow(value)) for key, value in x.items()))
    if isinstance(x, list | tuple):
        return (type(x), *map(_shallow, x))
    return id(x)


def _shallow(x: Any) -> Hashable:
    return id(x) if isinstance(x, dict | list | tuple) else _value(x)
