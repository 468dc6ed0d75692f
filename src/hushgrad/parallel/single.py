"""One process: models that are distributed over several processes are refused.

Wrappers such as DDP average gradients over processes inside the backward pass, before hushgrad can
clip them. Two processes that train separately release two models from the same records.
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

# By name, so that apex, fairscale and DeepSpeed need not be imported to recognise their wrappers.
_WRAPPERS = frozenset(
    {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "ShardedDataParallel"}
    | {"FSDPModule", "ReplicateModule", "DeepSpeedEngine"}
)
_REPLICATE = ("torch.distributed._composable.replicate", "DDP")
_SPREAD = frozenset({"DTensor", "ShardedTensor", "FlatParameter"})
_REMEDY = (
    "build the model again without the wrapper and train it in one process; training in several "
    "processes is not supported yet"
)


def require_one_process() -> None:
    """Raise `Refused` if this is one of several processes that work together."""
    ranks = _ranks()
    if ranks > 1:
        raise Refused(
            f"expected one process, got {ranks} that work together (torch.distributed, torchrun): "
            "each would release a model of its own from the same records, but the guarantee covers "
            "one release; start the script with python, without init_process_group"
        )


def _ranks() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    # Processes of torchrun before init_process_group; no other launcher sets TORCHELASTIC_RUN_ID.
    started = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    # Not a number: not torchrun's.
    return int(started) if started.isdecimal() else 1


def refuse_wrapped(modules: Iterable[nn.Module]) -> None:
    """Refuse a module that is, or contains, a wrapper for several processes."""
    for module in modules:
        for path, child in module.named_modules():
            wrapper = _wrapper_of(child)
            if wrapper is not None:
                raise _wrapped(f"layer {path!r}" if path else "the model", wrapper)


@contextmanager
def refuse_wrapper_calls() -> Iterator[None]:
    """Within a `with` block, refuse calls of a wrapper, also of one that no argument contains."""

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
    """Return the name of the wrapper that this module is, or that manages it."""
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS:
            return "FSDP2 module (fully_shard)" if kind.__name__ == "FSDPModule" else kind.__name__
        if (kind.__module__, kind.__name__) == _REPLICATE:
            return "replicate()d module"
    # FSDP marks the modules that it manages, so that the inside of a wrapper is recognised too.
    return "module managed by FSDP" if getattr(module, "_is_fsdp_managed_module", False) else None


def _wrapped(what: str, wrapper: str) -> Refused:
    return Refused(
        f"expected a model in one process, but {what} is a {wrapper}, which mixes gradients or "
        f"splits batches before anything is clipped; {_REMEDY}"
    )


def spread_kind(p: Tensor) -> str | None:
    """Return the name of the distributed tensor type that this is, or None."""
    return next((kind.__name__ for kind in type(p).__mro__ if kind.__name__ in _SPREAD), None)


def refuse_accumulator_hooks(params: Params) -> None:
    """Refuse parameters whose gradient accumulators have hooks, as in a model wrapped by DDP.

    The hooks remain when the model inside the wrapper is called directly. Python hooks can be
    counted. DDP's hooks are C++ and cannot be counted, but they keep the accumulator alive, and
    the DDP object itself is found among Python's objects.
    """
    held = {}
    for name, p in params.items():
        if _python_hooks(p):
            raise Refused(
                f"expected parameters without hooks, got one on the gradient accumulator of the "
                f"parameter {name!r}, which would see one record's gradient; remove the hook, or "
                "build the model again"
            )
        if _is_held(p):
            held[id(p)] = name
    # A graph that is still in use also keeps accumulators alive, which is allowed. So search for
    # DDP objects, which takes a tenth of a second.
    for reducer in _reducers() if held else ():
        for p in reducer.parameters():
            if id(p) in held:
                raise Refused(
                    f"expected a model in one process, but the parameter {held[id(p)]!r} belongs "
                    f"to a {type(reducer).__name__}, whose hooks average gradients over processes "
                    f"even if the model inside it is called; {_REMEDY}"
                )


def _accumulator(p: Tensor) -> Any:
    """Return the node that adds to `p.grad`: the existing one if something keeps it alive."""
    with torch.enable_grad():
        return p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _is_held(p: Tensor) -> bool:
    """Return whether something keeps the accumulator alive: then a mark on it persists."""
    _accumulator(p).metadata[__name__] = True
    return _accumulator(p).metadata.pop(__name__, None) is not None


def _python_hooks(p: Tensor) -> bool:
    """Return whether the accumulator has Python hooks; a new handle exposes the dictionary."""
    node = _accumulator(p)
    count = 0
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        count += len(handle.hooks_dict_ref() or ()) - 1
        handle.remove()
    return count > 0


def _reducers() -> list[nn.Module]:
    # By type, because `isinstance` runs code of proxy objects that override `__class__`.
    kinds = (nn.parallel.DistributedDataParallel,)
    return [x for x in gc.get_objects() if issubclass(type(x), kinds)]
