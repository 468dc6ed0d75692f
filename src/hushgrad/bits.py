"""Digests of tensors' bits, which detect writes at a fraction of the cost of a step.

Autograd's version counters do not detect all writes: a fused optimizer, `.data` and a NumPy view
leave them unchanged.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

_COLUMNS = 509  # prime, so that entries a power of two apart get different weights
_WEIGHTS = 2**14
_FEW = 1024  # entries; up to this many, hashing is faster than one call of torch
_KNOWN_TO_NUMPY = (torch.float32, torch.float64, torch.int64)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a number for each tensor that depends on all its bits and their positions.

    It detects mistakes. It is not a cryptographic hash: a weighted sum, easy to forge.

    >>> x = torch.zeros(3)
    >>> digests({"x": x}) == digests({"x": x + 0}), digests({"x": x}) == digests({"x": x + 1e-9})
    (True, False)
    """
    numbers: dict[str, int] = {}
    found: dict[torch.device, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        if x.device.type == "cpu" and x.numel() <= _FEW and x.dtype in _KNOWN_TO_NUMPY:
            numbers[name] = _hash(x)
        else:
            found.setdefault(x.device, {})[name] = _digest(x)
    for each in found.values():  # one transfer per device, since each waits for its queue
        numbers |= zip(each, torch.stack(list(each.values())).tolist(), strict=True)
    return {name: numbers[name] for name in tensors}


def _hash(x: Tensor) -> int:
    data: bytes = x.detach().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def _digest(x: Tensor) -> Tensor:
    if x.layout is not torch.strided or x.is_quantized or x.is_meta:
        return torch.tensor(x._version)
    x = torch.view_as_real(x) if x.is_complex() else x
    flat = _in_memory_order(x.detach().as_subclass(Tensor))
    size = flat.element_size()
    if flat.storage_offset() * size % 8:
        flat = flat.clone()
    whole = flat.numel() * size // 8 * 8 // size
    words = flat[:whole].view(torch.int64)
    weights = _weights(x.device)
    rows = 0 if len(words) <= _WEIGHTS else len(words) // _COLUMNS * _COLUMNS
    found = (words[rows:] * weights[: len(words) - rows]).sum()
    if rows:
        found += (words[:rows].view(-1, _COLUMNS).sum(0) * weights[:_COLUMNS]).sum()
    if whole < len(flat):
        rest = flat[whole:].view(_INTEGERS[size])
        found += (rest * weights[: len(rest)]).sum()
    return found


def _in_memory_order(x: Tensor) -> Tensor:
    """Return all entries as one vector, which is a view if the tensor has no gaps."""
    if x.is_contiguous():
        return x.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(x):
        return x.as_strided((x.numel(),), (1,))
    return x.reshape(-1).contiguous()


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Random odd numbers: multiplying by an odd number modulo 2⁶⁴ loses no bit."""
    generator = torch.Generator().manual_seed(_COLUMNS)
    drawn = torch.randint(-(2**63), 2**63 - 1, (_WEIGHTS,), generator=generator)
    return (drawn | 1).to(device)
