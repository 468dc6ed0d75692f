"""Do the records of a batch meet before the model sees them? Tested on the records themselves.

A collate function that pads to the longest record, or standardises over the batch, makes one
record's entries depend on the others, and so does a data set that transforms a whole batch. Then
one record moves the gradients of all, and no bound on one of them holds.
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
"""Puts a list of records together. It must treat each by itself: pad to a public length."""

_FEWEST = 4  # records in a trial; a smaller batch is repeated
_ALONE = 4  # records that are tried by themselves
_LOUDNESS = (1.0, -30.0, 1e3, -1e6)  # the loudest turns the sign of every sum over the batch
_FAR = 1e6


def refuse_coupling(source: Source, collate: Collate | None, positions: list[int]) -> None:
    """Refuse records that meet on their way into a batch: in the data set, or in `collate`."""
    with torch.random.fork_rng(devices=[]):
        if source.fetches_together:
            refuse_coupling_fetch(source.records, positions)
        if collate is not None:
            refuse_coupling_collate(collate, source.records(positions))


def refuse_coupling_collate(collate: Collate, records: Sequence[Any]) -> None:
    """Refuse a collate function in which these records meet.

    Each half of them is collated beside others: copies of itself, the rest in another order, and
    the rest made loud, constant, NaN, longer and shorter. Its entries must keep their bits. Random
    numbers from the generators of torch, NumPy and Python are drawn alike in every trial.
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
            except Exception:  # it takes no such records
                continue
            _compare(whole, found, kept)
    redrawn = _collate(collate, rows, seed=1)
    if not _alike(whole, redrawn):
        return  # a smaller batch draws other numbers
    for i in places[:: -(-len(rows) // _ALONE)]:
        _compare([x[i : i + 1] for x in whole], _collate(collate, rows[i : i + 1]), [0])
    half = places[: len(rows) // 2]
    _compare(whole, _collate(collate, rows[: len(half)]), half)


def refuse_coupling_fetch(fetch: Callable[[list[int]], list[Any]], positions: list[int]) -> None:
    """Refuse a data set whose records change with what they are fetched with.

    Where records are drawn at random (augmentation), only their shapes are compared.
    """
    with _same_draws():
        together = fetch(positions)
    for i in range(0, len(positions), -(-len(positions) // _ALONE)):
        with _same_draws():
            (alone,) = fetch([positions[i]])
            (again,) = fetch([positions[i]])  # by other draws, where there are any
        if not _alike(alone, again):
            alone, together[i] = _shapes(alone), _shapes(together[i])
        if not _alike(alone, together[i]):
            raise Refused(
                "expected a data set that makes each record by itself, got one whose records "
                "change with the others that are fetched with them (a transform of whole batches "
                f"that pads to the longest, or standardises?); {_REMEDY}"
            )


# --- one trial ----------------------------------------------------------------------------------


def _collate(collate: Collate, rows: Sequence[Any], *, seed: int = 0) -> list[Tensor]:
    """The tensors of the batch of these records, of which the function gets copies."""
    given = list(rows)
    with suppress(TypeError, RuntimeError):  # of what cannot be copied
        given = [copy.deepcopy(row) for row in rows]  # it may take keys out of them
    with _same_draws(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loud records and NaN
        batch = collate(given)
    if not all(map(_alike, given, rows)):
        raise Refused(
            "expected a collate function that leaves its records as they are, got one that writes "
            "to them, which a data set that holds them would keep; write to copies"
        )
    require_each(batch, len(rows))
    return leaves_of(batch)


def require_each(batch: Batch, size: int) -> None:
    """Refuse a batch that has not one row for each of its records."""
    if any(x.shape[:1] != (size,) for x in leaves_of(batch)):
        raise Refused(
            "expected a row for each of the records that collate was given, in their order, got "
            "another number of rows; leave records out of the data set, or let the loss give them "
            "no weight"
        )


def _compare(
    expected: list[Tensor], found: list[Tensor], kept: Sequence[int], why: str | None = None
) -> None:
    """Require the same entries, bit for bit, in the rows that were kept."""
    if len(expected) != len(found):
        raise Refused(f"{_EXPECTED} whose batches have other tensors beside other records")
    for x, y in zip(expected, found, strict=True):
        if x.shape[1:] != y.shape[1:] or x.dtype != y.dtype:
            raise Refused(f"{_EXPECTED} {_SHAPES}; {_REMEDY}")
        if not _alike(x[list(kept)], y[list(kept)]):
            raise Refused(f"{_EXPECTED} {why or _VALUES}; {_REMEDY}")


_EXPECTED = "expected a collate function that treats each record by itself, got one"
_SHAPES = (
    "that gives a record another shape beside other records, as padding to the longest of a batch "
    "does, with a mask or without"
)
_VALUES = (
    "that gives a record other entries beside other records (a mean, a deviation or a maximum over "
    "the batch, sorting, or random numbers whose order depends on the records?)"
)
_UNREPEATABLE = (
    "that returns different batches for the same records (a count of its calls, or a random "
    "generator of its own, where torch's, NumPy's or Python's global one can be tested?)"
)
_REMEDY = (
    'pad to a fixed length (padding="max_length", max_length=…), scale by public constants, and '
    "keep the order"
)


@contextmanager
def _same_draws(seed: int = 0) -> Iterator[None]:
    """Draw from the same global random states in every such block, and put them back."""
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


# --- records in other company -------------------------------------------------------------------


def _beside_others(rows: list[Any], kept: Sequence[int]) -> Iterator[list[Any]]:
    """The rows, with what was not kept replaced in several ways."""
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
    """The record with each tensor, array, number, text and row of numbers varied."""
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
    """Apply `function` to real numbers. Whole ones, which may be labels, stay as they are."""
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
    """A text, a row or a tensor followed by itself."""
    if isinstance(x, str):
        return f"{x} {x}"
    if isinstance(x, Tensor):
        return torch.cat([x, x]) if x.dim() else x
    if isinstance(x, np.ndarray):
        return np.concatenate([x, x]) if x.ndim else x
    return x + x if isinstance(x, list) else x


def _shorter(x: Any) -> Any:
    """The first half."""
    long = isinstance(x, str | list) or (isinstance(x, Tensor | np.ndarray) and x.ndim > 0)
    return x[: -(-len(x) // 2)] if long else x


# --- comparisons --------------------------------------------------------------------------------


def _alike(one: Any, other: Any) -> bool:
    """Bit-identical in all that both are known to have; a key that was taken out does not count."""
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
    """What is public of a record's structure: shapes and lengths in the place of values."""
    if isinstance(record, Mapping):
        return {key: _shapes(value) for key, value in record.items()}
    if isinstance(record, Tensor | np.ndarray):
        return tuple(record.shape)
    if isinstance(record, list | tuple):
        return [_shapes(value) for value in record]
    return type(record).__name__
