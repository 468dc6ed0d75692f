"""The ledger's file: SQLite in write-ahead mode, created atomically and written in transactions.

A durable transaction is on the disk when it returns. Any other has reached the operating system, so
it survives a kill of the process but perhaps not a power failure.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hushgrad.types import Refused

ENDINGS = ("", "-wal", "-shm")
"""The suffixes of a ledger's files; SQLite has the last two while the ledger is in use."""

_APPLICATION = 0x68756C65  # "hule", SQLite's application_id
_VERSION = 2
_ADDED = """
CREATE TABLE changes (count INTEGER NOT NULL);
CREATE TABLE homes (entry TEXT PRIMARY KEY, inode TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO changes VALUES (0);
"""
"""What version 2 adds to version 1."""

_SCHEMA = f"""
CREATE TABLE meta (salt BLOB NOT NULL);
CREATE TABLE budgets (
    name TEXT PRIMARY KEY, epsilon REAL NOT NULL, delta REAL NOT NULL, relation TEXT NOT NULL,
    rule TEXT NOT NULL, alpha REAL, fingerprint TEXT NOT NULL, seal BLOB NOT NULL
);
CREATE TABLE entries (
    id TEXT PRIMARY KEY, budget TEXT NOT NULL REFERENCES budgets, label TEXT NOT NULL,
    plan TEXT NOT NULL, opened TEXT NOT NULL, position INTEGER NOT NULL, floor INTEGER NOT NULL,
    doubt INTEGER NOT NULL, boot TEXT NOT NULL, holder TEXT NOT NULL, steps INTEGER, settled TEXT
);
CREATE TABLE charges (
    number INTEGER PRIMARY KEY, entry TEXT NOT NULL REFERENCES entries, at TEXT NOT NULL,
    reason TEXT NOT NULL, event TEXT NOT NULL, epsilon REAL NOT NULL, delta REAL NOT NULL,
    cost TEXT NOT NULL
);
CREATE TABLE digests (
    number INTEGER PRIMARY KEY, entry TEXT NOT NULL REFERENCES entries, step INTEGER NOT NULL,
    digest BLOB NOT NULL, UNIQUE (entry, step, digest)
);
CREATE TABLE history (
    number INTEGER PRIMARY KEY, at TEXT NOT NULL, budget TEXT NOT NULL, entry TEXT,
    what TEXT NOT NULL
);
CREATE INDEX charges_of ON charges (entry);
CREATE INDEX entries_of ON entries (budget);
{_ADDED}
"""


class File:
    """A SQLite file that has been verified to be a ledger.

    Each process and thread has a connection of its own. A child process neither uses nor closes
    connections that it inherits, because SQLite does not allow it.
    """

    def __init__(self, path: Path, *, wait: float) -> None:
        self.path, self._wait = path, wait
        self._connections: dict[tuple[int, int], sqlite3.Connection] = {}
        self._same: tuple[int, int] | None = None
        self._seen = self._least = 0  # changes, and bytes of the file
        self._log: os.stat_result | None = None
        with explain_ledger_errors(path):
            if not path.exists():
                _create(path)
            self._connection()
        weakref.finalize(self, _close, self._connections)

    @property
    def home(self) -> str:
        """The file's inode, which distinguishes it from copies; a move on one disk keeps it."""
        with explain_ledger_errors(self.path):
            return str(self.path.stat().st_ino)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Begin a read transaction, which sees one state of the file throughout."""
        with explain_ledger_errors(self.path):
            connection, seen = self._connection(), self._seen
            connection.execute("BEGIN")
            try:
                self._require_later(connection, seen)
                yield connection
            finally:
                _roll_back(connection)

    @contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Begin an exclusive write transaction; it is committed as a whole or not at all."""
        with explain_ledger_errors(self.path):
            connection, seen = self._connection(), self._seen
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.execute("UPDATE changes SET count = count + 1")
                count = self._require_later(connection, seen + 1)
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                _roll_back(connection)
                raise
            self._seen = max(self._seen, count)
            self._measure()

    def close(self) -> None:
        """Close the connections of this process. The next use opens them again."""
        _close(self._connections)
        self._log = None

    def _connection(self) -> sqlite3.Connection:
        own = (os.getpid(), threading.get_ident())
        same = _identity(self.path)
        if own in self._connections and self._log_was_cut():
            self._connections.pop(own).close()  # `_require_later` checks whether writes were lost
            self._log = None
        if own not in self._connections:
            self._connections[own] = _open(self.path, self._wait)
            self._same = self._same or same
            self._measure()
        # SQLite keeps writing to a file that was deleted or replaced, and those writes are lost.
        if same != self._same:
            raise Refused(
                f"expected the ledger {self.path} that was opened, got another file in its place; "
                "restore the first one, or start again with the new one"
            )
        if self.path.stat().st_size < self._least:
            raise damage_refusal(self.path, "one that was cut short while it was in use")
        return self._connections[own]

    def _measure(self) -> None:
        """Record the sizes of the files, which never shrink while they are in use."""
        self._least = max(self._least, self.path.stat().st_size)
        self._log = _log_of(self.path)

    def _log_was_cut(self) -> bool:
        # SQLite would not notice: it would write behind the gap, or to a deleted log.
        before, now = self._log, _log_of(self.path)
        if before is None:
            return False
        return now is None or now.st_ino != before.st_ino or now.st_size < before.st_size

    def _require_later(self, connection: sqlite3.Connection, least: int) -> int:
        """Return the count of changes; refuse a file that has lost writes of this process."""
        found = connection.execute("SELECT count FROM changes").fetchone()
        if found is None or found[0] < least:
            raise damage_refusal(self.path, "an older state than it had before")
        return int(found[0])


def _log_of(path: Path) -> os.stat_result | None:
    """Return the size and inode of SQLite's write-ahead log; None if there is none."""
    try:
        return path.with_name(path.name + "-wal").stat()
    except FileNotFoundError:
        return None


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def digest_of(*parts: object) -> bytes:
    """Return a digest that detects accidental changes; it does not protect against attacks."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def _create(path: Path) -> None:
    """Create a complete ledger under a temporary name, and link it unless another was faster."""
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    os.close(os.open(made, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    try:
        connection = sqlite3.connect(made, isolation_level=None)
        try:
            if connection.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
                raise Refused(
                    f"expected a file system with shared memory for the ledger {path}, got one "
                    "without; keep the ledger on a local disk"
                )
            connection.execute("PRAGMA synchronous = FULL")
            connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA}")
            connection.execute("INSERT INTO meta VALUES (?)", (secrets.token_bytes(32),))
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
            connection.execute("COMMIT")
        finally:
            connection.close()
        with suppress(FileExistsError):
            os.link(made, path)
    finally:
        for suffix in ENDINGS:
            made.with_name(made.name + suffix).unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _open(path: Path, wait: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=wait, isolation_level=None, check_same_thread=False)
    try:
        _require_ledger(connection, path)
        _upgrade(connection)
        connection.execute("PRAGMA foreign_keys = ON")
        found = [row[0] for row in connection.execute("PRAGMA quick_check")]
        if found != ["ok"]:
            raise damage_refusal(path, found[0])
    except BaseException:
        connection.close()
        raise
    return connection


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _upgrade(connection: sqlite3.Connection) -> None:
    """Add to a ledger of an older version the tables that this version needs."""
    if _version(connection) == _VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if _version(connection) != _VERSION:  # another process may have upgraded it
            for statement in _ADDED.strip().split("\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        _roll_back(connection)
        raise


def _require_ledger(connection: sqlite3.Connection, path: Path) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = _version(connection)
    if application != _APPLICATION:
        raise _other_file(path)
    if not 1 <= version <= _VERSION:
        raise Refused(
            f"expected a ledger of version {_VERSION} at {path}, got version {version}; use a "
            "newer version of hushgrad"
        )


def _other_file(path: Path) -> Refused:
    return Refused(
        f"expected a ledger at {path}, got another file or a damaged one; name a file of its own, "
        "or restore it from a copy"
    )


def damage_refusal(path: Path, how: str) -> Refused:
    """Return the refusal of a ledger whose contents are not what was written."""
    return Refused(
        f"expected an undamaged ledger at {path}, got {how}; restore it from a backup, and charge "
        "again what was spent since"
    )


@contextmanager
def explain_ledger_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and the operating system into a `Refused` with a remedy."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise _refusal(path, error) from error
    except OSError as error:
        raise Refused(
            f"expected a ledger that can be written at {path}, got: {error.strerror or error}; "
            "name a file in a folder that you may write to"
        ) from error


def _refusal(path: Path, error: sqlite3.DatabaseError) -> Refused:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return Refused(
            f"expected free space on the disk of the ledger {path}, got a full disk; free some "
            "space and continue: nothing of this transaction was written"
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Refused(
            f"expected the ledger {path} to be unlocked, got one that another process keeps "
            "locked; wait for it, or end it"
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return Refused(
            f"expected a writable ledger at {path} in a writable folder, got: {error}; change "
            "their permissions, or name another file"
        )
    if code == sqlite3.SQLITE_NOTADB:
        return _other_file(path)
    if code == sqlite3.SQLITE_CORRUPT:
        return damage_refusal(path, str(error))
    return Refused(
        f"expected to read and write the ledger {path}, got: {error}; nothing of this transaction "
        "was written: check its disk and folder"
    )


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        with suppress(sqlite3.Error):  # SQLite may have rolled back by itself
            connection.execute("ROLLBACK")


def _close(connections: dict[tuple[int, int], sqlite3.Connection]) -> None:
    for owner in [owner for owner in connections if owner[0] == os.getpid()]:
        connections.pop(owner).close()
