"""Files that are written whole or not at all, and one sentence where they cannot be."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hushgrad.types import Refused

PARTIAL = ".partial"
"""How the name ends of a file that is being written."""


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which gets its name once all of it is on the disk.

    An older one stays until then. If it cannot be written, nothing is left behind. Several
    processes may write the same file: one of theirs stays, whole.
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
            os.fsync(folder)  # or a power cut could undo the replacement
        finally:
            os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, whole or not at all."""
    with open_atomically(path) as file:
        file.write(text.encode())


@contextmanager
def explain_file_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says of a file into one sentence with a remedy."""
    try:
        yield
    except OSError as error:
        raise Refused(
            f"expected to write {path}, got: {error.strerror or error}; see that its folder is "
            "there, may be written and has room, and go on: an older file stays as it was"
        ) from error
