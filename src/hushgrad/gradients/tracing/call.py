"""An intercepted operation as its rule sees it, and what rules are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hushgrad.gradients.factors.kinds import Use
from hushgrad.gradients.tracing.call_sites import Place
from hushgrad.gradients.tracing.layout import Layout

Emitted = Iterable[tuple[Tensor, Use]]
Saves = tuple[tuple[Tensor, ...], Callable[..., Emitted]]
"""What a rule returns: the tensors to keep, and how they and the output's gradient become factors
of the operands. The factors are made inside the backward pass: `emit(gradient, *kept)`."""
Back = Callable[[Use], "list[tuple[Tensor, Use]] | None"]
"""How a factor of a function of parameters goes back to its operands; None if it must be written
out first and pulled through the function's own graph."""


@runtime_checkable
class Operands(Protocol):
    """What a rule may ask of the pass that its call belongs to."""

    kinds: tuple[Any, ...]

    def value(self, operand: Tensor) -> Tensor:
        """The operand as a plain tensor without a graph."""


@dataclass
class Call:
    """One intercepted operation on a batch, as its rule sees it; `gradients.rule` has an example.

    Args:
        operands: the private parameters of the pass, and functions of them.
        function: what will run; a rule may replace it by a function that gives the same result.
        batch: how many rows there are, one for each record.
        arguments: as the operation was called, by position and by name.
        places: for each tensor without a private parameter, where its records are.
        trusted: whether the operation is known to draw no random numbers and to return a tensor of
            its own; set by the rules.

    Example:
        A rule asks where the records are in the output, for a function that adds 2p to x:

        >>> def rule_of_scaled_add(call, x, p):
        ...     def factors(gradient):
        ...         yield p, Dense(2 * call.out.rows(gradient, call.batch).sum(1))
        ...
        ...     return (), factors
    """

    operands: Operands
    function: Callable[..., Any]
    batch: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    places: dict[int, Place]
    output: Place = field(init=False)
    trusted: bool = True

    def private(self, x: Any) -> bool:
        """Is this argument a private parameter, or a function of some?"""
        return type(x) in self.operands.kinds

    def value(self, operand: Tensor) -> Tensor:
        """A private argument as a plain tensor without a graph."""
        return self.operands.value(operand)

    def layout(self, x: Tensor) -> Layout | None:
        """Where the records are in this argument."""
        return self.places[id(x)].layout

    @property
    def out(self) -> Layout:
        """Where the records are in the result; known once the operation has run."""
        assert self.output.layout is not None
        return self.output.layout


OperationRule = Callable[..., "Saves | None"]


@dataclass(frozen=True)
class Rules:
    """How operations become factors: on records, spread over the batch, and on parameters alone.

    `cut` computes a function of parameters whose own graph is not needed, since its way back takes
    every factor; `back` is the way back, for some factors, through one that has its graph. What
    has a decomposition is run as simpler operations, which are seen in turn.
    """

    on_records: Callable[[Call, str, Any, Any], Saves]
    on_spread: Callable[[Call, str, Any, Any], Saves]
    cut: Callable[[Call, Any, Any], tuple[Tensor, Back] | None]
    back: Callable[[Call, str, Tensor], Back | None]
    decompositions: Mapping[Any, Callable[..., Any]]
