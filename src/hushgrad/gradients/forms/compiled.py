"""The traced form as a program: the pass is recorded once, compiled, and run without Python.

`torch.compile` captures the loss as one graph, with guards on all that it read besides tensors. The
tape runs over that graph once while every operation is recorded, those of the way back and of the
norms too. Factors are outputs of the recorded program, so no tap breaks it into pieces.

A program is a new piece of arithmetic, and is proved before it is used: its losses, norms and sums
must be those of the traced pass over the same records and draws, and a record must keep its bits
beside other records, at other places, and in programs for other numbers of records.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, library

from hushgrad.batches import records
from hushgrad.gradients.comparison import Precision, apart, differs
from hushgrad.gradients.errors import without_numbers
from hushgrad.gradients.factors.choice import settle
from hushgrad.gradients.factors.gradients import Gradients, UseKey
from hushgrad.gradients.factors.gram import Rough, share_rows
from hushgrad.gradients.factors.held import Stacked
from hushgrad.gradients.factors.kinds import Use
from hushgrad.gradients.factors.slots import Slots, in_turn
from hushgrad.gradients.forms.traced import trace
from hushgrad.gradients.objective import Objective
from hushgrad.gradients.probes import beside_others, replaced_places
from hushgrad.gradients.tracing.call_sites import Replaying, Site, Unforeseen
from hushgrad.numerics import exact_products, same_bits
from hushgrad.types import Batch, Loss, NotCovered, Params, Refused

_log = logging.getLogger(__name__)

VECTOR = 32
"""Programs are for multiples of so many records, which leave no vector of numbers half full."""

_MOST_CHANGES = 8  # programs besides one for each number of records


class LongerPeriod(NotCovered):
    """Records keep their bits in a program only where they move by this many places."""

    def __init__(self, period: int) -> None:
        super().__init__(f"in a compiled program records keep their bits {period} places apart")
        self.period = period


@dataclass
class _Pass:
    """One run through `torch.compile`, and what came of it."""

    objective: Objective
    slots: Slots
    sites: tuple[Site, ...]
    gradients: Gradients | None = None
    program: _Program | None = None


class Compiled:
    """The compiled passes of one certificate: a program for each number of records."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._code: CodeType | None = None
        self._backend = self._record_graph  # one object, by which torch.compile knows its own
        self._current: _Pass | None = None
        self._sizes: set[int] = set()
        self._steps = 0

    def __call__(
        self, objective: Objective, batch: Batch, slots: Slots, guide: Replaying
    ) -> Gradients:
        if objective.free_buffers:
            raise NotCovered("it moves buffers of the model")
        draws, sites = _Draws(), guide.certified
        gradients, program = self._run(objective, batch, slots, sites)
        self._steps += 1
        if not program.proved or self._steps & (self._steps - 1) == 0:  # and at 1, 2, 4, 8 ...
            program.proved = False  # also if the proof does not come to an end
            self._prove(objective, batch, slots, sites, draws)
            program.proved = True
            draws.again()
            gradients, _ = self._run(objective, batch, slots, sites)
        return gradients

    def _run(
        self, objective: Objective, batch: Batch, slots: Slots, sites: tuple[Site, ...]
    ) -> tuple[Gradients, _Program]:
        self._current = current = _Pass(objective, slots, sites)
        try:
            with torch.enable_grad(), self._guards():
                self._capture(objective.loss)(batch)
        except (Refused, Unforeseen):
            raise
        except Exception as error:
            reason = f"torch.compile does not take it in one piece, {without_numbers(error)}"
            raise NotCovered(reason) from error
        finally:
            self._current = None
        if current.gradients is None or current.program is None:
            raise NotCovered("torch.compile found nothing to compile")
        return current.gradients, current.program

    def _guards(self) -> Any:
        """Settings of `torch.compile`: hooks that come later are seen, and each size may compile.

        What is left of its limit is for a loss that changes, which compiles again for each value.
        """
        from torch._dynamo import config

        return config.patch(
            skip_nnmodule_hook_guards=False, recompile_limit=_MOST_CHANGES + len(self._sizes)
        )

    def _capture(self, loss: Loss) -> Callable[[Batch], Tensor]:
        """The loss for `torch.compile`, which remembers what it compiled by a function's code.

        A copy of the code goes with this certificate, so that a lambda made anew at each step is
        the one before it. Nothing else is kept: a loss holds its model.
        """
        whole = loss if isinstance(loss, FunctionType) else _call(loss)
        self._code = self._code or whole.__code__.replace()
        own = FunctionType(
            self._code, whole.__globals__, whole.__name__, whole.__defaults__, whole.__closure__
        )
        own.__kwdefaults__ = whole.__kwdefaults__
        function: Callable[[Batch], Tensor] = torch.compile(
            own, backend=self._backend, fullgraph=True, dynamic=False
        )
        return function

    def _record_graph(self, graph: fx.GraphModule, _: Any) -> Callable[..., tuple[Tensor, ...]]:
        """What `torch.compile` runs in the place of a graph that it captured."""
        program: _Program | None = None

        def run(*inputs: Any) -> tuple[Tensor, ...]:
            nonlocal program
            current = self._current
            assert current is not None
            if program is None:
                program = _record(graph, inputs, current)
            current.program = program
            losses, current.gradients = program.run(inputs, current)
            return (losses,)

        return run

    def _prove(
        self,
        objective: Objective,
        batch: Batch,
        slots: Slots,
        sites: tuple[Site, ...],
        draws: _Draws,
    ) -> None:
        """Compare a new program with the traced pass, and its bits with its own and others'."""
        rows, period = slots.rows, slots.period

        def run(batch: Batch, count: int) -> Gradients:
            draws.again()
            return self._run(objective, batch, in_turn(count, period=period), sites)[0]

        own = run(batch, rows)
        drew = draws.again()
        traced = trace(objective, batch, in_turn(rows), Replaying(sites, rows))
        if not _norms_are_of_the_factors(own, objective.params):
            raise NotCovered("the compiled program's norms are not those of its factors")
        wrong = apart(own, traced, self._precision)
        if wrong:
            raise NotCovered(f"of the compiled program {differs(wrong, 'from the traced pass')}")
        places = replaced_places(rows)
        mixed = run(beside_others(batch, places, loud=False), rows)
        if not _same_bits(own, mixed, (~places).nonzero().flatten().tolist()):
            raise NotCovered("in the compiled program a record's bits depend on other records")
        if not drew:  # draws differ from place to place
            self._require_period(run, own, batch, slots)
        self._sizes.add(rows)

    def _require_period(
        self, run: Callable[[Batch, int], Gradients], own: Gradients, batch: Batch, slots: Slots
    ) -> None:
        """Refuse a program in which records change their bits when they move by the period."""
        rows, period = slots.rows, slots.period
        sizes = self._sizes | {rows}

        def kept(shift: int) -> bool:
            for size in sizes:
                shifted = [(i + shift) % rows for i in range(size)]
                moved = run(records.take(batch, shifted), size)
                if not _same_bits(own, moved, shifted, [*range(size)]):
                    return False
            return True

        # A program's loops may round by place where the operations by themselves do not.
        longer = period
        while longer <= VECTOR and not kept(longer):
            longer *= 2
        if longer > VECTOR:
            raise NotCovered("in compiled programs a record's bits depend on its place")
        if longer > period:
            raise LongerPeriod(longer)


def _call(loss: Loss) -> FunctionType:
    """A function that calls any other callable."""

    def whole(batch: Batch) -> Tensor:
        return loss(batch)

    assert isinstance(whole, FunctionType)
    return whole


def _norms_are_of_the_factors(gradients: Gradients, params: Params) -> bool:
    """Are they within their slack of the norms that the usual arithmetic finds?"""
    usual = Gradients(gradients.factors, params, gradients.losses, in_turn(gradients.batch)).squares
    for name, square in gradients.squares.items():
        gap = (square.estimate - usual[name].estimate).abs()
        close = gap <= square.slack + usual[name].slack
        if not bool((close | ~usual[name].estimate.isfinite()).all()):
            return False
    return True


def _same_bits(
    one: Gradients, other: Gradients, places: list[int], moved_to: list[int] | None = None
) -> bool:
    """Have the records at these places the same losses, norms and factors in both?"""
    here, there = (
        [x.losses, *(square.estimate for square in x.squares.values()), *x.held()]
        for x in (one, other)
    )
    to = places if moved_to is None else moved_to
    return all(same_bits(x[places], y[to]) for x, y in zip(here, there, strict=True))


class _Draws:
    """Torch's random state, to be put back."""

    def __init__(self) -> None:
        self._state = torch.get_rng_state()
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        self._others = {i: torch.cuda.get_rng_state(i) for i in devices}

    def again(self) -> bool:
        """Put it back; tells whether the processor's had moved."""
        moved = not torch.equal(torch.get_rng_state(), self._state)
        torch.set_rng_state(self._state)
        for i, state in self._others.items():
            torch.cuda.set_rng_state(state, i)
        return moved or bool(self._others)


# --- recording ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """How some outputs of a program make one parameter's gradient: its uses, and rough norms."""

    name: str
    uses: dict[UseKey, Use]  # of tensors without memory
    rough: list[str]  # the norms' fields that there are

    def rebuilt(self, tensors: Iterator[Tensor]) -> tuple[dict[UseKey, Use], Rough | None]:
        """Take the next of the outputs."""
        uses = {
            key: use.with_parts([next(tensors) for _ in use.parts])
            for key, use in self.uses.items()
        }
        return uses, Rough(**{field: next(tensors) for field in self.rough}) if self.rough else None


@dataclass
class _Program:
    code: Callable[..., Any]
    layout: list[_Held]
    proved: bool = False

    def run(self, inputs: tuple[Any, ...], current: _Pass) -> tuple[Tensor, Gradients]:
        params = current.objective.params
        with torch.no_grad(), exact_products(next(iter(params.values())).device):
            losses, *tensors = self.code(*inputs)
        factors: dict[str, dict[UseKey, Use]] = {name: {} for name in params}
        known: dict[str, Rough] = {}
        outputs = iter(tensors)
        for held in self.layout:
            factors[held.name], rough = held.rebuilt(outputs)
            if rough is not None:
                known[held.name] = rough
        own = current.slots.of_records(losses)
        return losses, Gradients(factors, params, own, current.slots, known)


def _record(graph: fx.GraphModule, inputs: tuple[Any, ...], current: _Pass) -> _Program:
    """Run the tape over the graph, and keep all operations that ran as a program."""
    layout: list[_Held] = []

    def whole(*inputs: Any) -> tuple[Tensor, ...]:
        gradients = trace(
            replace(current.objective, loss=lambda _: _only(graph(*inputs))),
            [x for x in inputs if isinstance(x, Tensor) and not x.requires_grad],
            in_turn(current.slots.rows),
            Replaying(current.sites, current.slots.rows),
        )
        layout[:], tensors = _measure_all(gradients, current.objective.params)
        return (gradients.losses, *tensors)

    from torch.fx.experimental.proxy_tensor import make_fx

    recorded = make_fx(whole)(*inputs)
    return _Program(_machine_code(recorded, inputs), layout)


def _only(outputs: tuple[Any, ...]) -> Tensor:
    if len(outputs) != 1:
        raise NotCovered("the model keeps tensors of the pass besides its loss")
    loss: Tensor = outputs[0]
    return loss


def _measure_all(gradients: Gradients, params: Params) -> tuple[list[_Held], list[Tensor]]:
    """Settle every gradient and take its rough norms, as tensors and how to put them together."""
    layout: list[_Held] = []
    tensors: list[Tensor] = []
    with torch.no_grad(), exact_products(gradients.losses.device), share_rows():
        for name, found in gradients.factors.items():
            if not found:
                continue
            settled = settle(tuple(found.values()), tuple(params[name].shape))
            uses: dict[UseKey, Use] = dict(found)
            rough: dict[str, Tensor | None] = {}
            if not isinstance(settled, Stacked):
                uses = {(i,): use for i, use in enumerate(settled.held)}
                rough = settled.rough._asdict()
            norms = {field: x for field, x in rough.items() if x is not None}
            tensors += [x for use in uses.values() for x in use.parts]
            tensors += norms.values()
            shapes = {
                key: use.with_parts([x.to("meta") for x in use.parts]) for key, use in uses.items()
            }
            layout.append(_Held(name, shapes, list(norms)))
    return layout, tensors


def _machine_code(recorded: fx.GraphModule, inputs: tuple[Any, ...]) -> Callable[..., Any]:
    """The program compiled, or as it was recorded where there is no compiler for it.

    Draws stay torch's own, so that they follow from the run's key. Convolutions keep their layout:
    others were seen to take twice the time. So do products by oneDNN, whose weights the compiler
    would want to be constants.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    for node in recorded.graph.nodes:
        if str(node.target) == "mkldnn._linear_pointwise.default":
            node.target, node.args = _by_onednn(), node.args[:3]
    recorded.recompile()
    settings = config.patch(fallback_random=True, layout_optimization=False)
    try:
        with torch.no_grad(), settings, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about parts of it that are to go
            code: Any = compile_fx(recorded, list(inputs))
    except Exception as error:
        _log.warning(
            "operations are replayed one by one: no machine code, %s", without_numbers(error)
        )
        code = recorded
    compiled: Callable[..., Any] = code
    return compiled


@functools.cache
def _by_onednn() -> Any:
    """The product by oneDNN as an operation that the compiler does not look into."""

    @library.custom_op(
        "hushgrad::linear", mutates_args=(), schema="(Tensor x, Tensor w, Tensor? bias) -> Tensor"
    )
    def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
        return found

    @linear.register_fake
    def _(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty(*x.shape[:-1], w.shape[0])

    return torch.ops.hushgrad.linear.default
