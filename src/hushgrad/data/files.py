"""The standard files of a data set: where they are, and whether they are the published ones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "HUSHGRAD_DATA"
"""The environment variable that names the folder of the data sets."""


@dataclass(frozen=True)
class Published:
    """The files of a data set: their folder below the root, their SHA-256, their public home."""

    name: str
    folder: str
    source: str
    sha256: Mapping[str, str]

    def read(self, file: str, *, root: Path | None) -> bytes:
        """The bytes of one file, verified; nothing else of it is ever parsed."""
        path = data_root(root) / self.folder / file
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise ValueError(
                f"expected a file of {self.name} at {path}, got none; get {file} from {self.source}"
            ) from None
        self.verify(file, content, path=path)
        return content

    def verify(self, file: str, content: bytes, *, path: Path) -> None:
        """Refuse content whose SHA-256 is not that of the published `file`."""
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256[file]:
            raise ValueError(
                f"expected SHA-256 {self.sha256[file]} for {path}, got {found}; the file is "
                f"damaged or another version: get {file} again from {self.source}"
            )


def data_root(root: Path | None) -> Path:
    """The folder of the data sets: the one given, else the one that HUSHGRAD_DATA names."""
    if root is not None:
        return Path(root)
    if named := os.environ.get(VARIABLE):
        return Path(named)
    raise ValueError(
        f"expected the folder of the data sets, got none; pass it (--data DIR), or set {VARIABLE}"
    )
