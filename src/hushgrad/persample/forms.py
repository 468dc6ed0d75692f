"""The forms of per-sample gradients, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hushgrad.persample.compiled import Compiled
from hushgrad.persample.dense import dense as _dense
from hushgrad.persample.gradients import Gradients
from hushgrad.persample.loop import loop as _loop
from hushgrad.persample.oracle import Precision
from hushgrad.persample.recomputed import Recomputed
from hushgrad.persample.sites import Replaying, Site
from hushgrad.persample.subject import Subject
from hushgrad.persample.traced import trace
from hushgrad.types import Batch

Run = Callable[[Subject, Batch, int, int, tuple[Site, ...]], Gradients]
"""`run(subject, batch, size, padded, sites)`: of the `padded` records in `batch`, those after the
first `size` are copies without weight."""


@dataclass(frozen=True)
class Form:
    """A way to per-sample gradients. `start(precision)` returns the run of one certificate."""

    name: str
    start: Callable[[Precision], Run]
    replays: bool = False  # does it follow the call sites that were certified?
    compiles: bool = False  # a program for each number of records, which it proves by itself

    def __repr__(self) -> str:
        return self.name


def _run_traced(
    subject: Subject, batch: Batch, size: int, padded: int, sites: tuple[Site, ...]
) -> Gradients:
    return trace(subject.loss, subject.params, batch, size, padded, Replaying(sites, padded))


def _run_recomputed(
    subject: Subject, batch: Batch, size: int, padded: int, sites: tuple[Site, ...]
) -> Gradients:
    return Recomputed(subject, batch, size, padded, Replaying(sites, padded))


traced = Form("traced", lambda _: _run_traced, replays=True)
"""One forward and one backward pass; gradients stay in factored form."""

recomputed = Form("recomputed", lambda _: _run_recomputed, replays=True)
"""One forward and two backward passes; the factors of one parameter are held at a time."""

compiled = Form("compiled", Compiled, replays=True, compiles=True)
"""As `traced`, recorded and compiled; it takes what `torch.compile` captures in one piece."""


def _run_dense(
    subject: Subject, batch: Batch, size: int, padded: int, _: tuple[Site, ...]
) -> Gradients:
    return _dense(subject, batch, size, padded)


def _run_loop(subject: Subject, batch: Batch, size: int, _: int, __: tuple[Site, ...]) -> Gradients:
    return _loop(subject, batch, size)


dense = Form("dense", lambda _: _run_dense)
"""`torch.func.vmap(grad)`: any model that is a pure function of one record."""

loop = Form("loop", lambda _: _run_loop)
"""One record at a time."""

auto = (traced, dense, loop)
"""The first of the forms that can be certified for the model."""
