"""Atomic writes: a file is written as a whole or not at all, and failures name a remedy."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hushgrad.types import Refused

PARTIAL = ".partial"
"""The suffix of a file that is still being written."""


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` only when the block ends and its bytes are on the disk.

    Until then an older file stays. If the block raises, nothing is left behind. If several
    processes write the same path, one of the files stays, complete.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    with explain_file_errors(path):
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # without it, a power cut could undo the rename
        finally:
            os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 atomically."""
    with open_atomically(path) as file:
        file.write(text.encode())


@contextmanager
def explain_file_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` on this file into a `Refused` that names the file and a remedy."""
    try:
        yield
    except OSError as error:
        raise Refused(
            f"expected to write {path}, got: {error.strerror or error}; make sure that its folder "
            "exists, is writable and has free space, then retry: an older file is unchanged"
        ) from error
