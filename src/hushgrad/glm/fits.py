"""What this process has fitted before on shares of the same records, as far as that can be known.

A search over settings fits the same records again and again, and each fit costs its own ε. Two
signs tell that a fit is one of several: its estimator descends from the same one by
`sklearn.base.clone`, as all those of a search do, or some of its rows are bit-identical to rows
that were fitted before. Neither sees what other processes fit, and a sample of the rows stands
for all of them: what is found is a lower bound.
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

_SAMPLE = 128  # rows of a fit that are remembered: those of the least digests, in every share alike
_FITS = 1024  # fits that are remembered
_PIECE = 2**22  # numbers that are hashed at once
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
        """Whether both are known to have used the same records."""
        return self.family == other.family or not self.sample.isdisjoint(other.sample)


@dataclass(frozen=True)
class Earlier:
    """Fits before this one on shares of its records, added up.

    `unlike` are those under another relation, whose ε is of another kind. `copies` of the unfitted
    estimator were pickled or copied, and may have been fitted where this process does not see it.
    """

    fits: int = 0
    epsilon: float = 0.0
    delta: float = 0.0
    unlike: int = 0
    copies: int = 0


def new_family() -> str:
    """A name for an estimator and all that are cloned from it."""
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
    """The least digests of the rows: shares of the same records have most of them in common.

    The digests are keyed by numbers of this process and never leave it.
    """
    columns = features.shape[1]
    words = np.random.Generator(np.random.Philox(_SEED)).integers(  # odd, so that none loses a bit
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
    """The bits of numbers, with one zero."""
    return np.ascontiguousarray(numbers.astype(np.float64, copy=False) + 0.0).view(np.uint64)


def _mix(digests: np.ndarray) -> np.ndarray:
    """Every bit of the digest in every bit of the result, one to one (Stafford's mix 13)."""
    x = digests ^ (digests >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x = x * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
