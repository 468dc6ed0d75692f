"""The forms of per-sample gradients, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hushgrad.persample.dense import dense as _dense
from hushgrad.persample.gradients import Gradients
from hushgrad.persample.loop import loop as _loop
from hushgrad.persample.recomputed import Recomputed
from hushgrad.persample.sites import Replaying, Site
from hushgrad.persample.subject import Subject
from hushgrad.persample.traced import trace
from hushgrad.types import Batch

Run = Callable[[Subject, Batch, int, int, tuple[Site, ...]], Gradients]


@dataclass(frozen=True)
class Form:
    """A way to per-sample gradients: `run(subject, batch, size, padded, sites)`.

    Of the `padded` records in `batch`, those after the first `size` are copies without weight.
    """

    name: str
    run: Run
    replays: bool = False  # does it follow the call sites that were certified?

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


traced = Form("traced", _run_traced, replays=True)
"""One forward and one backward pass; gradients stay in factored form."""

recomputed = Form("recomputed", _run_recomputed, replays=True)
"""One forward and two backward passes; the factors of one parameter are held at a time."""

dense = Form("dense", lambda subject, batch, size, padded, _: _dense(subject, batch, size, padded))
"""`torch.func.vmap(grad)`: any model that is a pure function of one record."""

loop = Form("loop", lambda subject, batch, size, *_: _loop(subject, batch, size))
"""One record at a time."""

auto = (traced, dense, loop)
"""The first of the forms that can be certified for the model."""
