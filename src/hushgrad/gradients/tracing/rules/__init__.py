"""The rules: for each operation, how its inputs and output gradient become factors.

A rule has the signature of its operation, after the call. It returns the tensors it needs on the
way back and a function that turns the output's gradient and those tensors into factors, or None
where it does not cover the case; the operation's own derivative then serves, record by record.
Inside `emit` every tensor has its records in front: [batch, ...].

An operation that is made of others has a decomposition instead, which runs them.
"""

from __future__ import annotations

from typing import Any

from hushgrad.gradients.tracing.call import Call, Rules, Saves
from hushgrad.gradients.tracing.rules import (  # noqa: F401  (they register)
    attention,
    linear,
    normalisation,
    products,
    recurrent,
)
from hushgrad.gradients.tracing.rules.arithmetic import on_spread
from hushgrad.gradients.tracing.rules.general import by_derivative
from hushgrad.gradients.tracing.rules.registry import (
    DECOMPOSITIONS,
    REGISTERED,
    find_rule,
    inner_function,
)
from hushgrad.gradients.tracing.rules.weights import back, keep_as_factors


def on_records(call: Call, name: str, args: Any, kwargs: Any) -> Saves:
    """The operation's own rule, or its derivative taken record by record."""
    known = find_rule(call.function)
    call.trusted = call.function in REGISTERED
    if not call.trusted:
        call.function = inner_function(call.function)
    saves = known(call, *args, **kwargs) if known is not None else None
    return saves if saves is not None else by_derivative(call, name)


RULES = Rules(on_records, on_spread, keep_as_factors, back, DECOMPOSITIONS)
