"""Randomness as an argument: a keyed cryptographic generator, so that a step can be replayed."""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from jaxtyping import Float64, UInt64
from numpy import ndarray

Label = int | str | bytes

_FILE = "hushgrad-key-2"
_KINDS = ("secret", "reproducible")  # indexed by `reproducible`
_ZEROS = memoryview(bytes(1 << 17))  # in counter mode, encrypting zeros yields the key stream


class Stream:
    """The words of a key stream one after the other, in a buffer that every call reuses."""

    def __init__(self, encryptor: CipherContext, room: int) -> None:
        # `update_into` demands a buffer that is a block less one byte longer than its input.
        self._encryptor, self._raw = encryptor, bytearray(8 * room + 15)
        self._zeros = _ZEROS if 8 * room <= len(_ZEROS) else memoryview(bytes(8 * room))

    def take(self, count: int) -> UInt64[ndarray, " count"]:
        """Return the next words; the next call overwrites them."""
        self._encryptor.update_into(self._zeros[: 8 * count], self._raw)
        words = np.frombuffer(self._raw, dtype="<u8", count=count)
        return words.astype(np.uint64, copy=False)


class Rng:
    """A secret key, and a generator of all random numbers that follow from it.

    Use `Rng.from_os()` for private training and `Rng.fixed(seed)` for tests.

    Guarantees: whoever does not have the key cannot tell the numbers from uniform ones (AES-256 in
    counter mode). Keys derived for different purposes share no numbers. The same key and labels
    give the same numbers, so a step can be replayed. Keys are never shown and never pickled.

    Args:
        key: 32 bytes.
        reproducible: True if others may know the key; a run with it claims no privacy.

    Example:
        >>> rng = Rng.fixed(0).derive("noise", 3)
        >>> rng.uniforms(2).round(3)
        array([0.572, 0.691])
    """

    def __init__(self, key: bytes, *, reproducible: bool) -> None:
        self._key, self.reproducible = key, reproducible

    @classmethod
    def from_os(cls) -> Rng:
        """Return a generator with a new secret key from the operating system."""
        return cls(secrets.token_bytes(32), reproducible=False)

    @classmethod
    def fixed(cls, seed: int) -> Rng:
        """Return a generator that a public seed determines: reproducible, and not private.

        >>> Rng.fixed(3)
        Rng(reproducible, not private)
        """
        digest = hashlib.blake2b(f"seed {seed}".encode(), digest_size=32).digest()
        return cls(digest, reproducible=True)

    def derive(self, *labels: Label) -> Rng:
        """Return the generator for one purpose: the same labels give the same numbers.

        >>> rng = Rng.fixed(0)
        >>> rng.derive("noise", 3).words(1) == rng.derive("noise", 3).words(1)
        array([ True])
        """
        return Rng(self._hash(b"", labels), reproducible=self.reproducible)

    def tag(self, *labels: Label) -> bytes:
        """Return 32 pseudorandom bytes for these labels; they are safe to publish.

        They are independent of the key that `derive` makes from the same labels.
        """
        return self._hash(b"tag", labels)

    def _hash(self, purpose: bytes, labels: tuple[Label, ...]) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=32, person=purpose)
        for label in labels:
            kind, text = type(label).__name__, label
            encoded = text if isinstance(text, bytes) else str(text).encode()
            # Type and length make the encoding injective: ("a", "b") is not ("ab",), 1 not "1".
            digest.update(f"{kind} {len(encoded)} ".encode() + encoded)
        return digest.digest()

    def words(self, count: int, *, start: int = 0) -> UInt64[ndarray, " count"]:
        """Return `count` words of 64 random bits, from position `start` of this key's stream."""
        skipped = start % 2
        stream = self.stream(start=start - skipped, room=count + skipped)
        return stream.take(count + skipped)[skipped:]

    def stream(self, *, start: int, room: int) -> Stream:
        """Return a stream from position `start`, which is even, for up to `room` words a call."""
        block = (start // 2).to_bytes(16, "big")  # a block of AES holds two words
        return Stream(Cipher(algorithms.AES(self._key), modes.CTR(block)).encryptor(), room)

    def uniforms(self, count: int, *, start: int = 0) -> Float64[ndarray, " count"]:
        """Return uniform numbers of the form `(k + ½)·2⁻⁵²`: evenly spaced, never 0 and never 1."""
        return ((self.words(count, start=start) >> np.uint64(12)) + 0.5) * 2.0**-52

    @property
    def name(self) -> str:
        """A public identifier of the key, which reveals nothing about it."""
        return self.derive("name").words(2).tobytes().hex()

    def write(self, path: Path) -> None:
        """Write the key to a new file that only its owner can read."""
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "w", encoding="ascii") as file:
            file.write(self._text() + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, path: Path) -> Rng:
        """Return the generator whose key `write` stored in this file.

        Raises:
            ValueError: if the file is not a key, or was edited.
        """
        found = path.read_text(encoding="ascii", errors="replace").split()
        if len(found) == 4 and found[1] in _KINDS and len(found[2]) == 64:
            with suppress(ValueError):
                own = cls(bytes.fromhex(found[2]), reproducible=found[1] == _KINDS[True])
                if own._text().split() == found:
                    return own
        raise ValueError(
            f"expected the key of a run in {path}, got another file or an edited key; "
            "remove the file to go on with a new key, at the cost of the steps since the checkpoint"
        )

    def _text(self) -> str:
        # The tag detects an edited kind: a public key must not be relabelled as secret.
        kind = _KINDS[self.reproducible]
        return f"{_FILE} {kind} {self._key.hex()} {self.tag('file', kind)[:16].hex()}"

    def __repr__(self) -> str:
        kind = "reproducible, not private" if self.reproducible else "from the operating system"
        return f"Rng({kind})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "expected not to pickle an Rng, which holds a secret key; store it with Rng.write(path)"
        )
