"""How a step is executed: speed and memory, never the guarantee."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hushgrad.aggregate import LARGEST_SUM
from hushgrad.persample import (
    Form,
    Gradients,
    auto,
    certificate_for,
    compiled,
    per_sample,
    run_certified,
)
from hushgrad.persample.constants import opened
from hushgrad.persample.records import MULTIPLE, count, cut, take
from hushgrad.persample.subject import Subject
from hushgrad.persample.watch import restored
from hushgrad.types import Batch, Foreseen, Loss, Params


@runtime_checkable
class ClosedForm(Protocol):
    """A loss that knows its own per-sample gradients, and needs neither autograd nor a proof."""

    def __call__(self, batch: Batch) -> Tensor:
        """One loss for each record."""

    def per_sample(self, params: Params, batch: Batch) -> Gradients:
        """As `persample.per_sample` would return them, with the same promises."""


@dataclass(frozen=True)
class Execution:
    """The form of per-sample gradients, and how many records are worked on at once.

    With `compile` the fast form is recorded and compiled by `torch.compile`; where it cannot be, a
    line in the log says why, and `form` is taken as it is.

    Without `micro_batch` a batch is taken in one piece, or in pieces of 1024 if it is larger; a
    loss of K views takes pieces of a Kth of that, so that it needs no more memory. `loss_scale`, a
    power of two, multiplies the losses on their way back and is divided out before norms are taken,
    for gradients that float16 would round to zero. It is public: one that reacts to overflows, as
    a GradScaler's does, would tell of records.
    """

    form: Form | Sequence[Form] = auto
    micro_batch: int | None = None
    compile: bool = False
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        if not (self.loss_scale > 0 and math.frexp(self.loss_scale)[0] == 0.5):
            raise ValueError(
                f"expected loss_scale to be a power of two, got {self.loss_scale}; pass 2.0**16"
            )
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(
                f"expected micro_batch >= 1, got {self.micro_batch}; leave it out to take the "
                "batch in one piece"
            )

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms to try, in turn."""
        forms = (self.form,) if isinstance(self.form, Form) else tuple(self.form)
        return (compiled, *forms) if self.compile else forms

    def gradients(
        self,
        loss: Loss,
        params: Params,
        batch: Batch,
        modules: Sequence[nn.Module] = (),
        foreseen: Foreseen | None = None,
    ) -> Gradients:
        """Per-sample gradients of one micro-batch; a loss may have them itself."""
        # Asked of the attribute first: of a protocol alone the answer takes longer than a sum.
        if hasattr(loss, "per_sample") and isinstance(loss, ClosedForm) and count(batch):
            return loss.per_sample(params, batch)
        if self.loss_scale == 1:
            return per_sample(
                loss, params, batch, form=self.forms, modules=modules, foreseen=foreseen
            )
        scale = self.loss_scale
        scaled = per_sample(
            lambda part: scale * loss(part), params, batch, form=self.forms, modules=modules
        )
        return (1 / scale) * scaled

    def parts(
        self, batch: Batch, modules: Sequence[nn.Module] = (), *, rows: int = 1
    ) -> Iterator[Batch]:
        """The micro-batches of a batch whose records take `rows` rows; an empty one is one part.

        While the caller works on any but the first, the modules' buffers are held: a buffer that
        counts passes would otherwise tell how many records there were.
        """
        size = count(batch)
        step = min(max((self.micro_batch or LARGEST_SUM) // rows, 1), LARGEST_SUM)
        yield batch if size <= step else cut(batch, 0, step)
        for start in range(step, size, step):
            with restored({}, modules):
                yield cut(batch, start, min(start + step, size))


def fitting_micro_batch(
    loss: Loss, params: Params, batch: Batch, *, memory: int, modules: Sequence[nn.Module] = ()
) -> int:
    """The largest micro-batch whose activations and factors fit into `memory` bytes.

    Measured, not modelled: what two small passes keep for their backward pass and hold as
    factors, and how it grows from one to the other.
    """
    size = count(batch)
    if size == 0:
        raise ValueError("expected a batch with at least one record to measure, got none")
    used = [
        _bytes_held(loss, params, take(batch, [i % size for i in range(n)]), modules)
        for n in (MULTIPLE, 2 * MULTIPLE)
    ]
    each = max((used[1] - used[0]) / MULTIPLE, 1.0)
    fits = int((memory - used[0]) / each) + MULTIPLE
    if fits < MULTIPLE:
        raise ValueError(
            f"expected memory for {MULTIPLE} records, about {used[0]} bytes, got {memory}; raise "
            "it, shorten the records, or use activation checkpointing"
        )
    return fits // MULTIPLE * MULTIPLE


def _bytes_held(loss: Loss, params: Params, batch: Batch, modules: Sequence[nn.Module]) -> int:
    """Bytes that one pass keeps: each storage counted once, parameters left out."""
    certificate = certificate_for(loss, params, batch, modules=modules)
    batch, _ = opened(batch)
    subject = Subject(loss, params, tuple(modules))
    own = {p.untyped_storage().data_ptr() for p in params.values()}
    held: dict[int, torch.UntypedStorage] = {}  # alive, so that no address comes twice

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda x: x)
    with torch.random.fork_rng(), restored(params, modules), hooks:
        gradients = run_certified(certificate, subject, batch)
    for x in gradients.held() if gradients is not None else ():
        note(x)
    return sum(storage.nbytes() for storage in held.values())
