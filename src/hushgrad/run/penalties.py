"""Penalties: tested at each step, before its release, to be functions of the parameters alone.

A penalty's gradient is added after the noise. A penalty that reads the batch would publish it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hushgrad.batches.records import tensors
from hushgrad.bits import digests
from hushgrad.numerics import same_bits
from hushgrad.run.step import gradient_of
from hushgrad.types import Batch, Params, Refused

PenaltyFunction = Callable[[], Tensor]


class Constants:
    """The tensors that a run's penalty may read besides those of `modules`: the same at every step.

    They are recorded at the penalty's first call. A tensor that appears or changes later may have
    been computed from a batch, like a running mean of its features. The `private` tensors, which
    hold all records, are never constants.
    """

    def __init__(
        self, modules: Iterable[nn.Module], *, private: Iterable[Tensor | ndarray] = ()
    ) -> None:
        self._modules = tuple(modules)
        self._private = {
            _address(x) if isinstance(x, Tensor) else x.__array_interface__["data"][0]
            for x in private
        }
        self._known: dict[int, Tensor] | None = None  # kept alive, so that no address is reused
        self._digests: dict[str, int] = {}
        self._steps = 0
        self._code: CodeType | None = None

    def require(self, penalty: PenaltyFunction, params: Params, *batches: Batch) -> None:
        """Refuse a penalty that depends on anything but parameters, buffers and constants.

        Every tensor that it reads is checked at each step. At steps 1, 2, 4, 8, … of the same code
        the penalty is called again with other records in the batch, and must be bit-identical: it
        could take a number from the batch, such as its size, without any operation on a tensor.

        Two things are not detected: numbers that Python code took from a batch before, and a tensor
        that was computed from the first batch before the penalty's first call.
        """
        read = _Reading()
        with torch.random.fork_rng(), torch.enable_grad():
            value = read.during(penalty)
        # The drawn batch and the one passed: the latter may be on another device.
        records = [x for batch in batches for x in tensors(batch)]
        if read.tensors.keys() & {_address(x) for x in records}:
            raise _refused("a tensor of the batch")
        if read.tensors.keys() & self._private:
            raise _refused("the data set")
        own = {_address(x) for module in self._modules for x in _held(module)}
        own |= {_address(p) for p in params.values()}
        self._require_known({a: x for a, x in read.tensors.items() if a not in own})
        # A lambda is created anew at each step; its code object stays the same.
        code = getattr(penalty, "__code__", None)
        self._steps = self._steps + 1 if code is self._code else 1
        self._code = code
        if self._steps & (self._steps - 1) == 0:
            _require_same_beside_others(penalty, value, params, records)

    def _require_known(self, others: Mapping[int, Tensor]) -> None:
        if any(x.requires_grad and not x.is_leaf for x in others.values()):
            # Its gradient would flow through a graph that this check has not seen.
            raise _refused("a tensor that was computed from the parameters before it was called")
        found = digests({str(address): x for address, x in others.items()})
        if self._known is None:
            self._known, self._digests = dict(others), found
        elif not found.items() <= self._digests.items():
            raise _refused("a tensor that is new, or has changed since the penalty's first call")


class _Reading(TorchDispatchMode):
    """Records the tensors that operations read but did not create, by address."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: dict[int, Tensor] = {}
        self._made: dict[int, Any] = {}

    def during(self, penalty: PenaltyFunction) -> Tensor:
        """Call the penalty and record what it reads."""
        with self:
            return penalty()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            # What an operation has made in this call comes from what it read, and needs no check.
            if isinstance(x, Tensor) and (address := _address(x)) and address not in self._made:
                self.tensors[address] = x
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and (address := _address(x)) not in self.tensors:
                self._made[address] = x
        return made


def _require_same_beside_others(
    penalty: PenaltyFunction, value: Tensor, params: Params, records: list[Tensor]
) -> None:
    """Compare value and gradient with those for other records in the batch."""
    with torch.random.fork_rng(), torch.enable_grad(), _replaced(records):
        try:
            other = penalty()
        except Exception as error:
            raise _refused(f"the batch ({type(error).__name__} with another one)") from None
    one, two = (gradient_of(partial(_identity, v), params) for v in (value, other))
    same = one.keys() == two.keys() and all(same_bits(one[n], two[n]) for n in one)
    if not (same and same_bits(value.detach(), other.detach())):
        raise _refused("the batch, or something else that changes from call to call")


@contextmanager
def _replaced(records: Iterable[Tensor]) -> Iterator[None]:
    """Within a `with` block, let tensors hold other records, and another number of them."""
    kept = {id(x): (x, x.data) for x in records}
    try:
        for x, data in kept.values():
            # One record more as well: a penalty could depend on the size of the batch.
            x.data = data.new_zeros(len(data) + 1, *data.shape[1:])
        yield
    finally:
        for x, data in kept.values():
            x.data = data


def _identity(value: Tensor) -> Tensor:
    return value


def _held(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else 0


def _refused(what: str) -> Refused:
    return Refused(
        "expected a penalty that is a function of the parameters alone, got one that reads "
        f"{what}; its gradient gets no noise: what depends on records belongs in the loss. Create "
        "constants before the loop, and pass modules that follow the model, such as an average of "
        "it, as train(…, keep=…)"
    )
