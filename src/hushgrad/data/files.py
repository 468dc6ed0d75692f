"""The standard files of a data set: where they are, and whether they are the published ones."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "HUSHGRAD_DATA"
"""The environment variable that names the folder of the data sets."""


@dataclass(frozen=True)
class PublishedFiles:
    """The files of a data set: their folder below the root, their public home, their SHA-256."""

    name: str
    folder: str
    source: str
    sha256: Mapping[str, str]

    def path(self, file: str, *, root: Path | None) -> Path:
        """Where a file is expected."""
        return data_root(root) / self.folder / file

    def read(self, file: str, *, root: Path | None) -> bytes:
        """The bytes of a file.

        Guarantees: their SHA-256 is the one published, and they are in memory: what is verified is
        what is parsed.
        """
        path = self.path(file, root=root)
        return self.verify(file, self.read_unverified(path), path=path)

    def read_unverified(self, path: Path) -> bytes:
        """The bytes that are at `path`, not verified."""
        try:
            return path.read_bytes()
        except OSError as e:
            raise ValueError(
                f"expected a file of {self.name} at {path}, got: {e.strerror}; get it from "
                f"{self.source}"
            ) from None

    def verify(self, file: str, content: bytes, *, path: Path) -> bytes:
        """`content`, which came from `path`, refused unless its SHA-256 is that of `file`."""
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256[file]:
            raise ValueError(
                f"expected SHA-256 {self.sha256[file]} for {path}, got {found}; it is damaged or "
                f"another version: get it again from {self.source}"
            )
        return content


def decompress(content: bytes, by: Callable[[bytes], bytes], *, file: str) -> bytes:
    """Decompress a file, and name it where that fails."""
    try:
        return by(content)
    except (EOFError, OSError, ValueError, zlib.error) as e:
        raise ValueError(f"expected {file} to decompress, got: {e}; get it again") from None


def data_root(root: Path | None) -> Path:
    """The folder of the data sets: the one given, else the one that HUSHGRAD_DATA names."""
    if root is not None:
        return root
    if named := os.environ.get(VARIABLE):
        return Path(named)
    raise ValueError(
        f"expected the folder of the data sets, got none; pass it (--data DIR), or set {VARIABLE}"
    )
