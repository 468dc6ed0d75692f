"""Processes that take turns: one runs a block of steps while the others are stopped.

The parent speaks to each child over pipes: a line with a number of steps goes in, a line of JSON
with the seconds comes out. A child that is not asked is stopped by the operating system, so that
threads which wait for work (OpenMP's spin before they sleep) take nothing from the one that runs.
Nothing is set in a child's environment but what the caller names.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).parents[1]
PATIENCE = 1800.0  # seconds to wait for one answer
WARM_UP = 8  # steps after the first: the heap still grows, and hushgrad tests a model in them
FEWEST_STEPS = 2  # of a block, however long a step is

Facts = dict[str, Any]
"""What one line of JSON holds."""


class Failed(Exception):
    """A child refused its task, or died; the text is one line for a table."""


class Worker:
    """A child process that runs steps when it is asked to, and is stopped in between.

    `ready` is the first line that it sent: all that there is of a task without steps.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._patience, self.block_steps = patience, FEWEST_STEPS
        # A file: a pipe that nobody reads would fill up.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        try:
            self.ready = self._answer()
            self._stop()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, steps: int) -> float:
        """Seconds that a block of so many steps takes, by the child's own clock."""
        assert self._child.stdin is not None
        self._child.send_signal(signal.SIGCONT)
        try:
            self._child.stdin.write(b"%d\n" % steps)
            self._child.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._last_words()) from None
        seconds = float(self._answer()["seconds"])
        self._stop()
        return seconds

    def warm_up(self, block_seconds: float) -> float:
        """Seconds of the first step; finds how many steps a block of this length has."""
        first, steps = self.run(1), WARM_UP
        while (taken := self.run(steps)) < block_seconds / 4:
            steps *= 4
        self.block_steps = max(FEWEST_STEPS, math.ceil(steps * block_seconds / taken))
        return first

    def block(self) -> float:
        """Seconds a step, over a block."""
        return self.run(self.block_steps) / self.block_steps

    def close(self) -> None:
        """End the child, also one that is stopped."""
        self._child.kill()
        self._child.communicate()
        self._errors.close()

    def _answer(self) -> Facts:
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], self._patience)[0]:
            raise Failed(f"not done after {self._patience:.0f} s")
        line = self._child.stdout.readline()
        if not line:
            raise Failed(self._last_words())
        found: Facts = json.loads(line)
        if "refuses" in found:
            raise Failed(found["refuses"])
        return found

    def _stop(self) -> None:
        """Stop the child, and return when it is stopped."""
        self._child.send_signal(signal.SIGSTOP)
        if hasattr(os, "waitid"):  # macOS has none before Python 3.13
            with suppress(ChildProcessError):  # it had nothing more to do, and ended
                os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _last_words(self) -> str:
        code = self._child.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return "killed" if code < 0 else shortened(lines[-1] if lines else "no message")


class Comparison(NamedTuple):
    """Seconds a step of the plain process and of the other, for each pair of blocks."""

    plain: list[float]
    other: list[float]
    plain_first: float
    other_first: float
    block_steps: tuple[int, int]

    def facts(self) -> Facts:
        """The figures of a row: the median of the pairs' ratios, and the least and the largest."""
        ratios = [o / p for p, o in zip(self.plain, self.other, strict=True)]
        return {
            "ratio": median(ratios),
            "least": min(ratios),
            "largest": max(ratios),
            "seconds": median(self.other),
            "plain_seconds": median(self.plain),
            "first_seconds": self.other_first,
            "plain_first_seconds": self.plain_first,
            "block_steps": list(self.block_steps),
            "ratios": ratios,
        }


def take_turns(plain: Worker, other: Worker, *, pairs: int, block_seconds: float) -> Comparison:
    """Run pairs of blocks, the plain one first and last by turns, so that no drift favours one."""
    firsts = plain.warm_up(block_seconds), other.warm_up(block_seconds)
    found: dict[Worker, list[float]] = {plain: [], other: []}
    for pair in range(pairs):
        for worker in (plain, other) if pair % 2 == 0 else (other, plain):
            found[worker].append(worker.block())
    return Comparison(found[plain], found[other], *firsts, (plain.block_steps, other.block_steps))


def channel() -> Callable[[Facts], None]:
    """In a child: send a line to the parent. What else is printed goes to standard error."""
    _end_with_parent()
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(facts: Facts) -> None:
        lines.write(json.dumps(facts) + "\n")
        lines.flush()

    return send


def serve(step: Callable[[], None], send: Callable[[Facts], None], **ready: Any) -> None:
    """In a child: say that it is ready, then run the blocks that the parent asks for.

    Reading a line blocks in the operating system and costs no processor time.
    """
    send(ready)
    while line := sys.stdin.buffer.readline():
        steps = int(line)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        send({"seconds": time.perf_counter() - start})


def shortened(text: str) -> str:
    """A text on one line, cut to fit a table."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def _end_with_parent() -> None:
    """Have the kernel kill this process with its parent: stopped, it would stay for ever."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
