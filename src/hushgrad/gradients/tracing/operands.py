"""Operands: the private parameters of a pass and functions of them, each known by its class.

For the duration of a pass each private parameter's class is switched to one whose
`__torch_function__` hands every operation that consumes it to the tape. A function of parameters
alone is a tensor of another such class, with its own small autograd graph behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hushgrad.gradients.factors.kinds import Dense
from hushgrad.gradients.tracing.call import Back, Emitted
from hushgrad.gradients.tracing.calls import map_in
from hushgrad.numerics import wide
from hushgrad.types import Params

PLAIN_TORCH = torch._C.DisableTorchFunctionSubclass
"""In it operations on operands run as on any tensor."""


@runtime_checkable
class Interceptor(Protocol):
    """Whoever is handed the operations that consume an operand."""

    decompositions: Mapping[Any, Any]

    def call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operation in its own way."""


class PassOperands:
    """The operands of one pass: what they are called, what they hold, and what they are made of."""

    def __init__(self, params: Params) -> None:
        self.params = params
        self.private: Any = None  # the class of parameters, while the pass is open
        self._derived: Any = None  # the class of functions of them, once there is one
        self.kinds: tuple[Any, ...] = ()
        self.made_into: set[str] = set()  # the parameters that others were made of
        self._name_of = {id(p): name for name, p in params.items()}
        self._leaves: dict[str, Tensor] = {}
        self._cuts: list[Tensor] = []
        self._made = 0

    @contextmanager
    def intercept(self, tape: Interceptor) -> Iterator[None]:
        """Switch the parameters' classes, and give them back whatever happens."""
        private = _free_class()
        private.tapes.append(tape)
        self.private, self.kinds = private, (private, self._derived)
        try:
            for p in self.params.values():
                p.__class__ = private
            yield
        finally:
            for p in self.params.values():
                p.__class__ = nn.Parameter
            # A module may keep a weight that it made, and the next pass takes the class.
            self.private, self.kinds = None, (self._derived,)
            private.tapes.clear()
            _free_classes.append(private)

    def names(self, operand: Tensor) -> tuple[str, ...]:
        """The parameters that it is, or is made of."""
        if type(operand) is not self.private:
            names: tuple[str, ...] = operand.__dict__["names"]
            return names
        return (self.name(operand),)

    def name(self, parameter: Tensor) -> str:
        """What a parameter is called."""
        return self._name_of[id(parameter)]

    def value(self, operand: Tensor) -> Tensor:
        """The operand as a plain tensor without a graph."""
        graph: Tensor = operand.__dict__["graph"] if type(operand) is self._derived else operand
        return graph.detach()

    def plain(self, tree: Any) -> Any:
        """Arguments with the operands' values in their place."""
        return map_in(lambda x: self.value(x) if type(x) in self.kinds else x, tree)

    # --- functions of parameters ---

    def root(self, x: Any) -> Any:
        """The tensor that stands for `x` in the graph of parameters."""
        if type(x) not in self.kinds:
            return x
        if type(x) is self._derived:
            return x.__dict__["graph"]
        name = self.name(x)
        if name not in self._leaves:
            leaf: Tensor = x.detach()
            self._leaves[name] = leaf.requires_grad_()
        return self._leaves[name]

    def wrap(
        self,
        tape: Interceptor,
        graph: Tensor,
        names: tuple[str, ...],
        back: Back | None,
        *,
        cut: bool = False,
    ) -> Tensor:
        """Make an operand of a function of parameters.

        With `cut` its graph is not needed, and what was made of it is pulled back to it alone.
        """
        if self._derived is None:
            # A class for each pass: an operand that outlives it must not reach the next one's tape.
            self._derived = _operand_class(Tensor)
            self._derived.tapes.append(tape)
            self.kinds = (self.private, self._derived)
        # It requires a gradient, so that a kernel which uses it unseen shows.
        derived: Tensor = graph.detach().as_subclass(self._derived).requires_grad_()
        self._made += 1
        self.made_into.update(names)
        derived.__dict__.update(graph=graph, names=names, back=back, number=self._made)
        if cut:
            self._cuts.append(derived)
        return derived

    def pull(self, graph: Tensor, gradients: Tensor) -> Emitted:
        """Take each record's gradient of a function back through the graph of parameters."""
        leaves = [(self.params[name], leaf) for name, leaf in self._leaves.items()]
        roots = leaves + [(cut, cut.__dict__["graph"]) for cut in self._cuts]
        pulled = torch.autograd.grad(
            graph,
            [root for _, root in roots],
            gradients.to(graph.dtype),
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
        for (operand, _), gradient in zip(roots, pulled, strict=True):
            if gradient is not None:
                yield operand, Dense(wide(gradient))

    def forget_graphs(self) -> None:
        """Let go of the graph of parameters, after the last backward pass."""
        self._leaves, self._cuts = {}, []


# --- the classes --------------------------------------------------------------------------------


@classmethod  # type: ignore[misc]
def _hand_to_tape(
    cls: Any, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    if not cls.tapes:  # a copy of a parameter that outlived its pass
        with PLAIN_TORCH():
            return function(*args, **kwargs or {})
    (tape,) = cls.tapes
    simpler = tape.decompositions.get(function)
    if simpler is not None and torch.is_grad_enabled():
        result = simpler(*args, **kwargs or {})
        if result is not NotImplemented:
            return result
    with PLAIN_TORCH():
        return tape.call(function, args, kwargs or {})


def _operand_class(base: type) -> Any:
    return type("Operand", (base,), {"tapes": [], "__torch_function__": _hand_to_tape})


# Classes of parameters that no pass is using. To make one takes time, and to collect it more.
_free_classes: list[Any] = []


def _free_class() -> Any:
    try:
        return _free_classes.pop()
    except IndexError:
        return _operand_class(nn.Parameter)
