"""Detects earlier fits of this process on the same records, as far as possible.

A hyperparameter search fits the same records many times, and each fit costs its own ε. Two signs
show that a fit is one of several: its estimator is a clone (`sklearn.base.clone`) of the same
estimator, as in a search, or some of its rows are bit-identical to rows that were fitted before.
Fits in other processes are not seen, and only a sample of the rows is compared, so the number found
is a lower bound.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from hushgrad.types import Relation

_SAMPLE = 128  # remembered rows per fit: those with the smallest digests, the same in every subset
_FITS = 1024  # remembered fits
_PIECE = 2**22  # numbers that are hashed at once, which bounds the memory
_SEED = secrets.randbits(64)

_lock = threading.Lock()
_known: deque[Fit] = deque(maxlen=_FITS)
_copies: dict[str, int] = {}


@dataclass(frozen=True)
class Fit:
    """One private fit: the family of its estimator, a sample of its rows, and what it cost."""

    family: str
    sample: frozenset[int]
    relation: Relation
    epsilon: float
    delta: float

    def shares_with(self, other: Fit) -> bool:
        """Return whether both are known to have used some of the same records."""
        return self.family == other.family or not self.sample.isdisjoint(other.sample)


@dataclass(frozen=True)
class Earlier:
    """The earlier fits on records of this one, added up.

    `unlike` counts those under another relation, whose ε cannot be added. `copies` counts pickles
    and copies of the unfitted estimator, which may have been fitted in other processes.
    """

    fits: int = 0
    epsilon: float = 0.0
    delta: float = 0.0
    unlike: int = 0
    copies: int = 0


def new_family() -> str:
    """Return a new name for an estimator and its clones."""
    return secrets.token_hex(8)


def note_copy(family: str) -> None:
    """Remember that an unfitted estimator of this family was pickled or copied."""
    with _lock:
        _copies[family] = _copies.get(family, 0) + 1


def remember_fit(fit: Fit) -> Earlier:
    """Remember a fit, and return those before it that used shares of the same records."""
    with _lock:
        found = [other for other in _known if fit.shares_with(other)]
        _known.append(fit)
        copies = _copies.get(fit.family, 0)
    alike = [other for other in found if other.relation is fit.relation]
    return Earlier(
        fits=len(alike),
        epsilon=math.fsum(other.epsilon for other in alike),
        delta=math.fsum(other.delta for other in alike),
        unlike=len(found) - len(alike),
        copies=copies,
    )


def sample_of(features: Any, targets: np.ndarray) -> frozenset[int]:
    """Return the smallest digests of the rows; overlapping sets of records share most of them.

    The digests are keyed with random numbers of this process and never leave it.
    """
    columns = features.shape[1]
    words = np.random.Generator(np.random.Philox(_SEED)).integers(  # made odd below: no bit is lost
        2**63, size=columns + 1, dtype=np.uint64
    )
    words = 2 * words + np.uint64(1)
    digests = _bits(np.asarray(targets, dtype=np.float64)) * words[-1]
    if sparse.issparse(features):
        rows = sparse.csr_matrix(features)
        bits = sparse.csr_matrix((_bits(rows.data), rows.indices, rows.indptr), shape=rows.shape)
        digests = digests + bits @ words[:-1]
    else:
        step = max(1, _PIECE // max(columns, 1))
        for start in range(0, len(digests), step):
            piece = _bits(np.asarray(features[start : start + step]))
            digests[start : start + step] += (piece * words[:-1]).sum(1, dtype=np.uint64)
    return frozenset(np.unique(_mix(digests))[:_SAMPLE].tolist())


def _bits(numbers: np.ndarray) -> np.ndarray:
    """Return the bits of numbers; adding 0.0 makes -0.0 equal to 0.0."""
    return np.ascontiguousarray(numbers.astype(np.float64, copy=False) + 0.0).view(np.uint64)


def _mix(digests: np.ndarray) -> np.ndarray:
    """Mix the bits of the digests with a bijection (Stafford's mix 13)."""
    x = digests ^ (digests >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x = x * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
