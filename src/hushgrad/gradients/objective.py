"""What per-sample gradients are taken of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from hushgrad.batches.records import zeros_like
from hushgrad.gradients.guards import WatchedKey, guard_pass, restored
from hushgrad.types import Batch, EagerWeights, Loss, Params


@dataclass(frozen=True)
class Objective:
    """A loss, its private parameters, and the modules whose buffers are watched.

    One value that says what gradients are taken of, from a step down to the pass over the model.

    Args:
        loss: `loss(batch)` returns one value for each record.
        params: the private parameters by name.
        modules: the modules that the loss runs; a pass may write none of their buffers.
        idle: names of parameters that may be on no path to the loss.
        free_buffers: buffers that a pass may write after all, since it writes them alike whatever
            the records are. Certification finds them.
        foreseen: the weights that the gradients will probably be summed with.

    >>> layer = nn.Linear(2, 1)
    >>> objective = Objective(
    ...     lambda x: layer(x).squeeze(1), dict(layer.named_parameters()), (layer,)
    ... )
    >>> list(objective.params)
    ['weight', 'bias']
    """

    loss: Loss
    params: Params
    modules: tuple[nn.Module, ...] = ()
    idle: frozenset[str] = frozenset()
    free_buffers: frozenset[WatchedKey] = frozenset()
    foreseen: EagerWeights | None = None

    def guard_pass(self, held: Iterable[object] = ()) -> AbstractContextManager[None]:
        """Refuse the pass inside if it writes or trains what it may not; see `guards`."""
        return guard_pass(self.params, self.modules, self.free_buffers, held)

    @contextmanager
    def rewind_buffers(self) -> Iterator[None]:
        """Run a pass that leaves the free buffers as they were, so that others start alike."""
        if not self.free_buffers:
            yield
            return
        with restored({}, self.modules):
            yield

    def advance_buffers(self, batch: Batch) -> None:
        """Move the free buffers once, by a pass over zeros: no record ever reaches them."""
        if self.free_buffers:
            with torch.random.fork_rng(), torch.enable_grad():
                self.loss(zeros_like(batch))


def _content_of(cell: CellType) -> Any:
    """What a function closes over."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def references_of(loss: Any, seen: frozenset[int] = frozenset()) -> list[Any]:
    """A callable's code and what it refers to: closure, defaults, globals, bound object, parts."""
    if id(loss) in seen:
        return []
    seen |= {id(loss)}
    if isinstance(loss, functools.partial):
        return [*references_of(loss.func, seen), *loss.args, *loss.keywords.values()]
    if dataclasses.is_dataclass(loss) and not isinstance(loss, nn.Module | type):
        # A value: made anew at each step it must hit, as a lambda does. Its attributes count, too.
        fields = {field.name: getattr(loss, field.name) for field in dataclasses.fields(loss)}
        parts = (fields | getattr(loss, "__dict__", {})).values()
        inner = [references_of(x, seen) if isinstance(x, FunctionType) else [x] for x in parts]
        return [type(loss), *(x for part in inner for x in part)]
    function = getattr(loss, "__func__", loss)
    code = getattr(function, "__code__", None)
    if code is None:  # a module, or another object that can be called
        own = {} if isinstance(loss, nn.Module) else getattr(loss, "__dict__", {})
        return [loss, *own.values()]
    cells = [_content_of(cell) for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    known = function.__globals__
    names = [known[name] for name in code.co_names if name in known]
    bound = [loss.__self__] if function is not loss else []
    found = (*cells, *defaults, *names)
    inner = [held for x in found if isinstance(x, FunctionType) for held in references_of(x, seen)]
    plain = [x for x in found if not isinstance(x, FunctionType)]
    return [code, *bound, *plain, *inner]


def layer_called(name: str) -> str:
    """A module in a message, by its name within the model."""
    return f"layer '{name}'" if name else "the model"
