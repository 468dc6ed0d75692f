"""What one child process measures: python -m benchmarks.measure TASK WORKLOAD LIBRARY.

It answers by lines of JSON (`benchmarks/turns.py`). A library that fails on a workload is an
answer, not a crash. The tasks are those of `TASKS`.
"""

import ctypes
import gc
import logging
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from benchmarks.libraries import CLIP_NORM, LIBRARIES, PRIVATE, trainable
from benchmarks.turns import Facts, channel, serve, shortened
from benchmarks.whole import TRAINERS
from benchmarks.workloads import Workload, build

WARM_UP = 5  # the heap still grows in the second; hushgrad tests a model at 1, 2, 4, 8, 16 …

Send = Callable[[Facts], None]


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


def error(workload: str, library: str, send: Send) -> None:
    """Send the relative error of a library's clipped sum, with dropout set to 0.

    What it logs meanwhile, such as a form that it falls back from, is sent too.
    """
    if library not in PRIVATE:
        send({"graph_breaks": graph_breaks(workload)} if library == "plain-compiled" else {})
        return
    notes = _Notes()
    logging.getLogger("hushgrad").addHandler(notes)
    private = PRIVATE[library](build(workload, dropout=False))
    expected = oracle(build(workload, dropout=False), private.groups)
    found = relative_error(private.clipped_sum(), expected)
    send({"error": found, "notes": notes.lines})


def graph_breaks(workload: str) -> int:
    """How often `torch.compile` leaves the plain loss for Python."""
    built = build(workload)
    return int(torch._dynamo.explain(built.loss)(built.batch).graph_break_count)


class _Notes(logging.Handler):
    """Warnings, as lines for a table."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(shortened(record.getMessage()))


def steps(workload: str, library: str, send: Send) -> None:
    """Take the steps that the parent asks for."""
    step = LIBRARIES[library](build(workload)).step
    serve(step, send, threads=torch.get_num_threads())


def run(workload: str, trainer: str, send: Send) -> None:
    """Train once from beginning to end, as a user would."""
    train = TRAINERS[trainer](workload)
    start = time.perf_counter()
    train()
    send({"seconds": time.perf_counter() - start, "threads": torch.get_num_threads()})


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


def memory(workload: str, library: str, send: Send) -> None:
    """Send the bytes by which a step's peak exceeds the memory of the model and its set-up.

    The first steps are left out: hushgrad certifies the model in them.
    """

    def warm_up(step: Callable[[], None]) -> None:
        for _ in range(WARM_UP):
            step()

    # Steps of another copy load code and start threads, which is no part of the step's need.
    warm_up(LIBRARIES[library](build(workload)).step)
    gc.collect()
    give_back_freed_memory()
    step = LIBRARIES[library](build(workload)).step
    start = psutil.Process().memory_info().rss
    warm_up(step)
    gc.collect()
    give_back_freed_memory()
    was_reset = reset_peak()
    step()
    send({"peak_bytes": max(peak_bytes(was_reset=was_reset) - start, 0)})


TASKS: dict[str, Callable[[str, str, Send], None]] = {
    task.__name__: task for task in (error, steps, memory, run)
}


def main(task: str, workload: str, library: str) -> None:
    """Do one task; an exception of the library becomes `{"refuses": reason}`."""
    send = channel()
    try:
        TASKS[task](workload, library, send)
    except Exception as failure:
        send({"refuses": shortened(str(failure)) or type(failure).__name__})


if __name__ == "__main__":
    main(*sys.argv[1:])
