"""One process: until there is a parallel mode, models spread over several are refused by name.

Wrappers average gradients over processes inside the backward pass, before anything is clipped, and
two processes that train by themselves release two models from the same records.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.types import Params, Refused

# By name, as apex, fairscale and DeepSpeed have theirs: importing them to ask would be slow.
_WRAPPERS = frozenset(
    {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "ShardedDataParallel"}
    | {"FSDPModule", "ReplicateModule", "DeepSpeedEngine"}
)
_REPLICATE = ("torch.distributed._composable.replicate", "DDP")
_SPREAD = frozenset({"DTensor", "ShardedTensor", "FlatParameter"})
_REMEDY = (
    "build the model anew without the wrapper and train it in one process; several processes are "
    "not supported yet"
)


def require_one_process() -> None:
    """Refuse to go on where several processes work together."""
    ranks = _ranks()
    if ranks > 1:
        raise Refused(
            f"expected one process, got {ranks} that work together (torch.distributed, torchrun): "
            "each would release a model of its own from the same records, and the guarantee holds "
            "for one of them; start the script with python, without init_process_group"
        )


def _ranks() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    # torchrun's processes that have not met yet: no other launcher sets the first of the two.
    started = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    return int(started) if started.isdecimal() else 1


def refuse_wrapped(modules: Iterable[nn.Module]) -> None:
    """Refuse a module that is, or has anywhere in it, a wrapper for several processes."""
    for module in modules:
        for path, child in module.named_modules():
            wrapper = _wrapper_of(child)
            if wrapper is not None:
                raise _wrapped(f"layer {path!r}" if path else "the model", wrapper)


@contextmanager
def refuse_wrapper_calls() -> Iterator[None]:
    """Refuse a pass that calls a wrapper, wherever the loss has it from."""

    def look(module: nn.Module, inputs: Any) -> None:
        wrapper = _wrapper_of(module)
        if wrapper is not None:
            raise _wrapped("a model that the loss calls", wrapper)

    handle = nn.modules.module.register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _wrapper_of(module: nn.Module) -> str | None:
    """The name of the wrapper that this module is, or is managed by."""
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS:
            return "FSDP2 module (fully_shard)" if kind.__name__ == "FSDPModule" else kind.__name__
        if (kind.__module__, kind.__name__) == _REPLICATE:
            return "replicate()d module"
    # FSDP marks what it manages, so that the inside of a wrapper is known as well.
    return "module managed by FSDP" if getattr(module, "_is_fsdp_managed_module", False) else None


def _wrapped(what: str, wrapper: str) -> Refused:
    return Refused(
        f"expected a model in one process, but {what} is a {wrapper}, which mixes gradients or "
        f"splits batches before anything is clipped; {_REMEDY}"
    )


def spread_kind(p: Tensor) -> str | None:
    """The name of the kind of tensor whose values lie in several processes, if this is one."""
    return next((kind.__name__ for kind in type(p).__mro__ if kind.__name__ in _SPREAD), None)


def refuse_accumulator_hooks(params: Params) -> None:
    """Refuse parameters whose gradient accumulators carry hooks, as those of a DDP model do.

    They stay there where the model inside the wrapper is used. Python's hooks can be counted;
    those of DDP are C++ and cannot, but they keep the accumulator alive, and DDP itself is found
    among Python's objects.
    """
    held = {}
    for name, p in params.items():
        if _python_hooks(p):
            raise Refused(
                f"the parameter {name} has a hook on its gradient accumulator, which would see one "
                "record's gradient; remove the hook, or build the model anew"
            )
        if _is_held(p):
            held[id(p)] = name
    # A kept graph holds accumulators too, which is allowed; the search takes a tenth of a second.
    for reducer in _reducers() if held else ():
        for p in reducer.parameters():
            if id(p) in held:
                raise Refused(
                    f"expected a model in one process, but the parameter {held[id(p)]} belongs to "
                    f"a {type(reducer).__name__}, whose hooks average gradients over processes "
                    f"also where the model inside it is called; {_REMEDY}"
                )


def _accumulator(p: Tensor) -> Any:
    """The node that adds to `p.grad`: a new one, unless something keeps the last one alive."""
    with torch.enable_grad():
        return p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _is_held(p: Tensor) -> bool:
    """Whether something keeps the accumulator alive: a note on it is still there."""
    _accumulator(p).metadata[__name__] = True
    return _accumulator(p).metadata.pop(__name__, None) is not None


def _python_hooks(p: Tensor) -> bool:
    """Whether hooks of Python sit on the accumulator: another's handle shows their dictionary."""
    node = _accumulator(p)
    count = 0
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        count += len(handle.hooks_dict_ref() or ()) - 1
        handle.remove()
    return count > 0


def _reducers() -> list[nn.Module]:
    # By type: asking `isinstance` runs code of objects that only pretend to have a class.
    kinds = (nn.parallel.DistributedDataParallel,)
    return [x for x in gc.get_objects() if issubclass(type(x), kinds)]
