"""The forms of per-sample gradients, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hushgrad.gradients.comparison import Precision
from hushgrad.gradients.factors.gradients import Gradients
from hushgrad.gradients.factors.slots import Slots
from hushgrad.gradients.forms.compiled import Compiled
from hushgrad.gradients.forms.dense import vectorise
from hushgrad.gradients.forms.loop import run_each
from hushgrad.gradients.forms.recomputed import Recomputed
from hushgrad.gradients.forms.traced import trace
from hushgrad.gradients.objective import Objective
from hushgrad.gradients.tracing.call_sites import Replaying
from hushgrad.types import Batch

AnyGradients = Gradients | Recomputed
"""What a form returns: gradients in factored form, or those of which only the norms are held."""

RunForm = Callable[[Objective, Batch, Slots, Replaying], AnyGradients]
"""`run(objective, rows, slots, guide)`: a batch's records stand in their slots among the rows, and
the guide follows the certified call sites of a pass over so many rows."""


@dataclass(frozen=True)
class Form:
    """A way to per-sample gradients.

    Args:
        name: as it is printed.
        run: the function that takes them.
        replays: does it follow the call sites that were certified?
        alone: does each record run by itself, so that no other can move its last bits?
        compiles: of a form that makes programs, one for each number of records, and proves them
            itself to a precision: `compiles(precision)` is the run of one certificate.

    >>> traced, traced.replays, loop.alone
    (traced, True, True)
    """

    name: str
    run: RunForm
    replays: bool = False
    alone: bool = False
    compiles: Callable[[Precision], RunForm] | None = None

    def start(self, precision: Precision) -> RunForm:
        """The run of one certificate."""
        return self.run if self.compiles is None else self.compiles(precision)

    def __repr__(self) -> str:
        return self.name


traced = Form("traced", trace, replays=True)
"""One forward and one backward pass; gradients stay in factored form."""

recomputed = Form("recomputed", Recomputed, replays=True)
"""One forward and two backward passes; the factors of one parameter are held at a time."""

compiled = Form("compiled", trace, replays=True, compiles=Compiled)
"""As `traced`, recorded and compiled; it takes what `torch.compile` captures in one piece."""

dense = Form("dense", vectorise)
"""`torch.func.vmap(grad)`: any model that is a pure function of one record."""

loop = Form("loop", run_each, alone=True)
"""One record at a time."""

auto = (traced, dense, loop)
"""The first of the forms that can be certified for the model."""
