"""Milliseconds to draw a batch: `python -m benchmarks.sampling`."""

from __future__ import annotations

import time

import numpy as np
import torch
from rich.console import Console

from hushgrad.rng import Rng
from hushgrad.sampling import (
    FullBatch,
    Loader,
    Poisson,
    Scheme,
    Shuffled,
    TruncatedPoisson,
    WithoutReplacement,
)

RECORDS = 10**6


def milliseconds(scheme: Scheme, steps: int) -> tuple[float, float]:
    """Median and largest time of a draw, each of a new step."""
    rng, times = Rng.from_os(), []
    for step in range(steps):
        start = time.perf_counter()
        scheme.draw(RECORDS, step=step, rng=rng)
        times.append(1000 * (time.perf_counter() - start))
    return float(np.median(times)), max(times)


def main() -> None:
    """Print one line for each scheme, then drawing and loading together."""
    show = Console(highlight=False, soft_wrap=True).print
    show(f"{RECORDS} records, one new step for each draw: milliseconds a batch")
    schemes: list[tuple[Scheme, int]] = [
        (Poisson(1e-3), 1000),
        (Poisson(1e-2), 300),
        (Poisson(0.3), 20),
        (TruncatedPoisson(1e-3, 1000), 1000),
        (WithoutReplacement(1000), 1000),
        (Shuffled(1000), 100),
        (FullBatch(), 20),
    ]
    for scheme, steps in schemes:
        median, largest = milliseconds(scheme, steps)
        show(f"{scheme!s:45} median {median:8.3f}   largest {largest:8.3f}")
    data, scheme = (torch.randn(RECORDS, 20), torch.zeros(RECORDS)), Poisson(1e-3)
    loader, steps = Loader(data), 1000
    start = time.perf_counter()
    for _ in loader.batches(scheme, num_records=RECORDS, steps=range(steps), rng=Rng.from_os()):
        pass
    epoch = time.perf_counter() - start
    show(f"an epoch of {steps} batches, drawn and loaded from tensors: {epoch:.2f} s")


if __name__ == "__main__":
    main()
