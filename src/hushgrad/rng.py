"""Randomness as an argument: cryptographic, and keyed, so that a step can be replayed."""

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
_KINDS = ("secret", "reproducible")  # by whether it is reproducible
_ZEROS = memoryview(bytes(1 << 17))  # what is encrypted is the same for all streams


class Stream:
    """The words of a key stream one after the other, in memory that is used again."""

    def __init__(self, encryptor: CipherContext, room: int) -> None:
        self._encryptor, self._raw = encryptor, bytearray(8 * room + 15)  # the cipher asks for 15
        self._zeros = _ZEROS if 8 * room <= len(_ZEROS) else memoryview(bytes(8 * room))

    def take(self, count: int) -> UInt64[ndarray, " count"]:
        """The next words; they stand until others are taken."""
        self._encryptor.update_into(self._zeros[: 8 * count], self._raw)
        words = np.frombuffer(self._raw, dtype="<u8", count=count)
        return words.astype(np.uint64, copy=False)


class Rng:
    """A secret key, and every random number that follows from it.

    `derive` names a new key after what it is for, so that no two uses share a number. Draws are an
    AES-256 key stream in counter mode: who does not have the key cannot tell them from chance.
    """

    def __init__(self, key: bytes, *, reproducible: bool) -> None:
        self._key, self.reproducible = key, reproducible

    @classmethod
    def from_os(cls) -> Rng:
        """A key that nobody knows, from the operating system."""
        return cls(secrets.token_bytes(32), reproducible=False)

    @classmethod
    def fixed(cls, seed: int) -> Rng:
        """The same numbers at every run. What they protect is reproducible, and not private.

        >>> Rng.fixed(3)
        Rng(reproducible, not private)
        """
        digest = hashlib.blake2b(f"seed {seed}".encode(), digest_size=32).digest()
        return cls(digest, reproducible=True)

    def derive(self, *labels: Label) -> Rng:
        """The generator of one purpose: the same labels give the same numbers.

        >>> rng = Rng.fixed(0)
        >>> rng.derive("noise", 3).words(1) == rng.derive("noise", 3).words(1)
        array([ True])
        """
        return Rng(self._hashed(b"", labels), reproducible=self.reproducible)

    def tag(self, *labels: Label) -> bytes:
        """32 bytes for these labels, that nobody without the key can tell from chance.

        They are unlike the key of the generator that the same labels derive.
        """
        return self._hashed(b"tag", labels)

    def _hashed(self, purpose: bytes, labels: tuple[Label, ...]) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=32, person=purpose)
        for label in labels:
            kind, text = type(label).__name__, label
            encoded = text if isinstance(text, bytes) else str(text).encode()
            digest.update(f"{kind} {len(encoded)} ".encode() + encoded)  # no two lists alike
        return digest.digest()

    def words(self, count: int, *, start: int = 0) -> UInt64[ndarray, " count"]:
        """The words from `start` on of this key's stream, 64 random bits each."""
        skipped = start % 2
        stream = self.stream(start=start - skipped, room=count + skipped)
        return stream.take(count + skipped)[skipped:]

    def stream(self, *, start: int, room: int) -> Stream:
        """The words from `start` on, an even number, to be taken in turn, up to `room` at once."""
        block = (start // 2).to_bytes(16, "big")  # a block of AES holds two words
        return Stream(Cipher(algorithms.AES(self._key), modes.CTR(block)).encryptor(), room)

    def uniforms(self, count: int, *, start: int = 0) -> Float64[ndarray, " count"]:
        """Uniform numbers `(k + ½)·2⁻⁵²`: never 0, never 1, all equally far apart."""
        return ((self.words(count, start=start) >> np.uint64(12)) + 0.5) * 2.0**-52

    @property
    def name(self) -> str:
        """What tells this key from others and gives nothing of it away."""
        return self.derive("name").words(2).tobytes().hex()

    def write(self, path: Path) -> None:
        """Write the key to a new file that only its owner can read."""
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "w", encoding="ascii") as file:
            file.write(self._written() + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, path: Path) -> Rng:
        """The generator whose key was written to this file."""
        found = path.read_text(encoding="ascii", errors="replace").split()
        if len(found) == 4 and found[1] in _KINDS and len(found[2]) == 64:
            with suppress(ValueError):
                own = cls(bytes.fromhex(found[2]), reproducible=found[1] == _KINDS[True])
                if own._written().split() == found:
                    return own
        raise ValueError(
            f"expected the key of a run in {path}, got something else or one that was changed; "
            "remove the file to go on with a new key, at the cost of the steps since the checkpoint"
        )

    def _written(self) -> str:
        # The tag tells a key whose kind was edited: secret is what nobody else ever knew.
        kind = _KINDS[self.reproducible]
        return f"{_FILE} {kind} {self._key.hex()} {self.tag('file', kind)[:16].hex()}"

    def __repr__(self) -> str:
        kind = "reproducible, not private" if self.reproducible else "from the operating system"
        return f"Rng({kind})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Rng holds a key and is not pickled; write it to a file of its own")
