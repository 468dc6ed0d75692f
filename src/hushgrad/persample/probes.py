"""Probe batches, made from the user's own records."""

from __future__ import annotations

import torch
from torch import Tensor

from hushgrad.persample import records
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
    generator = torch.Generator()
    generator.seed()
    order = torch.randperm(size, generator=generator).tolist()
    chosen = records.take(batch, [order[i % size] for i in range(most)])
    known = distinct(chosen)
    if len(known) == most:
        return chosen
    own = records.take(chosen, known)
    repeated = records.take(chosen, [known[i % len(known)] for i in range(most - len(known))])
    # Whole numbers from a narrow range may come out as they were: several draws, the best counts.
    drawn = [_joined(own, repeated, generator) for _ in range(_DRAWS)]
    return max(drawn, key=lambda few: len(distinct(few)))


def _joined(own: Batch, repeated: Batch, generator: torch.Generator) -> Batch:
    """Records, and variations of others behind them."""
    varied = iter(records.tensors(records.map_tensors(lambda x: _vary(x, generator), repeated)))
    return records.map_tensors(lambda x: torch.cat([x, next(varied)]), own)


def variations(batch: Batch, seed: int) -> Batch:
    """Every record different from what it is; some may be none that the loss accepts."""
    generator = torch.Generator().manual_seed(seed)
    return records.map_tensors(lambda x: _vary(x, generator, by=1.0), batch)


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


def _vary(x: Tensor, generator: torch.Generator, *, by: float = 0.1) -> Tensor:
    """Shift real entries by this share; draw others anew from the values that they have shown."""
    if x.is_floating_point():
        noise = torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
        return x + by * noise * (x.abs() + 0.1)
    if not x.numel() or x.is_complex():
        return x
    # From the values themselves, not from all between: a label of -100 stands for none.
    known = x.unique()
    if len(known) == 1:
        known = torch.cat([known, known.new_tensor([0, 1])]).unique()
    drawn = torch.randint(len(known), x.shape, generator=generator)
    varied: Tensor = known[drawn.to(x.device)]
    return varied


_LOUDNESS = (1.0, -30.0, 1e3, -1e6)  # the loudest turns the sign of every sum over the batch


def beside_others(batch: Batch, *, loud: bool) -> Batch:
    """The batch with every second record replaced by its neighbour, the loud ones multiplied."""
    factors = [_LOUDNESS[i // 2 % len(_LOUDNESS)] for i in range(records.count(batch))]

    def neighbour(x: Tensor) -> Tensor:
        other = x.roll(1, 0)
        if not loud or not x.is_floating_point():
            return other
        factor = torch.tensor(factors).to(x.device, x.dtype)
        return other * factor.view(-1, *[1] * (x.dim() - 1))

    return _beside(batch, records.map_tensors(neighbour, batch))


def beside_nan(batch: Batch) -> Batch:
    """The batch with every second record not a number: what they touch at all is none either."""
    return _beside(
        batch,
        records.map_tensors(
            lambda x: torch.full_like(x, torch.nan) if x.is_floating_point() else x, batch
        ),
    )


def beside_variations(batch: Batch) -> Batch:
    """The batch with every second record varied, also in what all of them have in common.

    Such is a mask that leaves nothing out in these records, and will in others.
    """
    return _beside(batch, variations(batch, seed=0))


def _beside(batch: Batch, others: Batch) -> Batch:
    """Every second record from others."""
    odd = torch.arange(records.count(batch)) % 2 == 1
    mates = iter(records.tensors(others))

    def replaced(x: Tensor) -> Tensor:
        place = odd.to(x.device).view(-1, *[1] * (x.dim() - 1))
        return torch.where(place, next(mates), x)

    return records.map_tensors(replaced, batch)
