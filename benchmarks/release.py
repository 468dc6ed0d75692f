"""Nanoseconds a parameter to release a sum: `python -m benchmarks.release`.

Takes turns between everything that is compared, so that a slow spell of the machine falls on all of
it. Elapsed time is what a step waits for; on a busy machine the least of many repeats says more
than the median, and the processor's time, added over threads, more than either.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import typer
from rich.console import Console

from hushgrad.noise import (
    NoiseBuffer,
    Strategy,
    banded,
    banded_inverse,
    correlated,
    gaussian,
    release,
    releasing,
)
from hushgrad.rng import Rng
from hushgrad.types import Bounded

show = Console(highlight=False, soft_wrap=True).print


def with_threads(count: int, work: Callable[[], object]) -> Callable[[], None]:
    """The same work with this many threads."""

    def limited() -> None:
        torch.set_num_threads(count)
        work()

    return limited


Times = dict[str, list[tuple[float, float]]]
"""Elapsed seconds and the processor's, of each repeat."""


def in_turn(works: dict[str, Callable[[], object]], repeats: int) -> Times:
    """The times of each work's repeats, after one that does not count."""
    found: Times = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter(), time.process_time()
            work()
            if turn:
                found[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return found


def report(found: Times, *, per: float, unit: str) -> None:
    """Print the median and the least of each, `per` being what the seconds are divided by."""
    for name, times in found.items():
        elapsed, processor = ([x / per for x in column] for column in zip(*times, strict=True))
        show(
            f"  {name:47} median {statistics.median(elapsed):8.2f}   least {min(elapsed):8.2f}   "
            f"processor {min(processor):8.2f} {unit}"
        )


def plain(work: Callable[[], object]) -> Callable[[], None]:
    """The same work without machine code."""

    def without() -> None:
        with mock.patch.object(releasing, "compiled_add_normals", return_value=None):
            work()

    return without


def eighth(strategy: Strategy, total: Bounded, rng: Rng) -> Callable[[], object]:
    """The eighth release of a run with this noise, and seven steps to look back on."""
    noise, buffer, tags = correlated(strategy).at(1.0), NoiseBuffer(), list[bytes]()
    for step in range(7):
        kept = release(total, noise, rng=rng, step=step, past=tags, buffer=buffer)
        tags.append(kept.digest)
    last = buffer.after(tags[-1]) or []

    def again() -> None:
        buffer.keep(tags[-1], last)
        release(total, noise, rng=rng, step=7, past=tags, buffer=buffer)

    return again


def not_loaded(work: Callable[[], object]) -> Callable[[], None]:
    """The same work in a process that has had no large release."""

    def before() -> None:
        with mock.patch.object(releasing, "is_loaded", return_value=False):
            work()

    return before


def main(parameters: int = 1 << 23, repeats: int = 9, threads: int | None = None) -> None:
    """Compare the release with what it consists of, and with `torch.normal_`, which is not sound.

    The digest is part of the release, and also shown alone. Measured with one thread, and with as
    many as torch takes by itself.
    """
    threads = threads or torch.get_num_threads()
    rng, noise = Rng.from_os(), gaussian(1.0)
    large = Bounded({"w": torch.randn(parameters)}, 1.0)
    other = torch.empty(parameters)
    runs = list(releasing._runs(large.sum))
    works: dict[str, Callable[[], object]] = {
        "release": lambda: release(large, noise, rng=rng, step=0),
        "release, digest alone": lambda: releasing._digest(runs, rng, 0),
        "release, without machine code": plain(lambda: release(large, noise, rng=rng, step=0)),
        "release, C of 8 bands": eighth(banded([1.0] * 8), large, rng),
        "release, inverse of C of 8 bands": eighth(banded_inverse([1.0] * 8), large, rng),
        "torch.normal_, float32, draw alone": lambda: other.normal_(),
    }
    for count in sorted({1, threads}):
        show(f"{parameters} parameters in one tensor, {count} threads")
        limited = {name: with_threads(count, work) for name, work in works.items()}
        report(in_turn(limited, repeats), per=1e-9 * parameters, unit="ns")
    small = {
        "200 tensors of 100": Bounded({f"w{k}": torch.randn(10, 10) for k in range(200)}, 1.0),
        "logistic regression, 123 + 1": Bounded({"w": torch.randn(123), "b": torch.randn(1)}, 1.0),
    }
    show(f"a whole release, {threads} threads")
    works = {}
    for name, total in small.items():
        works[name] = partial(release, total, noise, rng=rng, step=0)
        works[f"{name}, Numba not loaded"] = not_loaded(works[name])
    report(in_turn(works, 20 * repeats), per=1e-6, unit="µs")


if __name__ == "__main__":
    typer.run(main)
