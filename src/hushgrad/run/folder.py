"""The folder of a run that begins: created and locked, and cleaned up if the run is refused."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from hushgrad.files import PARTIAL, explain_file_errors
from hushgrad.types import Refused


class Claim:
    """The right of one process to begin in a folder, which is created if it is missing.

    Guarantees: two processes never begin in one folder at the same time. If the claim ends with an
    exception, the files named by `made` are removed, and the folders that this process created, as
    far as they are empty. Nothing that another process created is touched.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders: list[Path] = []
        self._files: list[Path] = []
        self._lock: int | None = None

    def made(self, *files: Path) -> None:
        """Name files to remove if the process cannot begin."""
        self._files += files

    def __enter__(self) -> Claim:
        try:
            with explain_file_errors(self._folder):
                self._make()
                self._lock = _locked(self._folder)
                for left in self._folder.glob(f"*{PARTIAL}"):  # left by a killed process
                    left.unlink(missing_ok=True)
        except BaseException:
            self._leave(refused=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave(refused=kind is not None)

    def _make(self) -> None:
        missing = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        for path in reversed(missing):
            with suppress(FileExistsError):  # another process created it: it is not ours to remove
                path.mkdir()
                self._folders.append(path)

    def _leave(self, *, refused: bool) -> None:
        try:
            if refused:
                self._take_back()
        finally:
            if self._lock is not None:
                os.close(self._lock)

    def _take_back(self) -> None:
        with suppress(OSError):
            for path in self._files:
                path.unlink(missing_ok=True)
        with suppress(OSError):  # the first that is not empty keeps those around it
            for path in reversed(self._folders):
                path.rmdir()


def _locked(folder: Path) -> int:
    """Lock a folder until the returned descriptor is closed, or the process ends."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(opened), folder.stat()):
            raise BlockingIOError  # removed by the process that had locked it
    except BlockingIOError as error:
        os.close(opened)
        raise Refused(
            f"expected a folder in which no other process begins, got {folder}, in which one "
            "does; name another folder, or resume its run later"
        ) from error
    except OSError:
        return opened  # no locks on this file system: the ledger still allows one holder
    return opened
