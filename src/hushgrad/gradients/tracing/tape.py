"""The fast path's tape: one forward, one backward, and the factors of every private parameter.

Every operation that consumes a private parameter is handed to the tape (see `operands`). The
operation runs with the parameter detached, and an identity on its output picks up the output's
gradient on the way back, so autograd never computes the weight gradients that would be thrown away.

A function of parameters alone (a transpose, a slice, `1 + w`, a normalised weight) is computed
once, with its own small autograd graph; what reaches it from the records is pulled back through
that graph, record by record, after the backward pass. Where a rule knows how, it goes back as
factors and is never written out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad.gradients.factors.gradients import Factors, UseKey
from hushgrad.gradients.factors.kinds import Use
from hushgrad.gradients.tracing.call import Back, Call, Emitted, Rules, Saves
from hushgrad.gradients.tracing.call_sites import Guide, Place
from hushgrad.gradients.tracing.calls import map_in, name_of, tensors_in, writes_in_place
from hushgrad.gradients.tracing.operands import PLAIN_TORCH, PassOperands
from hushgrad.numerics import exact_products, wide
from hushgrad.types import NotCovered, Params, Refused

HandOver = Callable[[str, dict[UseKey, Use]], None]
"""What is done with a parameter's uses once all of them are there."""

# Attributes of a parameter that are parameters again; all others (shape, dtype ...) are facts.
_VIEW_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# Operations that read only the shape or type of their second tensor.
_READS_NO_VALUE = frozenset({"type_as", "view_as", "expand_as", "reshape_as"})


class _Tap(torch.autograd.Function):
    """Identity on `y` that hands its gradient and the kept tensors to `record` on the way back."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor, record: Any, *kept: Tensor) -> Tensor:
        ctx.record = record
        ctx.save_for_backward(*kept)
        ctx.mark_dirty(y)  # y is fresh, and in-place activations may follow
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        kept = ctx.saved_tensors  # checkpointing lets them be read once
        ctx.record(gradient, *kept)
        return (gradient, *[None] * (2 + len(kept)))


class Tape:
    """Records one pass over `batch` records, led by a guide that knows where the records are."""

    def __init__(self, params: Params, batch: int, guide: Guide, rules: Rules) -> None:
        self.params, self.batch = params, batch
        self._guide, self._rules = guide, rules
        self.decompositions = rules.decompositions
        device = next(iter(params.values())).device
        # A leaf of every tap, so that a model whose inputs need no gradient is passed back through.
        self.token = torch.zeros((), device=device, requires_grad=True)
        self._operands = PassOperands(params)
        self._calls = 0
        self.factors: dict[str, dict[UseKey, Use]] = {name: {} for name in params}
        self._due = dict.fromkeys(params, 0)  # the uses of each parameter that are yet to come back
        self._hand_over: HandOver | None = None
        self._handed_over: set[str] = set()
        self._reached: dict[int, tuple[Tensor, list[Use]]] = {}

    def intercept(self) -> AbstractContextManager[None]:
        """Be handed every operation on a private parameter inside."""
        return self._operands.intercept(self)

    # --- one intercepted call ---

    def call(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        name = name_of(function)
        # A shape or a dtype says nothing of a gradient.
        if name.startswith("get ") and name[4:] not in _VIEW_ATTRIBUTES:
            return function(*args, **kwargs)
        leaves = tensors_in((args, kwargs))
        values = tensors_in(args[:1]) if name in _READS_NO_VALUE else leaves
        operands, kinds = self._operands, self._operands.kinds
        others = [x for x in values if type(x) not in kinds]
        # Without gradients, or after the pass, a parameter is a tensor like any other.
        tracked = operands.private is not None and torch.is_grad_enabled()
        if not tracked or len(others) == len(values):
            return function(*operands.plain(args), **operands.plain(kwargs))
        reads = [x for x in leaves if type(x) in kinds]
        self._refuse_writes(name, reads, args, kwargs)
        names = tuple(sorted({n for x in reads for n in operands.names(x)}))
        shapes = [tuple(x.shape) for x in others]
        inputs = self._guide.inputs(name, names, shapes) if others else ()
        # By identity: a rule asks for the layout of the very arguments that it was called with.
        places = {id(x): place for x, place in zip(others, inputs, strict=True)}
        # Without records among its inputs it is a function of parameters, whatever its output.
        call = Call(operands, function, self.batch, (args, kwargs), places)
        if any(place.layout for place in inputs):
            return self._on_records(call, name, names, inputs)
        return self._on_parameters(call, name, names, inputs, others)

    def _on_records(
        self, call: Call, name: str, names: tuple[str, ...], inputs: tuple[Place, ...]
    ) -> Tensor:
        args, kwargs = call.arguments
        # The rule comes first: it may put a quicker function in the place of the operation.
        saves = self._rules.on_records(call, name, args, kwargs)
        values, named = self._operands.plain(args), self._operands.plain(kwargs)
        before = None if call.trusted else _random_states(self.token.device)
        y = call.function(*values, **named)
        if before is not None and before != _random_states(self.token.device):
            raise NotCovered(
                f"no rule can serve {name}, which draws random numbers that it would not see; "
                f"{_REMEDY}"
            )
        if not isinstance(y, Tensor):
            raise NotCovered(f"{name} on {', '.join(names)} returns several tensors; {_REMEDY}")
        (call.output,) = self._guide.outputs(name, names, inputs, [tuple(y.shape)])
        self._calls += 1
        if y.is_complex():
            raise NotCovered(f"{name} on {', '.join(names)} returns complex numbers; {_REMEDY}")
        # An index or a mask has no gradient, so nothing of the parameter comes back by it.
        if not y.is_floating_point():
            return y
        if call.output.layout is None:
            raise NotCovered(
                f"{name} on {', '.join(names)} turns records into a tensor without "
                f"records, so samples are mixed; {_MIXING}"
            )
        if not call.trusted:  # it may keep its result, or return a view of an argument
            y = y.clone()
        elif y._is_view() and not writes_in_place(name):
            # As of a linear map in three dimensions: autograd would copy a tapped view's gradient.
            y = torch.ops.aten._unsafe_view(y, y.shape)
        return self._tap(y, saves, names)

    def _on_parameters(
        self,
        call: Call,
        name: str,
        names: tuple[str, ...],
        inputs: tuple[Place, ...],
        others: list[Tensor],
    ) -> Any:
        """An operation without records: a function of parameters, or its spread over the batch."""
        # A mean over the batch is such a tensor: it has lost the records, and still depends on
        # them.
        if any(x.requires_grad for x in others):
            raise NotCovered(
                f"{name} on {', '.join(names)} takes a tensor that depends on parameters but has "
                f"no records, so samples may be mixed; {_MIXING}"
            )
        args, kwargs = call.arguments
        cut = self._rules.cut(call, args, kwargs)
        graph = self._graph(call) if cut is None else cut[0].requires_grad_()
        results = [x for x in tensors_in((graph,)) if x.requires_grad]
        # Nothing of it needs a gradient: a constant made of parameters that were detached.
        if not results and not others:
            return map_in(lambda x: x.detach(), graph)
        outputs = self._guide.outputs(name, names, inputs, [tuple(x.shape) for x in results])
        self._calls += 1
        if any(place.layout for place in outputs):
            # It had no records and its result has: the parameter was spread over the batch.
            (call.output,) = outputs
            saves = self._rules.on_spread(call, name, args, kwargs)
            return self._tap(graph.detach().clone(), saves, names)
        if cut is not None:
            return self._operands.wrap(self, graph, names, cut[1], cut=True)

        def wrap(x: Tensor) -> Tensor:
            back = self._rules.back(call, name, x) if x.requires_grad else None
            return self._operands.wrap(self, x, names, back) if x.requires_grad else x

        return map_in(wrap, graph)

    def _graph(self, call: Call) -> Any:
        # The graph must outlive the pass: checkpointing's hooks would drop what it keeps.
        (args, kwargs), root = call.arguments, self._operands.root
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return call.function(*map_in(root, args), **map_in(root, kwargs))

    def _tap(self, y: Tensor, saves: Saves, names: tuple[str, ...]) -> Tensor:
        kept, emit = saves
        site = self._calls
        for name in names:
            self._due[name] += 1

        def record(gradient: Tensor, *kept: Tensor) -> None:
            with torch.no_grad(), exact_products(gradient.device), PLAIN_TORCH():
                emitted = emit(wide(gradient), *(_wide_float(x) for x in kept))
                for slot, (operand, factor) in enumerate(emitted):
                    self._keep((site, slot), operand, factor)
                self._came_back(names)

        # What is kept must not hold the model's graph; the tap needs values only.
        detached = (x.detach() for x in kept)
        tapped: Tensor = _Tap.apply(  # type: ignore[no-untyped-call]
            y, self.token, record, *detached
        )
        return tapped

    # --- what comes back to the operands ---

    def _keep(self, key: UseKey, operand: Tensor, factor: Use) -> None:
        if type(operand) not in self._operands.kinds:
            raise NotCovered(
                "a rule yielded a factor of a tensor that is no private parameter; ask "
                "call.private(x) of each argument, and yield the argument itself"
            )
        if type(operand) is self._operands.private:
            name = self._operands.name(operand)
            if name in self._handed_over:
                raise NotCovered(f"{name} is used again after its gradient was summed; {_ONCE}")
            self.factors[name][key] = factor
        else:
            # It waits until all uses of this function of parameters have come back.
            number: int = operand.__dict__["number"]
            self._reached.setdefault(number, (operand, []))[1].append(factor)

    def _came_back(self, names: tuple[str, ...]) -> None:
        """Count a use of these parameters, and hand over those of which it was the last."""
        for name in names if self._hand_over is not None else ():
            self._due[name] -= 1
            # A function of it may still have something to send back; `finish` takes that.
            if self._due[name] == 0 and name not in self._operands.made_into:
                assert self._hand_over is not None
                uses, self.factors[name] = self.factors[name], {}
                self._handed_over.add(name)
                self._hand_over(name, uses)

    @contextmanager
    def hand_uses_to(self, hand_over: HandOver) -> Iterator[None]:
        """For one backward pass, part with a parameter's uses as soon as all have come back.

        The pass may be repeated over the same graph. What comes back late is left to `finish`.
        """
        due = self._due.copy()
        self._hand_over, self._handed_over = hand_over, set()
        self.factors = {name: {} for name in self.params}
        try:
            yield
        finally:
            self._hand_over, self._due = None, due

    def finish(self, *, again: bool = False) -> Factors:
        """Take what reached functions of parameters back to the parameters, the last made first.

        With `again` they stay known, for another backward pass.
        """
        if self._reached:
            self._take_back()
        factors, self.factors = self.factors, {}
        if not again:
            self._operands.forget_graphs()
        return factors

    def _take_back(self) -> None:
        with torch.no_grad(), exact_products(self.token.device), PLAIN_TORCH():
            while self._reached:
                # What was made last can only have been made of what was made before it.
                number = max(self._reached)
                derived, reached = self._reached.pop(number)
                for slot, (operand, factor) in enumerate(self._onwards(derived, reached)):
                    self._keep((-number, slot), operand, factor)

    def _onwards(self, derived: Tensor, factors: list[Use]) -> Emitted:
        back: Back | None = derived.__dict__["back"]
        routes = [None if back is None else back(factor) for factor in factors]
        known = [route for route in routes if route is not None]
        if len(known) == len(routes):
            return [emitted for route in known for emitted in route]
        # Some use has no way back as factors: all are written out, and pulled through the graph.
        shape = (self.batch, *derived.shape)
        written = torch.stack([factor.materialised().reshape(shape) for factor in factors]).sum(0)
        return self._operands.pull(derived.__dict__["graph"], written)

    def _refuse_writes(self, name: str, reads: list[Tensor], args: Any, kwargs: Any) -> None:
        target = kwargs.get("out")
        if target is None and (name == "__setitem__" or writes_in_place(name)):
            # `x += p` writes x, which has records, and is allowed; `p += x` is not.
            target = args[0]
        if target is None:
            return
        names = ", ".join(n for x in reads for n in self._operands.names(x))
        if type(target) in self._operands.kinds:
            raise Refused(
                f"{name} writes the parameter {names} during the forward pass; use the operation "
                "that returns a new tensor"
            )
        if kwargs.get("out") is not None or name == "__setitem__":
            raise NotCovered(
                f"{name} writes the parameter {names} into a tensor; use the operation that "
                "returns a new tensor (torch.cat, torch.where), or form=loop"
            )


_REMEDY = "use form=dense or form=loop, or write it with operations that hushgrad doctor lists"
_ONCE = "take its gradients by form=traced"
_MIXING = "compute each record's loss from that record alone, or freeze the parameter"


def _random_states(device: torch.device) -> tuple[Any, ...]:
    """The states of all generators that an operation may draw from, to be compared."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    # NumPy's keeps every second normal draw for later, and has then moved without a new word.
    numpy_: Any = np.random.get_state(legacy=False)
    words = numpy_["state"]["key"].tobytes(), numpy_["state"]["pos"], numpy_["has_gauss"]
    return (*(x.numpy().tobytes() for x in states), random.getstate(), words)


def _wide_float(x: Tensor) -> Tensor:
    return wide(x) if x.is_floating_point() else x
