"""Fail-safes: nothing but the returned gradients may come out of a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.persample.records import tensors
from hushgrad.types import Batch, Params, Refused

_Mark = tuple[int, int, int]


class Watch:
    """Marks parameters and buffers before a pass and finds what the pass changed."""

    def __init__(self, params: Params, modules: Sequence[nn.Module]) -> None:
        self._params, self._modules = params, modules
        self._marks = {name: _mark(x) for name, x in self._state().items()}
        self._gradients = {name: _gradient_mark(p) for name, p in self._parameters().items()}

    def _parameters(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self._params)
        known = {id(p) for p in found.values()}
        for module in self._modules:
            for name, p in module.named_parameters():
                if id(p) not in known:
                    found[name] = p
        return found

    def _state(self) -> dict[str, Tensor]:
        return self._parameters() | buffers(self._modules)

    def check(self, free: frozenset[str] = frozenset()) -> None:
        """Raise if a parameter got a gradient, or anything outside `free` was written."""
        for name, p in self._parameters().items():
            if _gradient_mark(p) != self._gradients.get(name):
                if name in self._params:
                    raise Refused(
                        f"the parameter {name} received an ordinary gradient: an operation "
                        "consumed it out of sight (a custom autograd.Function or kernel?); write "
                        "it with torch operations, or use form=loop"
                    )
                raise Refused(
                    f"the parameter {name} is trained but is not among the private parameters; "
                    "add it to params, or freeze it with requires_grad_(False)"
                )
        for name, x in self._state().items():
            if name not in free and _mark(x) != self._marks.get(name):
                raise written(name)


def refuse_strangers(losses: Tensor, params: Params, batch: Batch) -> None:
    """Refuse a loss that also trains a tensor which is not among the private parameters."""
    known = {id(x) for x in (*params.values(), *tensors(batch))}
    seen: set[Any] = set()
    stack = [losses.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise Refused(
                f"the loss also trains a tensor of shape {tuple(leaf.shape)} that is not among the "
                "private parameters; add it to params, or freeze it with requires_grad_(False)"
            )
        stack.extend(following for following, _ in node.next_functions)


def written(name: str) -> Refused:
    """The refusal of a tensor that the forward pass wrote from the records."""
    return Refused(
        f"the forward pass wrote {name}, which then leaves without noise through the state dict; "
        "do not track statistics of the records there (track_running_stats=False, eval() that "
        "module), or compute them in the loss"
    )


def buffers(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The buffers of the modules, by name."""
    return {name: b for module in modules for name, b in module.named_buffers()}


def _mark(x: Tensor) -> _Mark:
    return id(x), x.data_ptr(), x._version


def _gradient_mark(p: Tensor) -> tuple[int, int] | None:
    return None if p.grad is None else (id(p.grad), p.grad._version)


@contextmanager
def buffers_restored(modules: Sequence[nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Give back every buffer as it was, and tell what the block wrote: name to new value."""
    owners = [
        (f"{prefix}{'.' if prefix else ''}{name}", owner, name)
        for module in modules
        for prefix, owner in module.named_modules()
        for name, b in owner.named_buffers(recurse=False)
    ]
    before = {
        full: (owner._buffers[name], _copy(owner._buffers[name])) for full, owner, name in owners
    }
    changed: dict[str, Tensor] = {}
    try:
        yield changed
    finally:
        for full, owner, name in owners:
            old, value = before[full]
            now = owner._buffers.get(name)
            assert old is not None and value is not None
            if now is not old or not _same_bits(now, value):
                changed[full] = torch.empty(0) if now is None else now.detach().clone()
                owner._buffers[name] = old
                with torch.no_grad():
                    old.data.copy_(value)


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().clone()


def _same_bits(x: Tensor | None, y: Tensor) -> bool:
    if x is None or x.shape != y.shape or x.dtype != y.dtype:
        return False
    same = x == y
    if x.is_floating_point() or x.is_complex():
        same = same | (x.isnan() & y.isnan())
    return bool(same.all())


def check_parameters(params: Params) -> None:
    """Refuse parameters that cannot be private as they are."""
    if not params:
        raise ValueError("expected at least one private parameter, got none; pass named_parameters")
    seen: dict[int, str] = {}
    for name, p in params.items():
        if type(p) is not nn.Parameter:
            raise Refused(
                f"the parameter {name} is a {type(p).__name__}, and only plain nn.Parameter can be "
                "private; unwrap or dequantise it, or leave it frozen"
            )
        if not p.requires_grad:
            raise Refused(f"the parameter {name} is frozen; leave it out of params")
        if id(p) in seen:
            raise ValueError(
                f"the parameters {seen[id(p)]} and {name} are one tensor; name it once"
            )
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise Refused(
                f"the parameter {name} has a gradient hook, which would see one record's gradient; "
                "remove the hook"
            )
        seen[id(p)] = name


def check_optimizer(optimizer: torch.optim.Optimizer, params: Params) -> None:
    """Refuse an optimizer that holds a tensor which is neither private nor frozen.

    Such a tensor would be trained on gradients without noise.
    """
    private = {id(p) for p in params.values()}
    for number, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            if id(p) not in private and p.requires_grad:
                raise Refused(
                    f"the optimizer's tensor {position} of group {number}, shape "
                    f"{tuple(p.shape)}, is neither private nor frozen; add it to the private "
                    "parameters, or freeze it with requires_grad_(False)"
                )
