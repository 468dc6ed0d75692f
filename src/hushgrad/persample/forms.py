"""The three forms of per-sample gradients, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hushgrad.persample.dense import dense as _dense
from hushgrad.persample.gradients import Gradients
from hushgrad.persample.loop import loop as _loop
from hushgrad.persample.sites import Replaying, Site
from hushgrad.persample.traced import trace
from hushgrad.types import Batch, Loss, Params

Run = Callable[[Loss, Params, Batch, int, int, tuple[Site, ...]], Gradients]


@dataclass(frozen=True)
class Form:
    """A way to per-sample gradients: `run(loss, params, batch, size, padded, sites)`."""

    name: str
    run: Run

    def __repr__(self) -> str:
        return self.name


def _run_traced(
    loss: Loss, params: Params, batch: Batch, size: int, padded: int, sites: tuple[Site, ...]
) -> Gradients:
    return trace(loss, params, batch, size, padded, Replaying(sites, padded))


traced = Form("traced", _run_traced)
"""One forward and one backward pass; gradients stay in factored form."""

dense = Form("dense", lambda loss, params, batch, size, *_: _dense(loss, params, batch, size))
"""`torch.func.vmap(grad)`: any model that is a pure function of one record."""

loop = Form("loop", lambda loss, params, batch, size, *_: _loop(loss, params, batch, size))
"""One record at a time."""

auto = (traced, dense, loop)
"""The first of the forms that can be certified for the model."""
