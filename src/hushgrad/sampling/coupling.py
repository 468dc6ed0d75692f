"""Tests, on the real records, that loading does not make one record depend on others in its batch.

A collate function that pads to the longest record, or standardises over the batch, makes each
record's entries depend on the other records in the batch, and so does a data set that transforms
whole batches. Then one record changes the gradients of all, and clipping does not bound its
influence.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad.batches.nested import leaves_of
from hushgrad.sampling.sources import Source
from hushgrad.types import Batch, Refused

Collate = Callable[[list[Any]], Batch]
"""Combines a list of records into a batch. It must treat each alone: pad to a public length."""

_FEWEST = 4  # records in a trial; a smaller batch is repeated
_ALONE = 4  # records that are also collated one by one
# Factors for the other records; the largest flips the sign of every sum over the batch.
_LOUDNESS = (1.0, -30.0, 1e3, -1e6)
_FAR = 1e6


def refuse_coupling(source: Source, collate: Collate | None, positions: list[int]) -> None:
    """Refuse a data set or collate function that makes records depend on each other."""
    with torch.random.fork_rng(devices=[]):
        if source.fetches_together:
            refuse_coupling_fetch(source.records, positions)
        if collate is not None:
            refuse_coupling_collate(collate, source.records(positions))


def refuse_coupling_collate(collate: Collate, records: Sequence[Any]) -> None:
    """Refuse a collate function that makes these records depend on each other.

    Each half of the records is collated together with other records: copies of itself, the
    other half in another order, and the other half scaled, constant, NaN, longer and shorter. Its
    entries must stay bit-identical. Every trial uses the same random numbers of torch, NumPy and
    Python.
    """
    rows = [records[i % len(records)] for i in range(max(len(records), _FEWEST))]
    places = range(len(rows))
    whole = _collate(collate, rows)
    _compare(whole, _collate(collate, rows), places, _UNREPEATABLE)
    for kept in (places[::2], places[1::2]):
        for beside in _beside_others(rows, kept):
            try:
                found = _collate(collate, beside)
            except Refused:
                raise
            except Exception:  # the function does not accept such records
                continue
            _compare(whole, found, kept)
    redrawn = _collate(collate, rows, seed=1)
    if not _alike(whole, redrawn):
        return  # it draws random numbers, and other ones for a smaller batch
    for i in places[:: -(-len(rows) // _ALONE)]:
        _compare([x[i : i + 1] for x in whole], _collate(collate, rows[i : i + 1]), [0])
    half = places[: len(rows) // 2]
    _compare(whole, _collate(collate, rows[: len(half)]), half)


def refuse_coupling_fetch(fetch: Callable[[list[int]], list[Any]], positions: list[int]) -> None:
    """Refuse a data set whose records depend on the other records fetched in the same call.

    If records are random (augmentation), only their shapes are compared.
    """
    with _same_draws():
        together = fetch(positions)
    for i in range(0, len(positions), -(-len(positions) // _ALONE)):
        with _same_draws():
            (alone,) = fetch([positions[i]])
            (again,) = fetch([positions[i]])  # random records differ from the first fetch
        if not _alike(alone, again):
            alone, together[i] = _shapes(alone), _shapes(together[i])
        if not _alike(alone, together[i]):
            raise Refused(
                "expected a data set that makes each record by itself, got one whose records "
                "depend on the other records in the batch (a transform of whole batches that "
                f"pads to the longest, or standardises?); {_REMEDY}"
            )


# --- one trial ----------------------------------------------------------------------------------


def _collate(collate: Collate, rows: Sequence[Any], *, seed: int = 0) -> list[Tensor]:
    """Collate copies of these records, and return the tensors of the batch."""
    given = list(rows)
    with suppress(TypeError, RuntimeError):  # some objects cannot be copied
        given = [copy.deepcopy(row) for row in rows]  # collate may pop keys from its records
    with _same_draws(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about huge values and NaN
        batch = collate(given)
    if not all(map(_alike, given, rows)):
        raise Refused(
            "expected a collate function that does not change its records, got one that writes "
            "to them, which changes a data set that holds them in memory; write to copies"
        )
    require_each(batch, len(rows))
    return leaves_of(batch)


def require_each(batch: Batch, size: int) -> None:
    """Refuse a batch that does not have exactly one row for each of its records."""
    if any(x.shape[:1] != (size,) for x in leaves_of(batch)):
        raise Refused(
            "expected a row for each of the records that collate was given, in their order, got "
            "another number of rows; remove unwanted records from the data set, or give them "
            "weight 0 in the loss"
        )


def _compare(
    expected: list[Tensor], found: list[Tensor], kept: Sequence[int], why: str | None = None
) -> None:
    """Require bit-identical entries in the rows that were kept."""
    if len(expected) != len(found):
        raise Refused(
            f"{_EXPECTED} whose number of tensors depends on the records; return the same "
            "structure for every batch"
        )
    for x, y in zip(expected, found, strict=True):
        if x.shape[1:] != y.shape[1:] or x.dtype != y.dtype:
            raise Refused(f"{_EXPECTED} {_SHAPES}; {_REMEDY}")
        if not _alike(x[list(kept)], y[list(kept)]):
            raise Refused(f"{_EXPECTED} {why or _VALUES}; {_REMEDY}")


_EXPECTED = "expected a collate function that treats each record by itself, got one"
_SHAPES = (
    "where a record's shape depends on the other records in the batch, as with padding to the "
    "longest record, with a mask or without"
)
_VALUES = (
    "where a record's entries depend on the other records in the batch (a mean, a deviation or a "
    "maximum over the batch, sorting, or random numbers whose order depends on the records?)"
)
_UNREPEATABLE = (
    "that returns different batches for the same records (does it count its calls, or use a "
    "random generator of its own? Use the global one of torch, NumPy or Python)"
)
_REMEDY = (
    'pad to a fixed length (padding="max_length", max_length=…), scale by public constants, and '
    "keep the order"
)


@contextmanager
def _same_draws(seed: int = 0) -> Iterator[None]:
    """Start every such block from the same global random states, and restore them afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


# --- variations of the other records ------------------------------------------------------------


def _beside_others(rows: list[Any], kept: Sequence[int]) -> Iterator[list[Any]]:
    """Yield the rows, with those that are not in `kept` replaced in several ways."""
    others = [i for i in range(len(rows)) if i not in set(kept)]

    def replaced(by: Callable[[int, int], Any]) -> list[Any]:
        beside = list(rows)
        for number, i in enumerate(others):
            beside[i] = by(number, i)
        return beside

    yield replaced(lambda number, i: rows[kept[number % len(kept)]])
    yield replaced(lambda number, i: rows[others[number - 1]])
    yield replaced(lambda number, i: _vary(rows[i], _scaled(_LOUDNESS[number % len(_LOUDNESS)])))
    for vary in (_filled(-_FAR), _filled(_FAR), _filled(np.nan), _longer, _shorter):
        yield replaced(lambda number, i, vary=vary: _vary(rows[i], vary))  # type: ignore[misc]


def _vary(record: Any, vary: Callable[[Any], Any]) -> Any:
    """Return the record with `vary` applied to its tensors, arrays, numbers and texts."""
    if isinstance(record, Mapping):
        return {key: _vary(value, vary) for key, value in record.items()}
    if isinstance(record, tuple):
        values = [_vary(value, vary) for value in record]
        return type(record)(*values) if hasattr(record, "_fields") else type(record)(values)
    if isinstance(record, list) and not all(isinstance(x, int | float) for x in record):
        return vary([_vary(value, vary) for value in record])
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        names = [field.name for field in dataclasses.fields(record) if field.init]
        return dataclasses.replace(record, **{n: _vary(getattr(record, n), vary) for n in names})
    return vary(record)


def _scaled(factor: float) -> Callable[[Any], Any]:
    return lambda x: _on_reals(x, lambda real: real * factor)


def _filled(value: float) -> Callable[[Any], Any]:
    return lambda x: _on_reals(x, lambda real: real * 0 + value)


def _on_reals(x: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to real numbers, but not to integers, which may be labels."""
    if isinstance(x, list):
        return [_on_reals(value, function) for value in x]
    tensor = isinstance(x, Tensor) and x.is_floating_point()
    array = isinstance(x, np.ndarray | np.generic) and np.issubdtype(x.dtype, np.floating)
    if not (tensor or array or isinstance(x, float)):
        return x
    with np.errstate(all="ignore"):
        varied = function(x)
        return varied.astype(x.dtype) if array else varied


def _longer(x: Any) -> Any:
    """Return a text, a row or a tensor followed by itself."""
    if isinstance(x, str):
        return f"{x} {x}"
    if isinstance(x, Tensor):
        return torch.cat([x, x]) if x.dim() else x
    if isinstance(x, np.ndarray):
        return np.concatenate([x, x]) if x.ndim else x
    return x + x if isinstance(x, list) else x


def _shorter(x: Any) -> Any:
    """Return the first half of a text, a row or a tensor."""
    long = isinstance(x, str | list) or (isinstance(x, Tensor | np.ndarray) and x.ndim > 0)
    return x[: -(-len(x) // 2)] if long else x


# --- comparisons --------------------------------------------------------------------------------


def _alike(one: Any, other: Any) -> bool:
    """Return whether two records are bit-identical, comparing only the keys that both have."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same_tensor(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and _same_array(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_alike(one[key], other[key]) for key in one.keys() & other.keys())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return type(one) is type(other) and _alike(vars(one), vars(other))
    if isinstance(one, int | float | str | bytes | np.generic):
        return bool(one == other) or (one != one and other != other)
    return type(one) is type(other)


def _same_tensor(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())


def _same_array(x: Any, y: Any) -> bool:
    return x.tobytes() == y.tobytes() if x.dtype != object else _alike(x.tolist(), y.tolist())


def _shapes(record: Any) -> Any:
    """Return the record's structure with shapes and lengths instead of values."""
    if isinstance(record, Mapping):
        return {key: _shapes(value) for key, value in record.items()}
    if isinstance(record, Tensor | np.ndarray):
        return tuple(record.shape)
    if isinstance(record, list | tuple):
        return [_shapes(value) for value in record]
    return type(record).__name__
