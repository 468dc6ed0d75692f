"""The fast path's tape: one forward, one backward, and the factors of every private parameter.

For the duration of a pass each private parameter's class is switched to one whose
`__torch_function__` hands every operation that consumes it to the tape. The operation runs with
the parameter detached, and an identity on its output picks up the output's gradient on the way
back, so autograd never computes the weight gradients that would be thrown away.

A function of parameters alone (a transpose, a slice, `1 + w`, a table looked up at fixed
positions) is computed once, with its own small autograd graph; what reaches it from the records
is pulled back through that graph, record by record, after the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hushgrad.numerics import exact_products, wide
from hushgrad.persample.calls import first_row, map_in, name_of, tensors_in, writes_in_place
from hushgrad.persample.factors import Dense, Factor, Outer, Rows, Use
from hushgrad.persample.gradients import Key
from hushgrad.persample.layout import Layout
from hushgrad.persample.sites import Guide, Place
from hushgrad.types import NotCovered, Params, Refused

Emitted = Iterable[tuple[Tensor, Factor]]
Saves = tuple[tuple[Tensor, ...], Callable[..., Emitted]]
"""What a rule returns: the tensors to keep, and how they and the output's gradient become factors
of the operands. The factors are made inside the backward pass: `emit(gradient, *kept)`."""

_PLAIN_TORCH = torch._C.DisableTorchFunctionSubclass

# Attributes of a parameter that are parameters again; all others (shape, dtype ...) are facts.
_VIEW_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# Operations that read only the shape or type of their second tensor.
_READS_NO_VALUE = frozenset({"type_as", "view_as", "expand_as", "reshape_as"})
_CASTS = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"}
)


class _Source(NamedTuple):
    """What a tensor is of one parameter: its rows from `start` on, transposed if `turned`."""

    name: str
    turned: bool = False
    start: int = 0


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


@dataclass
class Call:
    """One intercepted operation on a batch, as its rule sees it."""

    tape: Tape
    function: Callable[..., Any]
    batch: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    places: dict[int, Place]
    output: Place = field(init=False)
    runs_again: bool = False  # set by the rule that repeats the operation on the way back

    def private(self, x: Any) -> bool:
        """Is this argument a private parameter, or a function of some?"""
        return isinstance(x, self.tape.operands)

    def layout(self, x: Tensor) -> Layout | None:
        """Where the records are in this argument."""
        return self.places[id(x)].layout

    @property
    def out(self) -> Layout:
        """Where the records are in the result; known once the operation has run."""
        assert self.output.layout is not None
        return self.output.layout


Rule = Callable[..., "Saves | None"]


class Tape:
    """Records one pass over `batch` records, led by a guide that knows where the records are."""

    def __init__(self, params: Params, batch: int, guide: Guide, rules: Rules) -> None:
        self.params, self.batch = params, batch
        self._guide, self._rules = guide, rules
        self.decompositions = rules.decompositions
        self._name_of = {id(p): name for name, p in params.items()}
        device = next(iter(params.values())).device
        self.token = torch.zeros((), device=device, requires_grad=True)
        self._calls = 0
        self.factors: dict[str, dict[Key, Use]] = {name: {} for name in params}
        self._leaves: dict[str, Tensor] = {}
        self._lookups: list[tuple[str, Tensor, Callable[[Tensor], Factor]]] = []
        self._pending: list[tuple[Key, Tensor, Tensor]] = []
        self._members = {"tape": self, "__torch_function__": _intercept}
        self._private: Any = type("Private", (nn.Parameter,), dict(self._members))
        self.operands: tuple[Any, ...] = (self._private,)

    @cached_property
    def _derived(self) -> Any:
        """The class of functions of parameters, made when the first one is met."""
        derived = type("Derived", (Tensor,), dict(self._members))
        self.operands = (self._private, derived)
        return derived

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Switch the parameters' classes, and give them back whatever happens."""
        try:
            for p in self.params.values():
                p.__class__ = self._private
            yield
        finally:
            for p in self.params.values():
                p.__class__ = nn.Parameter

    # --- one intercepted call ---

    def call(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        name = name_of(function)
        if name.startswith("get ") and name[4:] not in _VIEW_ATTRIBUTES:
            return function(*args, **kwargs)
        reads = self._operands_in((args, kwargs))
        values = args[:1] if name in _READS_NO_VALUE else (args, kwargs)
        if not torch.is_grad_enabled() or not self._operands_in(values):
            return function(*self._plain(args), **self._plain(kwargs))
        self._refuse_writes(name, reads, args, kwargs)
        others = [x for x in tensors_in(values) if not isinstance(x, self.operands)]
        names = tuple(sorted({n for x in reads for n in self._names(x)}))
        shapes = [tuple(x.shape) for x in others]
        inputs = self._guide.inputs(name, names, shapes) if others else ()
        places = {id(x): place for x, place in zip(others, inputs, strict=True)}
        call = Call(self, function, self.batch, (args, kwargs), places)
        if any(place.layout for place in inputs):
            return self._on_records(call, name, names, inputs)
        return self._on_parameters(call, name, names, inputs, others)

    def _on_records(
        self, call: Call, name: str, names: tuple[str, ...], inputs: tuple[Place, ...]
    ) -> Tensor:
        args, kwargs = call.arguments
        saves = self._rules.on_records(call, name, args, kwargs)
        before = _random_state(self.token.device) if call.runs_again else None
        y = call.function(*self._plain(args), **self._plain(kwargs))
        if before is not None and not torch.equal(before, _random_state(self.token.device)):
            raise NotCovered(f"no rule for {name}, which draws random numbers; {_REMEDY}")
        if not isinstance(y, Tensor):
            raise NotCovered(f"{name} on {', '.join(names)} returns several tensors; {_REMEDY}")
        (call.output,) = self._guide.outputs(name, names, inputs, [tuple(y.shape)])
        self._calls += 1
        if y.is_complex():
            raise NotCovered(f"{name} on {', '.join(names)} returns complex numbers; {_REMEDY}")
        if not y.is_floating_point():
            return y
        if call.output.layout is None:
            raise NotCovered(
                f"{name} on {', '.join(names)} turns records into a tensor of shape "
                f"{tuple(y.shape)} without records, so samples are mixed; {_MIXING}"
            )
        # An operation that no rule knows may keep its result, or return a view of an argument.
        return self._tap(y.clone() if call.runs_again else y, saves)

    def _on_parameters(
        self,
        call: Call,
        name: str,
        names: tuple[str, ...],
        inputs: tuple[Place, ...],
        others: list[Tensor],
    ) -> Any:
        """An operation without records: a function of parameters, or its spread over the batch."""
        if any(x.requires_grad for x in others):
            raise NotCovered(
                f"{name} on {', '.join(names)} takes a tensor that depends on parameters but has "
                f"no records, so samples may be mixed; {_MIXING}"
            )
        args, kwargs = call.arguments
        found = self._rules.lookup(call, args, kwargs)
        graph = self._graph(call) if found is None else found[0].requires_grad_()
        results = [x for x in tensors_in((graph,)) if x.requires_grad]
        if not results and not others:
            return map_in(lambda x: x.detach(), graph)
        outputs = self._guide.outputs(name, names, inputs, [tuple(x.shape) for x in results])
        self._calls += 1
        if any(place.layout for place in outputs):
            (call.output,) = outputs
            saves = self._rules.on_spread(call, name, args, kwargs)
            return self._tap(graph.detach().clone(), saves)
        if found is not None:
            self._lookups.append((names[0], graph, found[1]))
        source = self._source(call)
        return map_in(lambda x: self._wrap(x, source, names) if x.requires_grad else x, graph)

    def _graph(self, call: Call) -> Any:
        # The graph must outlive the pass: checkpointing's hooks would drop what it keeps.
        args, kwargs = call.arguments
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return call.function(*map_in(self._root, args), **map_in(self._root, kwargs))

    def _tap(self, y: Tensor, saves: Saves) -> Tensor:
        kept, emit = saves
        site = self._calls

        def record(gradient: Tensor, *kept: Tensor) -> None:
            with torch.no_grad(), exact_products(gradient.device), _PLAIN_TORCH():
                emitted = emit(wide(gradient), *(_wide_float(x) for x in kept))
                for slot, (operand, factor) in enumerate(emitted):
                    self._keep((site, slot), operand, factor)

        detached = (x.detach() for x in kept)
        tapped: Tensor = _Tap.apply(  # type: ignore[no-untyped-call]
            y, self.token, record, *detached
        )
        return tapped

    # --- operands: parameters and functions of them ---

    def _operands_in(self, tree: Any) -> list[Tensor]:
        return [x for x in tensors_in(tree) if isinstance(x, self.operands)]

    def _names(self, operand: Tensor) -> tuple[str, ...]:
        if not isinstance(operand, self._private):
            names: tuple[str, ...] = operand.__dict__["names"]
            return names
        return (self._name_of[id(operand)],)

    def _root(self, x: Any) -> Any:
        """The tensor that stands for `x` in the graph of parameters."""
        if not isinstance(x, self.operands):
            return x
        if not isinstance(x, self._private):
            return x.__dict__["graph"]
        name = self._name_of[id(x)]
        if name not in self._leaves:
            leaf: Tensor = x.detach()
            self._leaves[name] = leaf.requires_grad_()
        return self._leaves[name]

    def _plain(self, tree: Any) -> Any:
        return map_in(lambda x: self.value(x) if isinstance(x, self.operands) else x, tree)

    def value(self, operand: Tensor) -> Tensor:
        """The operand as a plain tensor without a graph."""
        graph: Tensor = operand if isinstance(operand, self._private) else operand.__dict__["graph"]
        return graph.detach()

    def _wrap(self, graph: Tensor, source: Any, names: tuple[str, ...]) -> Tensor:
        derived: Tensor = graph.detach().as_subclass(self._derived)
        origin = None if source is None else source(graph)
        derived.__dict__.update(graph=graph, source=origin, names=names)
        return derived

    def _source(self, call: Call) -> Callable[[Tensor], _Source | None] | None:
        """What the results are of one parameter, where they are its rows, cast or transposed."""
        first = next(iter(call.arguments[0]), None)
        if isinstance(first, self._private):
            known = _Source(self._name_of[id(first)])
        elif isinstance(first, self.operands) and first.__dict__["source"] is not None:
            known = first.__dict__["source"]
        else:
            return None
        value, cast = self.value(first), name_of(call.function) in _CASTS

        def source(result: Tensor) -> _Source | None:
            if cast and result.shape == value.shape:
                return known
            start = first_row(result, value)
            if start is not None and (result.shape == value.shape or not known.turned):
                return known._replace(start=known.start + start)
            turns = value.dim() == 2 and result.shape == value.mT.shape
            if turns and first_row(result, value.mT) is not None:
                return known._replace(turned=not known.turned)
            return None

        return source

    def _keep(self, key: Key, operand: Tensor, factor: Factor) -> None:
        if isinstance(operand, self._private):
            self.factors[self._name_of[id(operand)]][key] = factor
            return
        source = operand.__dict__["source"]
        if source is None or (source.turned and not isinstance(factor, Outer)):
            values = factor.materialised().reshape(self.batch, *operand.shape)
            self._pending.append((key, operand.__dict__["graph"], values))
            return
        if source.turned:
            assert isinstance(factor, Outer)
            factor, operand = factor.transposed, operand.mT
        shape, uses = self.params[source.name].shape, self.factors[source.name]
        if operand.shape == shape:
            uses[key] = factor
        else:
            rows = range(source.start, source.start + len(operand))
            uses[key] = Rows(factor, rows, shape[0])

    def finish(self) -> None:
        """Pull back what reached functions of parameters, record by record."""
        roots = [(name, leaf, Dense) for name, leaf in self._leaves.items()] + self._lookups
        for key, graph, values in self._pending:
            pulled = torch.autograd.grad(
                graph,
                [leaf for _, leaf, _ in roots],
                values.to(graph.dtype),
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
            for i, ((name, _, lift), gradient) in enumerate(zip(roots, pulled, strict=True)):
                if gradient is not None:
                    self.factors[name][(key[0], 1000 + 1000 * key[1] + i)] = lift(wide(gradient))

    def _refuse_writes(self, name: str, reads: list[Tensor], args: Any, kwargs: Any) -> None:
        names = ", ".join(n for x in reads for n in self._names(x))
        writes_first = writes_in_place(name) and args[0] is reads[0]
        if kwargs.get("out") is not None or name == "__setitem__" or writes_first:
            raise Refused(
                f"{name} writes the parameter {names}, or writes it into a tensor, during the "
                "forward pass; use the operation that returns a new tensor (torch.cat, torch.where)"
            )


_REMEDY = "use form=dense or form=loop, or write it with operations that hushgrad doctor lists"
_MIXING = "compute each record's loss from that record alone, or freeze the parameter"


@dataclass(frozen=True)
class Rules:
    """How operations become factors: on records, spread over the batch, and table look-ups.

    Those that have a decomposition are run as simpler operations, which are seen in turn.
    """

    on_records: Callable[[Call, str, Any, Any], Saves]
    on_spread: Callable[[Call, str, Any, Any], Saves]
    lookup: Callable[[Call, Any, Any], tuple[Tensor, Callable[[Tensor], Factor]] | None]
    decompositions: Mapping[Any, Callable[..., Any]]


@classmethod  # type: ignore[misc]
def _intercept(
    cls: Any, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    simpler = cls.tape.decompositions.get(function)
    if simpler is not None and torch.is_grad_enabled():
        return simpler(*args, **kwargs or {})
    with _PLAIN_TORCH():
        return cls.tape.call(function, args, kwargs or {})


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _wide_float(x: Tensor) -> Tensor:
    return wide(x) if x.is_floating_point() else x
