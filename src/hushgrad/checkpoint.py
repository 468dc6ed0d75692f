"""Checkpoints: nested state to one file and back, without pickle.

A file holds tensors in the safetensors format and everything else as JSON in its header. Opening
one runs no code of whoever wrote it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hushgrad.types import Refused

_HEADER = "hushgrad"
_VERSION = 1

State = Mapping[str, Any]
"""Nested dictionaries, lists, tuples, numbers, strings, None and tensors."""


def write(path: Path, state: State) -> None:
    """Write the state to a file, whole or not at all: an older one stays until the end."""
    tensors: dict[str, Tensor] = {}
    tree = _packed(state, "state", tensors)
    header = {_HEADER: json.dumps({"version": _VERSION, "state": tree})}
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(save(tensors, metadata=header))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # or a power cut could undo the replacement
    finally:
        os.close(folder)


def read(path: Path) -> dict[str, Any]:
    """Return the state that was written to a file."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise Refused(
            f"expected a checkpoint in {path}, got a file that cannot be read ({error}); use an "
            "older copy, or start another run"
        ) from error
    if header.get("version") != _VERSION:
        raise Refused(
            f"expected a checkpoint of version {_VERSION} in {path}, got "
            f"{header.get('version', 'a file of another kind')}; use the version of hushgrad that "
            "wrote it"
        )
    state: dict[str, Any] = _unpacked(header["state"], tensors)
    return state


def _packed(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for a value, its tensors put aside; containers are tagged, as JSON keeps no types."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            name = str(len(tensors))
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {"tensor": name}
        case Mapping():
            items = [
                [_packed(k, place, tensors), _packed(v, f"{place}[{k!r}]", tensors)]
                for k, v in value.items()
            ]
            return {"dict": items}
        case list() | tuple():
            tag = "list" if isinstance(value, list) else "tuple"
            return {tag: [_packed(v, f"{place}[{i}]", tensors) for i, v in enumerate(value)]}
    raise Refused(
        f"expected tensors, numbers, strings and containers of them in a checkpoint, got a "
        f"{type(value).__name__} at {place}; leave it out of the state dict"
    )


def _unpacked(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    match tree:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": items}:
            return {_unpacked(k, tensors): _unpacked(v, tensors) for k, v in items}
        case {"list": items}:
            return [_unpacked(v, tensors) for v in items]
        case {"tuple": items}:
            return tuple(_unpacked(v, tensors) for v in items)
    return tree
