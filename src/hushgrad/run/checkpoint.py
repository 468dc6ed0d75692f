"""Checkpoints: nested state to one file and back, without pickle.

A file holds tensors in the safetensors format, one of which is the JSON of everything else. Its
header contains a digest of the whole file, which is checked before anything else is read. Opening a
file runs no code from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from safetensors.torch import load, save
from torch import Tensor

from hushgrad.files import open_atomically
from hushgrad.noise import TAG_BYTES
from hushgrad.types import Refused

_VERSION = 2
_TREE = "state"
_MARK = b'"digest":"'  # before the digest, in the header
_BLANK = b"0" * 64  # in the place of the digest, while it is computed

Contents = Mapping[str, Any]
"""Nested dictionaries, lists, tuples, numbers, strings, None and tensors."""


def write(path: Path, state: Contents) -> None:
    """Write the state to a file, entirely or not at all: an older file stays until the new one is
    complete.
    """
    tensors: dict[str, Tensor] = {}
    # JSON instead of pickle: loading a pickle can run any code.
    tree = json.dumps(_packed(state, _TREE, tensors)).encode()
    tensors[_TREE] = torch.frombuffer(bytearray(tree), dtype=torch.uint8)
    data = save(tensors, metadata={"hushgrad": str(_VERSION), "digest": _BLANK.decode()})
    place = _digest_at(data)
    digest = _digest(data, place)
    with open_atomically(path) as file:
        for part in (data[:place], digest, memoryview(data)[place + len(_BLANK) :]):
            file.write(part)


def read(path: Path) -> dict[str, Any]:
    """Return the state that was written to a file; refused if a single bit of it was changed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Refused(
            f"expected a checkpoint in {path}, got: {error.strerror or error}; name the folder of "
            "a run"
        ) from error
    place = _digest_at(data)
    # Compared before the JSON is parsed, so that damage is never interpreted.
    if place < 0 or data[place : place + len(_BLANK)] != _digest(data, place):
        raise Refused(
            f"expected a checkpoint in {path}, got a file that is damaged or of another kind; put "
            "an older copy in its place, or start another run"
        )
    header = json.loads(data[8 : 8 + _header_size(data)])
    version = header["__metadata__"]["hushgrad"]
    if version != str(_VERSION):
        raise Refused(
            f"expected a checkpoint of version {_VERSION} in {path}, got {version}; use the "
            "version of hushgrad that wrote it"
        )
    tensors = load(data)
    state: dict[str, Any] = _unpacked(json.loads(tensors[_TREE].numpy().tobytes()), tensors)
    return state


def stamp(path: Path) -> bytes:
    """Return what distinguishes a checkpoint from the next at the same path; empty if there is
    none.
    """
    if not path.exists():
        return b""
    with path.open("rb") as file:
        start = file.read(8)
        # Only the header: a checkpoint can be as large as the model.
        header = start + file.read(min(_header_size(start), path.stat().st_size))
    place = _digest_at(header)
    return header[place : place + len(_BLANK)]


def _header_size(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def _digest_at(data: bytes) -> int:
    """Return where a file's digest is; -1 if it has none."""
    found = data.find(_MARK, 8, 8 + min(len(data), _header_size(data)))
    return found if found < 0 else found + len(_MARK)


def _digest(data: bytes, place: int) -> bytes:
    """Return the digest of all of a file except the digest itself."""
    found, view = hashlib.blake2b(digest_size=32), memoryview(data)
    for part in (view[:place], _BLANK, view[place + len(_BLANK) :]):
        found.update(part)
    return found.hexdigest().encode()


def _packed(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return JSON for a value, collecting its tensors; containers are tagged, as JSON keeps no
    types.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            # Names by number: keys of a state dict need not be strings.
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


def pack_tags(tags: Sequence[bytes]) -> UInt8[Tensor, "release byte"]:
    """The tags of releases as the rows of a tensor, which a checkpoint can hold."""
    return torch.tensor([list(tag) for tag in tags], dtype=torch.uint8).view(len(tags), TAG_BYTES)


def unpack_tags(rows: UInt8[Tensor, "release byte"]) -> list[bytes]:
    """The tags that were packed."""
    return [bytes(row) for row in rows.tolist()]
