"""Which rule serves which operation: those of the library, and those that others add."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.overrides import (
    get_testing_overrides,
    handle_torch_function,
    has_torch_function,
    is_tensor_method_or_property,
)

from hushgrad.gradients.tracing.call import OperationRule
from hushgrad.gradients.tracing.calls import name_of, tensors_in

Decomposition = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])
OwnRules = tuple[tuple[Any, OperationRule], ...]

REGISTERED: dict[Any, OperationRule] = {}
"""The library's rules, for operations that are known to draw no random numbers."""
OWN: dict[Any, OperationRule] = {}
"""Rules that users add, which come first."""
DECOMPOSITIONS: dict[Any, Decomposition] = {}
_NAMESPACES = (torch, torch.Tensor, F)
_OPERATIONS: weakref.WeakSet[Any] = weakref.WeakSet()


def torch_rule(*names: str) -> Callable[[OperationRule], OperationRule]:
    """Register a rule for every spelling of torch's operation: function, method and operator."""

    def register(function: OperationRule) -> OperationRule:
        spellings = [getattr(space, name, None) for space in _NAMESPACES for name in names]
        for spelling in spellings:
            if spelling is not None:
                REGISTERED[spelling] = function
        return function

    return register


def decomposition(*operations: Any) -> Callable[[Decomposition], Decomposition]:
    """Register a function, of the same signature, that runs these operations as simpler ones.

    It is called with the arguments as they came; the operations in it are seen in turn. Where it
    returns NotImplemented the operation is taken as a whole.
    """

    def register(function: Decomposition) -> Decomposition:
        DECOMPOSITIONS.update(dict.fromkeys(operations, function))
        return function

    return register


def find_rule(function: Any) -> OperationRule | None:
    """The rule of an operation, if it has one; a user's comes before the library's."""
    return OWN.get(function) or REGISTERED.get(function)


def own_rules() -> OwnRules:
    """The rules that users added: what is certified depends on them."""
    return tuple(OWN.items())


# --- what others add ----------------------------------------------------------------------------


def operation(function: Function) -> Function:
    """Make a function one operation that hushgrad intercepts, so that it can have a rule.

    Needed around what torch does not show to anybody: a custom `autograd.Function`, a kernel that
    is called by ctypes. Functions of torch and of `torch.library` are operations as they are.

    Args:
        function: called with tensors, private parameters among them; it returns one tensor.

    Returns:
        The same function. Outside of a pass over private parameters it just runs.

    >>> @operation
    ... def doubled_sum(x, p):
    ...     return x + 2 * p
    >>> doubled_sum(torch.ones(2), torch.ones(2)).tolist()
    [3.0, 3.0]
    """

    @functools.wraps(function)
    def intercepted(*args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        if has_torch_function(tensors):
            return handle_torch_function(intercepted, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    _OPERATIONS.add(intercepted)
    return intercepted  # type: ignore[return-value]


def inner_function(function: Any) -> Any:
    """What a function made by `operation` runs, which is what it was made from."""
    return function.__wrapped__ if function in _OPERATIONS else function


def rule(*operations: Callable[..., Any]) -> Callable[[OperationRule], OperationRule]:
    """Teach hushgrad the per-sample gradients of an operation, by a function for `form=traced`.

    The function is called as the operation is, with a `Call` in front, when a private parameter
    meets records. It returns a tuple of the tensors that are needed on the way back, and a function
    `factors(gradient, *kept)` that yields `(parameter, factor)` for each private parameter among
    the arguments. `gradient` is that of the output. Or it returns None where it does not cover the
    case; the operation's own derivative then serves, if torch has one.

    - `call.private(x)`: is this argument a private parameter? A frozen one gets no factor.
    - `call.layout(x)`: where the records are in this argument; to be asked before the way back.
    - `call.out`: the same for the output. `layout.rows(x, call.batch)` returns [records, t, last
      dimension], and `layout.split(x, call.batch)` [records, ...] with a 1 where the records were.
    - `Dense(values)` is a gradient written out, [records, *shape of the parameter]; `Outer(a, b)`
      stands for Σ_t b_t ⊗ a_t of a matrix, `OneHot(index, b, rows)` for rows of a table.

    Guarantees: certification compares what comes of a rule with runs of one record at a time, and
    refuses `traced` where it is wrong; models that were certified before are certified again. An
    operation that draws random numbers is refused, since its rule could not know the draws.

    Args:
        operations: torch's functions, methods and kernels (`torch.ops…`, `torch.library.custom_op`)
            and functions made by `operation`. A later rule takes the place of an earlier one.

    Raises:
        ValueError: if calls of one of them cannot be intercepted.

    A kernel that adds twice a vector, its rule, and the suite that compares it with autograd:

    >>> from hushgrad.gradients import Dense, traced
    >>> from hushgrad.testing import check_per_sample
    >>> class Kernel(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x, p):
    ...         return x + 2 * p
    ...
    ...     @staticmethod
    ...     def backward(ctx, gradient):
    ...         return gradient, 2 * gradient.sum(0)
    >>> @operation
    ... def scaled_add(x, p):
    ...     return Kernel.apply(x, p)
    >>> @rule(scaled_add)
    ... def scaled_add_rule(call, x, p):
    ...     def factors(gradient):
    ...         yield p, Dense(2 * call.out.rows(gradient, call.batch).sum(1))
    ...
    ...     return (), factors
    >>> p = torch.nn.Parameter(torch.randn(3))
    >>> check_per_sample(
    ...     lambda x: scaled_add(x, p).square().sum(1), {"p": p}, torch.randn(8, 3), form=traced
    ... )
    """
    keys = [key for given in operations for key in _keys_of(given)]

    def register(function: OperationRule) -> OperationRule:
        OWN.update(dict.fromkeys(keys, function))
        return function

    return register


def _keys_of(given: Any) -> list[Any]:
    """What torch names the operation by when it hands over a call."""
    kernel = getattr(given, "_opoverload", given)  # of torch.library.custom_op
    if given in DECOMPOSITIONS:
        raise ValueError(
            f"expected an operation that is taken as a whole, got {name_of(given)}, which hushgrad "
            "runs as simpler ones; give those a rule"
        )
    if isinstance(kernel, torch._ops.OpOverload):
        return [kernel, kernel.overloadpacket]
    if isinstance(kernel, torch._ops.OpOverloadPacket):
        return [kernel, *(getattr(kernel, name) for name in kernel.overloads())]
    if given in _OPERATIONS or _is_torchs(given):
        return [given]
    raise ValueError(
        f"expected an operation whose calls can be intercepted, got {name_of(given)}; define it "
        "with @hushgrad.gradients.operation"
    )


def _is_torchs(given: Any) -> bool:
    """Does torch hand over calls of it that have a private parameter among their arguments?"""
    named = hasattr(given, "__name__")
    return named and (is_tensor_method_or_property(given) or given in get_testing_overrides())
