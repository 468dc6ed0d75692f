"""Release a sum: digest it, draw the noise that belongs to it, add, and round to the grid.

The tensors of a sum form one long vector, in pieces that depend on public shapes alone. Entry i of
it gets the i-th value of one key stream, whoever draws it, so the number of threads and the pieces
that they take do not show in the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from hushgrad.noise import threads
from hushgrad.noise.compiled import AddNormals, compiled_add_normals, is_loaded
from hushgrad.noise.kinds import Noise
from hushgrad.noise.mixing import WORTH_COMPILING, NoiseBuffer, Vectors, draw_key, mixed
from hushgrad.noise.standard import add_pairs, normal_pair
from hushgrad.noise.strategy import Strategy
from hushgrad.rng import Rng
from hushgrad.types import Bounded, Refused, Released

GRID_BITS = 14  # the grid's step is at most 2⁻¹⁴ of the noise's scale
_SMALL = 1 << 15  # tensors with fewer entries than this are copied together
_DIGESTED = 1 << 20  # entries under one key of the digest
_VERSION = "release-2"  # other noise for a tag of before would be a second release, uncharged
TAG_BYTES = 16  # of a release's tag
_CHECK = 3  # of these bytes are a check of the others, where later releases need the tag


class _Run(NamedTuple):
    """One large tensor, or small ones that follow each other, as one vector.

    `position` is where it starts in the key stream, and even; `names` are the tensors in it.
    """

    names: list[str]
    total: Float[ndarray, " n"]
    position: int


def release(
    bounded: Bounded,
    noise: Noise,
    *,
    rng: Rng,
    step: int,
    past: Sequence[bytes] = (),
    buffer: NoiseBuffer | None = None,
) -> Released:
    """Add noise to a sum, once, and round the result to a public grid.

    Guarantees: each value is `Δ·rint((sum + noise)/Δ)`, computed in float64, with Δ a power of two
    that depends on the noise's scale alone. What is drawn is a function of the key, the step and
    the release's tag, and the tag one of (key, step, kind and scale of the noise, layout and digest
    of the whole sum): the same sum at the same step gets the same noise, any other sum fresh noise.
    The bits are the same with any number of threads.

    Correlated noise also mixes in what past steps drew, made again from their tags. Then the tag
    depends on theirs too, so that a run that has forked shares no draw with the other branch.

    Args:
        bounded: the sum, with the bound on one record.
        noise: the noise of this release, such as `gaussian(0.8)` or `kind.at(0.8)`.
        rng: the run's key.
        step: the number of the step; for correlated noise they are counted from 0.
        past: the tags (`Released.digest`) of the steps before this one, the oldest first; at
            least the last `noise.memory(step)` of them. Independent noise looks at none.
        buffer: a run's `NoiseBuffer`, which saves correlated noise time and changes nothing.

    Returns:
        The noisy values in float64, and the tag that tells this release from others.

    Raises:
        Refused: if the noise does not fit the sum, or the past releases were made with another
            key, at other steps, with another layout or bound, or are not all there.

    >>> import torch
    >>> from hushgrad.noise import gaussian
    >>> total = Bounded({"w": torch.zeros(2)}, l2=1.0)
    >>> one, other = (release(total, gaussian(1.0), rng=Rng.fixed(0), step=0) for _ in range(2))
    >>> torch.equal(one.values["w"], other.values["w"])
    True
    """
    scale = noise.scale(bounded)
    runs = list(_runs(bounded.sum))
    what = f"{noise.name} {float(scale).hex()} {_layout(bounded.sum)}"
    digest = _digest(runs, rng, step)
    if noise.strategy is None:
        tags = [rng.tag(_VERSION, step, what, digest)[:TAG_BYTES]]
    else:
        needed = _needed(noise.strategy, past, step)
        what = f"{noise.strategy!r} {what}"
        _require_same_run(needed, rng=rng, step=step, what=what)
        body = rng.tag(_VERSION, step, what, digest, *needed[-1:])[: TAG_BYTES - _CHECK]
        tags = [*needed, body + _check(body, rng=rng, step=step, what=what)]
    if scale == 0:
        values = {n: x.to(torch.float64, copy=True) for n, x in bounded.sum.items()}
    elif noise.strategy is None:
        key = draw_key(rng, step, tags[-1])
        values = _by_name(runs, bounded.sum, _noised(runs, noise, scale, key))
    else:
        places = [(len(run.total), run.position) for run in runs]
        drawn = mixed(noise.strategy, tags, places, rng=rng, step=step, buffer=buffer)
        step_size = grid(scale * float(noise.strategy.noising(1)[0]))
        values = _by_name(runs, bounded.sum, _added(runs, drawn, scale, step_size))
    return Released(values, noise.event, bounded.l2, tags[-1])


def _needed(strategy: Strategy, past: Sequence[bytes], step: int) -> list[bytes]:
    """The tags of the releases that a step's noise depends on, the oldest first."""
    count = strategy.memory(step)
    if not count <= len(past) <= step:
        raise Refused(
            f"expected the tags of the last {count} releases or more at step {step}, for noise "
            f"that is correlated with theirs, got {len(past)}; pass past=, one tag for each step "
            "from the run's ledger"
        )
    return list(past[len(past) - count :])


def _check(body: bytes, *, rng: Rng, step: int, what: str) -> bytes:
    return rng.tag("correlated", step, what, body)[:_CHECK]


def _require_same_run(past: list[bytes], *, rng: Rng, step: int, what: str) -> None:
    """Refuse tags of releases with another key, layout, scale or matrix, or of other steps."""
    for at, tag in enumerate(past, start=step - len(past)):
        body = tag[: TAG_BYTES - _CHECK]
        if tag[TAG_BYTES - _CHECK :] != _check(body, rng=rng, step=at, what=what):
            raise Refused(
                f"expected the release of step {at} to be one of this run, with the same key, "
                "noise, bound on one record, and names, dtypes and shapes of parameters, got a tag "
                "that differs; correlated noise can only go on where all of them stay as they "
                "were: restore the key, or start a new run"
            )


def grid(scale: float) -> float:
    """Return the step Δ of the grid that contains all releases with noise of this scale.

    Args:
        scale: the noise's standard deviation, or the scale of Laplace noise.

    Raises:
        Refused: if float64 cannot represent such a grid.

    Example:
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
                position += threads.even(len(run.total))
        small = []
    if small:
        yield _Run(small, _flat([sums[n] for n in small]), position)


def _flat(tensors: list[Tensor]) -> Float[ndarray, " n"]:
    """One vector of all entries, in float32 or float64, a view where there is one tensor."""
    wide = [x if x.dtype in (torch.float32, torch.float64) else x.double() for x in tensors]
    parts = [x.cpu().reshape(-1) for x in wide]
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).detach().numpy()


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

    return b"".join(threads.in_threads(tag, range(len(pieces))))


def _noised(runs: list[_Run], noise: Noise, scale: float, key: Rng) -> Vectors:
    """The sums with independent noise, on the grid."""
    outs = [np.empty(len(run.total)) for run in runs]
    add = _adder(noise, entries=sum(len(out) for out in outs))
    step = grid(scale)

    def work(piece: tuple[int, slice]) -> None:
        k, part = piece
        total, out = runs[k].total[part], outs[k][part]
        room = threads.even(min(len(out), threads.CHUNK))
        stream = key.stream(start=runs[k].position + part.start, room=room)
        for chunk in threads.chunks(len(out)):
            words = stream.take(threads.even(len(out[chunk])))
            add(words, total[chunk], out[chunk], scale, step)

    threads.in_threads(work, threads.pieces_of(map(len, outs)))
    return outs


def _added(runs: list[_Run], noise: Vectors, scale: float, step: float) -> Vectors:
    """The sums with this noise times the scale, on the grid."""
    outs = [np.empty(len(run.total)) for run in runs]

    def work(piece: tuple[int, slice]) -> None:
        k, part = piece
        out = outs[k][part]
        np.multiply(noise[k][part], scale, out=out)
        out += runs[k].total[part]
        out *= 1.0 / step
        np.rint(out, out=out)
        out *= step

    threads.in_threads(work, threads.pieces_of(map(len, outs)))
    return outs


def _by_name(runs: list[_Run], sums: Mapping[str, Tensor], outs: Vectors) -> dict[str, Tensor]:
    """The vectors as tensors of the sum's shapes, where its tensors are."""
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
    if noise.pair is normal_pair and (entries >= WORTH_COMPILING or is_loaded()):
        return compiled_add_normals() or partial(add_pairs, noise.pair)
    return partial(add_pairs, noise.pair)
