"""What one child process measures: python -m benchmarks.measure TASK WORKLOAD LIBRARY REPEATS.

Prints one line of JSON. A library that fails on a workload is an answer, not a crash.
"""

import ctypes
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from benchmarks.libraries import CLIP_NORM, LIBRARIES, plain, trainable
from benchmarks.workloads import Workload, build

WARMUP = 5  # the heap still grows in the second; hushgrad tests a model at 1, 2, 4, 8, 16 …


def oracle(workload: Workload, groups: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """The clipped sum, one record at a time with ordinary autograd."""
    params = trainable(workload.model)
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
    for i in range(len(workload.batch[0])):
        record = tuple(t[i : i + 1] for t in workload.batch)
        found = torch.autograd.grad(workload.loss(record)[0], list(params.values()))
        gradients = dict(zip(params, found, strict=True))
        for group in groups:
            norm = sum(gradients[name].double().square().sum() for name in group) ** 0.5
            weight = min(1.0, CLIP_NORM / len(groups) ** 0.5 / float(norm))
            for name in group:
                total[name] += gradients[name] * weight
    return total


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """‖found − expected‖ ÷ ‖expected‖ over all parameters together."""
    assert found.keys() == expected.keys(), "the clipped sum names other parameters"
    missed = sum((found[n].double() - e).square().sum() for n, e in expected.items())
    return float((missed / sum(e.square().sum() for e in expected.values())) ** 0.5)


def check(workload: str, library: str) -> float:
    """Relative error of the library's clipped sum, with dropout set to 0."""
    private = LIBRARIES[library](build(workload, dropout=False), noise_multiplier=0.0)
    expected = oracle(build(workload, dropout=False), private.groups)
    return relative_error(private.clipped_sum(), expected)


def seconds(step: Callable[[], None]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def timing(workload: str, library: str, repeats: int) -> dict[str, float]:
    """Median step times, and the median of each private step's ratio to its plain neighbour.

    The steps take turns, each on its own copy of the model, so that a slow spell of the machine
    falls on all of them.
    """
    noises = {"without_noise": 0.0, "with_noise": 1.0}
    steps = {"plain": plain(build(workload))}
    for name, noise in noises.items():
        steps[name] = LIBRARIES[library](build(workload), noise_multiplier=noise).step
    for _ in range(WARMUP):
        for step in steps.values():
            step()
    gc.collect()
    rounds = [{name: seconds(step) for name, step in steps.items()} for _ in range(repeats)]
    return {"plain_seconds": statistics.median(r["plain"] for r in rounds)} | {
        name: statistics.median(r[name] / r["plain"] for r in rounds) for name in noises
    }


def reset_peak() -> bool:
    """Start the kernel's peak of resident memory afresh, where it can be (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(*, was_reset: bool) -> int:
    """Peak resident memory, since the reset if there was one."""
    if was_reset:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def give_back_freed_memory() -> None:
    """Let glibc return what earlier steps have freed; elsewhere nothing needs to be done."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def memory(workload: str, library: str) -> int:
    """Bytes by which the peak of a few steps exceeds the memory of the model and its set-up.

    The first steps are left out: hushgrad certifies the model in them.
    """

    def stepping() -> Callable[[], None]:
        built = build(workload)
        if library == "plain":
            return plain(built)
        return LIBRARIES[library](built, noise_multiplier=0.0).step

    def warm_up(step: Callable[[], None]) -> None:
        for _ in range(WARMUP):
            step()

    # Steps of another copy load code and start threads, which is no part of the step's need.
    warm_up(stepping())
    gc.collect()
    give_back_freed_memory()
    step = stepping()
    start = psutil.Process().memory_info().rss
    warm_up(step)
    gc.collect()
    give_back_freed_memory()
    was_reset = reset_peak()
    step()
    return max(peak_bytes(was_reset=was_reset) - start, 0)


def reason(error: Exception) -> str:
    """The first line of an error, cut to fit a table."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 60 else text[:59] + "…"


def main(task: str, workload: str, library: str, repeats: int) -> dict[str, object]:
    """Run one task; an exception of the library becomes `{"refuses": reason}`."""
    try:
        if task == "memory":
            return {"peak_bytes": memory(workload, library)}
        return {"error": check(workload, library)} | timing(workload, library, repeats)
    except Exception as error:
        return {"refuses": reason(error)}


def run(arguments: list[str]) -> None:
    """Run the task that a command line names, and print its figures."""
    task, workload, library, repeats = arguments
    sys.stdout.write(json.dumps(main(task, workload, library, int(repeats))) + "\n")


if __name__ == "__main__":
    run(sys.argv[1:])
