"""The files of a data set: where they are, and whether they are the published ones."""

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
    """The published files of a data set: their folder, their source and their SHA-256."""

    name: str
    folder: str
    source: str
    sha256: Mapping[str, str]

    def path(self, file: str, *, root: Path | None) -> Path:
        """Return where a file is expected."""
        return data_root(root) / self.folder / file

    def read(self, file: str, *, root: Path | None) -> bytes:
        """Return the bytes of a file.

        Guarantees: their SHA-256 is the published one. They are read once, so the bytes that are
        parsed are the bytes that were verified.
        """
        path = self.path(file, root=root)
        return self.verify(file, self.read_unverified(path), path=path)

    def read_unverified(self, path: Path) -> bytes:
        """Return the bytes of the file at `path`, without verifying them."""
        try:
            return path.read_bytes()
        except OSError as e:
            raise ValueError(
                f"expected a file of {self.name} at {path}, got: {e.strerror}; download it from "
                f"{self.source}"
            ) from None

    def verify(self, file: str, content: bytes, *, path: Path) -> bytes:
        """Return `content`, read from `path`; raise unless its SHA-256 is that of `file`."""
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256[file]:
            raise ValueError(
                f"expected SHA-256 {self.sha256[file]} for {path}, got {found}: the file is "
                f"damaged or another version; download it again from {self.source}"
            )
        return content


def decompress(content: bytes, by: Callable[[bytes], bytes], *, file: str) -> bytes:
    """Decompress a file; an error names the file."""
    try:
        return by(content)
    except (EOFError, OSError, ValueError, zlib.error) as e:
        raise ValueError(f"expected {file} to decompress, got: {e}; download it again") from None


def data_root(root: Path | None) -> Path:
    """Return the folder of the data sets: `root`, or else the one that HUSHGRAD_DATA names."""
    if root is not None:
        return root
    if named := os.environ.get(VARIABLE):
        return Path(named)
    raise ValueError(
        "expected the folder of the data sets, got none; pass it as root (--data DIR on the "
        f"command line), or set the environment variable {VARIABLE}"
    )
