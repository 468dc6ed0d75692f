"""The forms of per-sample gradients, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hushgrad.gradients.comparison import Precision
from hushgrad.gradients.factors.gradients import Gradients
from hushgrad.gradients.factors.slots import Slots
from hushgrad.gradients.forms.compiled import Compiled
from hushgrad.gradients.forms.dense import dense as _dense
from hushgrad.gradients.forms.loop import loop as _loop
from hushgrad.gradients.forms.recomputed import Recomputed
from hushgrad.gradients.forms.traced import trace
from hushgrad.gradients.objective import Objective
from hushgrad.gradients.tracing.call_sites import Replaying, Site
from hushgrad.types import Batch

RunForm = Callable[[Objective, Batch, Slots, tuple[Site, ...]], Gradients]
"""`run(objective, rows, slots, sites)`: a batch's records stand in their slots among the rows."""


@dataclass(frozen=True)
class Form:
    """A way to per-sample gradients.

    A form that compiles makes programs, one for each number of records, and proves them itself to
    a precision; `compiles(precision)` is then the run of one certificate.
    """

    name: str
    run: RunForm
    replays: bool = False  # does it follow the call sites that were certified?
    alone: bool = (
        False  # does each record run by itself, so that no other record can move its last bits?
    )
    compiles: Callable[[Precision], RunForm] | None = None

    def start(self, precision: Precision) -> RunForm:
        """The run of one certificate."""
        return self.run if self.compiles is None else self.compiles(precision)

    def __repr__(self) -> str:
        return self.name


def _run_traced(
    objective: Objective, batch: Batch, slots: Slots, sites: tuple[Site, ...]
) -> Gradients:
    return trace(objective.loss, objective.params, batch, slots, Replaying(sites, slots.rows))


def _run_recomputed(
    objective: Objective, batch: Batch, slots: Slots, sites: tuple[Site, ...]
) -> Gradients:
    return Recomputed(objective, batch, slots, Replaying(sites, slots.rows))


traced = Form("traced", _run_traced, replays=True)
"""One forward and one backward pass; gradients stay in factored form."""

recomputed = Form("recomputed", _run_recomputed, replays=True)
"""One forward and two backward passes; the factors of one parameter are held at a time."""

compiled = Form("compiled", _run_traced, replays=True, compiles=Compiled)
"""As `traced`, recorded and compiled; it takes what `torch.compile` captures in one piece."""


def _run_dense(objective: Objective, batch: Batch, slots: Slots, _: tuple[Site, ...]) -> Gradients:
    return _dense(objective, batch, slots)


def _run_loop(objective: Objective, batch: Batch, slots: Slots, _: tuple[Site, ...]) -> Gradients:
    return _loop(objective, batch, slots.records)


dense = Form("dense", _run_dense)
"""`torch.func.vmap(grad)`: any model that is a pure function of one record."""

loop = Form("loop", _run_loop, alone=True)
"""One record at a time."""

auto = (traced, dense, loop)
"""The first of the forms that can be certified for the model."""
