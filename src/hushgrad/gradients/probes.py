"""Probe batches, made from the user's own records.

What is drawn for them is drawn by NumPy, which no mode of torch replaces: inside another
`WithoutRandomness` probes would else be all alike, and prove nothing.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from hushgrad.batches import records
from hushgrad.types import Batch, Params

_DRAWS = 8
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)


def probe_sizes(
    params: Params, batch: Batch, avoid: set[int] | frozenset[int] = frozenset()
) -> tuple[int, int]:
    """Two primes that divide no dimension in sight, so that what follows them is the batch."""
    sizes = {size for p in params.values() for size in p.shape}
    sizes |= {size for x in records.tensors(batch) for size in x.shape[1:]}
    free = [q for q in _PRIMES if q not in avoid and all(size % q for size in sizes if size)]
    first, second, *_ = [*free, *(q for q in _PRIMES if q not in avoid and q not in free)]
    return first, second


def distinct_records(batch: Batch, size: int, most: int = 4) -> Batch:
    """A few records that differ: drawn from the batch, and variations of them if it has too few.

    A variation may be no record that the loss accepts.
    """
    chance = np.random.default_rng()
    order = chance.permutation(size).tolist()
    chosen = records.take(batch, [order[i % size] for i in range(most)])
    known = distinct(chosen)
    if len(known) == most:
        return chosen
    own = records.take(chosen, known)
    repeated = records.take(chosen, [known[i % len(known)] for i in range(most - len(known))])
    # Whole numbers from a narrow range may come out as they were: several draws, the best counts.
    drawn = [_join(own, repeated, chance) for _ in range(_DRAWS)]
    return max(drawn, key=lambda few: len(distinct(few)))


def _join(own: Batch, repeated: Batch, chance: np.random.Generator) -> Batch:
    """Records, and variations of others behind them."""
    varied = iter(records.tensors(records.map_tensors(lambda x: _vary(x, chance), repeated)))
    return records.map_tensors(lambda x: torch.cat([x, next(varied)]), own)


@functools.lru_cache(maxsize=256)
def irregular(count: int, size: int) -> Tensor:
    """Which of `count` records stands at each of `size` places, as often as any other.

    Without a period: a model that mixes records at some distance, half of the batch, say, would
    meet the same record again there. The first and the last differ, which some models compare.
    """
    chance = np.random.default_rng(size)
    turns = [chance.permutation(count) for _ in range(-(-size // count))]
    places = torch.from_numpy(np.concatenate(turns)[:size])
    if count > 1 and places[0] == places[-1]:
        other = int((places != places[0]).nonzero()[-1])
        places[[other, -1]] = places[[-1, other]]
    return places


@functools.lru_cache(maxsize=256)
def replaced_places(size: int, variant: int = 0) -> Tensor:
    """Which half of the places gets other records, without a period.

    Variants 0 and 1 are complements: of any two places that one of them parts, each sees the
    other's record replaced once. Of the first and the last these are such.
    """
    chance = np.random.default_rng(3 * size + variant // 2)
    places = torch.zeros(size, dtype=torch.bool)
    while True:
        order = torch.from_numpy(chance.permutation(size))
        places = torch.zeros(size, dtype=torch.bool).index_fill(0, order[: size // 2], True)
        if size < 4 or not any(torch.equal(places.roll(i), places) for i in range(1, size)):
            break
    if size > 1 and places[0] == places[-1]:
        other = int((places != places[0]).nonzero()[0])
        places[[other, -1]] = places[[-1, other]]
    return places if bool(places[0]) == bool(variant % 2) else ~places


def variations(batch: Batch, seed: int) -> Batch:
    """Every record different from what it is; some may be none that the loss accepts."""
    chance = np.random.default_rng(seed)
    return records.map_tensors(lambda x: _vary(x, chance, by=1.0), batch)


def own_records(batch: Batch, size: int, most: int = 4) -> Batch:
    """A few of the batch's own records, alike or not."""
    return records.take(batch, [i % size for i in range(most)])


def distinct(batch: Batch) -> list[int]:
    """Positions of records that differ from all before them."""
    different: list[int] = []
    for i in range(records.count(batch)):
        twins = (all(torch.equal(x[i], x[j]) for x in records.tensors(batch)) for j in different)
        if not any(twins):
            different.append(i)
    return different


def _vary(x: Tensor, chance: np.random.Generator, *, by: float = 0.1) -> Tensor:
    """Shift real entries by this share; draw others anew from the values that they have shown."""
    if x.is_floating_point():
        noise = torch.as_tensor(chance.standard_normal(x.shape)).to(x.device, x.dtype)
        return x + by * noise * (x.abs() + 0.1)
    if not x.numel() or x.is_complex():
        return x
    # From the values themselves, not from all between: a label of -100 stands for none.
    known = x.unique()
    if len(known) == 1:
        known = torch.cat([known, known.new_tensor([0, 1])]).unique()
    drawn = torch.as_tensor(chance.integers(len(known), size=x.shape))
    varied: Tensor = known[drawn.to(x.device)]
    return varied


_LOUDNESS = (1.0, -30.0, 1e3, -1e6)  # the loudest turns the sign of every sum over the batch


def loudness(places: Tensor) -> Tensor:
    """What the records at these places are multiplied by, and 1 elsewhere."""
    factors = torch.ones(len(places))
    count = int(places.sum())
    factors[places] = torch.tensor(_LOUDNESS).repeat(-(-count // len(_LOUDNESS)))[:count]
    return factors


def beside_others(batch: Batch, places: Tensor | None = None, *, loud: bool) -> Batch:
    """The batch with the records at these places replaced by neighbours, the loud multiplied."""
    places = _or_half(batch, places)
    factors = loudness(places)

    def neighbour(x: Tensor) -> Tensor:
        other = x.roll(1, 0)
        if not loud or not x.is_floating_point():
            return other
        factor = factors.to(x.device, x.dtype)
        return other * factor.view(-1, *[1] * (x.dim() - 1))

    return _beside(batch, places, records.map_tensors(neighbour, batch))


def beside_nan(batch: Batch, places: Tensor | None = None) -> Batch:
    """The batch with nan in the records at these places: what they touch at all is nan, too."""
    return _beside(
        batch,
        _or_half(batch, places),
        records.map_tensors(
            lambda x: torch.full_like(x, torch.nan) if x.is_floating_point() else x, batch
        ),
    )


def beside_variations(batch: Batch, places: Tensor | None = None) -> Batch:
    """The batch with the records at these places varied, also in what all have in common.

    Such is a mask that leaves nothing out in these records, and will in others.
    """
    return _beside(batch, _or_half(batch, places), variations(batch, seed=0))


def _or_half(batch: Batch, places: Tensor | None) -> Tensor:
    return replaced_places(records.count(batch)) if places is None else places


def _beside(batch: Batch, places: Tensor, others: Batch) -> Batch:
    """The records at these places from others."""
    incoming = iter(records.tensors(others))

    def chosen(x: Tensor) -> Tensor:
        place = places.to(x.device).view(-1, *[1] * (x.dim() - 1))
        return torch.where(place, next(incoming), x)

    return records.map_tensors(chosen, batch)
