"""The folder of a run while a process begins there: made, locked, and left as it was if refused."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from hushgrad.files import PARTIAL, explain_file_errors
from hushgrad.types import Refused


class Claim:
    """The right of one process to begin in a folder; the folder is made if it is missing.

    Guarantees: two processes never begin in one folder at the same time. If it ends with an
    exception, the files that were named by `made` are removed, and those folders that this process
    made, as far as they are empty. Nothing that another process has made is touched.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders: list[Path] = []
        self._files: list[Path] = []
        self._lock: int | None = None

    def made(self, *files: Path) -> None:
        """Remove these, too, if the process cannot begin."""
        self._files += files

    def __enter__(self) -> Claim:
        try:
            with explain_file_errors(self._folder):
                self._make()
                self._lock = _locked(self._folder)
                for left in self._folder.glob(f"*{PARTIAL}"):  # by a process that was killed
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
            with suppress(FileExistsError):  # another process was first, and it stays that one's
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
    """Lock a folder until what is returned is closed, or the process ends."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(opened), folder.stat()):
            raise BlockingIOError  # it was removed by the process that had it
    except BlockingIOError as error:
        os.close(opened)
        raise Refused(
            f"expected a folder in which no other process begins, got {folder}, in which one "
            "does; name another folder, or resume its run later"
        ) from error
    except OSError:
        return opened  # a file system without locks: the ledger still has one holder for a run
    return opened
