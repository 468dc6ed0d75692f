"""Release a sum: digest it, draw the noise that belongs to it, add, and round to the grid.

The tensors of a sum form one long vector, in pieces that depend on public shapes alone. Entry i of
it gets the i-th value of one key stream, whoever draws it, so the number of threads and the pieces
that they take do not show in the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from jaxtyping import Float, Float64
from numpy import ndarray
from torch import Tensor

from hushgrad.noise.compiled import AddNormals, compiled_add_normals, is_loaded
from hushgrad.noise.kinds import Noise
from hushgrad.noise.standard import add_pairs, normal_pair
from hushgrad.rng import Rng
from hushgrad.types import Bounded, Refused, Released

GRID_BITS = 14  # the grid's step is at most 2⁻¹⁴ of the noise's scale
_SMALL = 1 << 15  # tensors with fewer entries than this are copied together
_DIGESTED = 1 << 20  # entries under one key of the digest
_PIECE = 1 << 18  # entries that a thread takes at a time
_CHUNK = 1 << 14  # entries whose words stay in the cache
_WORTH_COMPILING = 1 << 16  # entries; Numba takes half a second to load and saves 15 ns an entry

Work = TypeVar("Work")
_Result = TypeVar("_Result")


class _Run(NamedTuple):
    """One large tensor, or small ones that follow each other, as one vector.

    `position` is where it starts in the key stream, and even; `names` are the tensors in it.
    """

    names: list[str]
    total: Float[ndarray, " n"]
    position: int


def release(bounded: Bounded, noise: Noise, *, rng: Rng, step: int) -> Released:
    """Add noise to a sum, once, and round the result to a public grid.

    Guarantees: each value is `Δ·rint((sum + noise)/Δ)`, computed in float64, with Δ a power of two
    that depends on the noise's scale alone. The noise is a function of (key, step, kind and scale
    of the noise, digest of the whole sum): the same sum at the same step gets the same noise, any
    other sum fresh noise. The bits are the same with any number of threads.
    """
    scale = noise.scale(bounded)
    runs = list(_runs(bounded.sum))
    what = f"{noise.name} {float(scale).hex()} {_layout(bounded.sum)}"
    labels = (step, what, _digest(runs, rng, step))
    if scale == 0:
        values = {n: x.to(torch.float64, copy=True) for n, x in bounded.sum.items()}
    else:
        values = _noised(runs, bounded.sum, noise, scale, rng.derive("noise", *labels))
    return Released(values, noise.event, bounded.l2, rng.tag("release", *labels)[:16])


def grid(scale: float) -> float:
    """The step Δ of the grid that releases with noise of this scale lie on.

    >>> grid(1.0) == 2.0**-14 and grid(1.9) == 2.0**-14 and grid(2.0) == 2.0**-13
    True
    """
    if not 2.0**-500 < scale < 2.0**500:
        raise Refused(
            f"expected noise of a scale within float64's reach, got {scale}; scale the loss or the "
            "clipping norm"
        )
    return 2.0 ** (math.frexp(scale)[1] - 1 - GRID_BITS)


def _layout(sums: Mapping[str, Tensor]) -> str:
    """What is public about a sum, no two alike; the digest is of its bits alone."""
    return repr([(name, str(x.dtype), tuple(x.shape)) for name, x in sums.items()])


def _runs(sums: Mapping[str, Tensor]) -> Iterator[_Run]:
    """The whole sum as vectors in the processor's memory; how it is cut is a matter of shapes."""
    position, small = 0, list[str]()
    for name, x in sums.items():
        if x.numel() < _SMALL:
            small.append(name)
            continue
        for names in (small, [name]):
            if names:
                yield (run := _Run(names, _flat([sums[n] for n in names]), position))
                position += _even(len(run.total))
        small = []
    if small:
        yield _Run(small, _flat([sums[n] for n in small]), position)


def _flat(tensors: list[Tensor]) -> Float[ndarray, " n"]:
    """One vector of all entries, in float32 or float64, a view where there is one tensor."""
    wide = [x if x.dtype in (torch.float32, torch.float64) else x.double() for x in tensors]
    parts = [x.cpu().reshape(-1) for x in wide]
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).detach().numpy()


def _even(count: int) -> int:
    return count + count % 2


def _digest(runs: list[_Run], rng: Rng, step: int) -> bytes:
    """A keyed digest of a sum's bits: two sums share one with probability below 2⁻¹⁰⁰.

    It stays here and need not be unforgeable, so a universal hash will do: GMAC, far faster than a
    SHA, under one key of this step for each piece of the sum. Sums that differ differ in some
    piece, and two pieces of 8 MiB share a tag with probability (2¹⁹ + 1)/2¹²⁸ over the key.
    """
    pieces = [
        run.total[start : start + _DIGESTED]
        for run in runs
        for start in range(0, len(run.total), _DIGESTED)
    ]

    def tag(k: int) -> bytes:
        data = pieces[k].view(np.uint8).data
        return AESGCM(rng.tag("sum", step, k)).encrypt(bytes(12), b"", data)  # the tag, of no text

    return b"".join(_each(tag, range(len(pieces))))


def _noised(
    runs: list[_Run], sums: Mapping[str, Tensor], noise: Noise, scale: float, rng: Rng
) -> dict[str, Tensor]:
    """The sums with noise, on the grid."""
    outs = [np.empty(len(run.total)) for run in runs]
    pieces = [
        (run.total[start : start + _PIECE], out[start : start + _PIECE], run.position + start)
        for run, out in zip(runs, outs, strict=True)
        for start in range(0, len(run.total), _PIECE)
    ]
    add = _adder(noise, entries=sum(len(out) for out in outs))
    _each(partial(_add, add, scale, grid(scale), rng), pieces)
    values = {}
    for run, out in zip(runs, outs, strict=True):
        start = 0
        for name in run.names:
            x, stop = sums[name], start + sums[name].numel()
            values[name] = torch.from_numpy(out[start:stop].reshape(x.shape)).to(x.device)
            start = stop
    return values


def _adder(noise: Noise, *, entries: int) -> AddNormals:
    """What adds this noise: the same bits compiled or plain, so that is a matter of time alone."""
    if noise.pair is normal_pair and (entries >= _WORTH_COMPILING or is_loaded()):
        return compiled_add_normals() or partial(add_pairs, noise.pair)
    return partial(add_pairs, noise.pair)


def _add(
    add: AddNormals,
    scale: float,
    step: float,
    rng: Rng,
    piece: tuple[Float[ndarray, " n"], Float64[ndarray, " n"], int],
) -> None:
    total, out, position = piece
    stream = rng.stream(start=position, room=_even(min(len(total), _CHUNK)))
    for start in range(0, len(total), _CHUNK):
        part = total[start : start + _CHUNK]
        add(stream.take(_even(len(part))), part, out[start : start + _CHUNK], scale, step)


def _each(work: Callable[[Work], _Result], pieces: Sequence[Work]) -> list[_Result]:
    """Do all pieces, in as many threads as torch uses; they end here, so a fork finds none."""
    threads = min(torch.get_num_threads(), len(pieces))
    if threads <= 1:
        return [work(piece) for piece in pieces]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, pieces))
