"""What per-sample gradients are taken of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType
from typing import Any

import torch
from torch import nn

from hushgrad.persample.records import zeros_like
from hushgrad.persample.watch import Key, restored
from hushgrad.types import Batch, Foreseen, Loss, Params


@dataclass(frozen=True)
class Subject:
    """A loss, its private parameters, and the modules whose buffers are watched.

    `idle` names parameters that may be on no path; `free_buffers` are those that a pass may
    write, because it writes them alike whatever the records are. `foreseen` are the weights that
    the gradients will probably be summed with.
    """

    loss: Loss
    params: Params
    modules: tuple[nn.Module, ...]
    idle: frozenset[str] = frozenset()
    free_buffers: frozenset[Key] = frozenset()
    foreseen: Foreseen | None = None

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Run a pass that leaves the free buffers as they were, so that others start alike."""
        if not self.free_buffers:
            yield
            return
        with restored({}, self.modules):
            yield

    def advance(self, batch: Batch) -> None:
        """Move the free buffers once, by a pass over zeros: no record ever reaches them."""
        if self.free_buffers:
            with torch.random.fork_rng(), torch.enable_grad():
                self.loss(zeros_like(batch))


def contents(cell: CellType) -> Any:
    """What a function closes over."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
