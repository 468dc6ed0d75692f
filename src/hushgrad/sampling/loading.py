"""Loads the batches at drawn positions, in order, with or without worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hushgrad.batches.nested import leaves_of, map_leaves
from hushgrad.rng import Rng
from hushgrad.sampling.coupling import Collate, refuse_coupling, require_each
from hushgrad.sampling.draws import Positions
from hushgrad.sampling.scheme import Draws
from hushgrad.sampling.sources import Columns, Source, source_of
from hushgrad.types import Batch, Refused

_LONGEST_GAP = 128  # batches between two tests of the collate function
_MOST_TESTED = 64  # records in such a test, except in the first one


class Loader:
    """Loads batches from a tensor, an array, a tuple or mapping of them, or a map-style data set.

    Guarantees: batches keep the structure of a record, and do not depend on `workers`. The length
    of the data is private: nothing shows it and no divisor depends on it. A collate function that
    mixes records is refused: at batches 1, 2, 4, 8, … and every 128th, records are collated
    together with different other records, and must stay bit-identical.

    Args:
        data: the records.
        collate: combines a list of records into a batch, each on its own: pad to a fixed length,
            not to the longest record of the batch.
        workers: the number of processes that prefetch from a map-style data set.

    Raises:
        Refused: if the data have no record, no length or no positions, or if records are mixed.

    Example:
        >>> import numpy as np
        >>> loader = Loader((torch.arange(6).view(3, 2), torch.tensor([0, 1, 2])))
        >>> loader.load(np.array([0, 2]))
        (tensor([[0, 1],
                [4, 5]]), tensor([0, 2]))
    """

    def __init__(self, data: Any, *, collate: Collate | None = None, workers: int = 0) -> None:
        if workers < 0:
            raise ValueError(f"expected workers >= 0, got {workers}; 0 loads in this process")
        source = source_of(data)
        self._length = len(source)
        if self._length == 0:
            raise Refused(
                "expected at least one record, which shows the structure of a batch, got an empty "
                "data set; load the data before the run starts"
            )
        self._fetch = _Fetch(source, collate)
        # Workers would only copy what this process already has in memory.
        self._workers = 0 if isinstance(source, Columns) and collate is None else workers
        self._empty = _empty_like_first(self._fetch)
        self._loaded = 0

    def __len__(self) -> int:
        """Return the number of records. It is private: do not show it."""
        return self._length

    def fingerprint(self, key: bytes) -> str:
        """Return a keyed digest of all data; "" if records are read one by one when needed."""
        source = self._fetch.source
        return source.fingerprint(key) if isinstance(source, Columns) else ""

    @property
    def columns(self) -> Any:
        """The tensors or arrays that hold all records; () if records are fetched one by one."""
        source = self._fetch.source
        return source.columns if isinstance(source, Columns) and not self._fetch.collate else ()

    def load(self, positions: Positions) -> Batch:
        """Return the batch of these records, in this order; positions without a record are skipped.

        If no record is left, the batch is empty, with the structure, dtypes and shapes of record 0
        (and none of its values).
        """
        return self._or_empty(self._fetch[self._present(positions)])

    def load_each(self, draws: Iterable[Positions]) -> Iterator[Batch]:
        """Yield the batches of these draws, in order; workers prefetch the next ones."""
        if self._workers == 0:
            yield from map(self.load, draws)
            return
        # Without a separate generator torch's loader would draw the workers' seed from the global
        # one, and a model's dropout would depend on the number of workers.
        seeds = torch.Generator().manual_seed(torch.initial_seed())
        lists = (self._present(positions) for positions in draws)
        # With `batch_size=None` torch treats each list of positions as one item.
        fetched: DataLoader[Batch] = DataLoader(
            self._fetch,
            batch_size=None,
            sampler=lists,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            generator=seeds,
        )
        yield from map(self._or_empty, fetched)

    def batches(
        self, scheme: Draws, *, num_records: int, steps: range, rng: Rng
    ) -> Iterator[Batch]:
        """Yield the batches of these steps, drawn by `scheme` for the public `num_records`."""
        span = scheme.span(num_records, length=self._length)
        return self.load_each(scheme.draw(span, step=step, rng=rng) for step in steps)

    def _present(self, positions: Positions) -> list[int]:
        present: list[int] = positions[positions < self._length].tolist()
        if present:
            self._loaded += 1
            if self._loaded & (self._loaded - 1) == 0 or self._loaded % _LONGEST_GAP == 0:
                tested = present if self._loaded == 1 else _some_of(present)
                refuse_coupling(self._fetch.source, self._fetch.collate, tested)
        return present

    def _or_empty(self, batch: Batch | None) -> Batch:
        return self._empty if batch is None else batch


class _Fetch(Dataset[Any]):
    """Fetches the batch at a list of positions, here or in a worker; None for an empty list."""

    def __init__(self, source: Source, collate: Collate | None) -> None:
        self.source, self.collate = source, collate

    def __getitem__(self, positions: list[int]) -> Batch | None:
        if not positions:
            return None
        batch = self.fetch(positions)
        if self.collate is not None:
            require_each(batch, len(positions))
        return batch

    def fetch(self, positions: list[int]) -> Batch:
        """Return the batch without checking its number of rows."""
        if self.collate is None:
            return self.source.batch(positions)
        return self.collate(self.source.records(positions))


def _some_of(positions: list[int]) -> list[int]:
    """Return at most 64 of the positions, evenly spaced."""
    return positions[:: -(-len(positions) // _MOST_TESTED)]


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _empty_like_first(fetch: _Fetch) -> Batch:
    """Return an empty batch like record 0, after checking that records are in dimension 0.

    Two sizes are tried, because another dimension could have one of them by chance.
    """
    with torch.random.fork_rng(devices=[]):  # augmentation may draw random numbers
        probes = {size: fetch.fetch([0] * size) for size in (2, 3)}
    for size, probe in probes.items():
        leaves = leaves_of(probe)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise Refused(
                    f"expected a batch of tensors, got a {type(leaf).__name__}; convert it in "
                    "collate"
                )
        shapes = [tuple(leaf.shape) for leaf in leaves]
        if not shapes or any(shape[:1] != (size,) for shape in shapes):
            raise Refused(
                "expected a batch of tensors that all have the records in their first dimension, "
                f"got {f'shapes {shapes}' if shapes else 'no tensor'} for {size} records; move "
                "them to the front in collate, and let the loss close over what they share"
            )
    # Cloned, because a slice would keep the record's memory alive.
    return map_leaves(lambda x: x[:0].clone(), probes[2])
