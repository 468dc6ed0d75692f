"""How a step is executed: speed and memory, never the guarantee."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hushgrad.batches.records import MULTIPLE, count, cut, take
from hushgrad.clipping.pieces import LARGEST_PIECE, Pieces, piece_size
from hushgrad.gradients import (
    AnyGradients,
    Form,
    Gradients,
    Objective,
    auto,
    certificate_for,
    compiled,
    gradients_of,
    restored,
    unwrap_constants,
    use_certificate,
)
from hushgrad.types import Batch, Loss, Params

LARGEST_MICRO_BATCH = LARGEST_PIECE + 256
"""The default number of records processed at once: eight standard deviations above a piece."""


@runtime_checkable
class ClosedForm(Protocol):
    """A loss that computes its own per-sample gradients, without autograd and without a
    certificate.
    """

    def __call__(self, batch: Batch) -> Tensor:
        """Return one loss for each record."""

    def per_sample(self, params: Params, batch: Batch) -> Gradients:
        """Return what `gradients.per_sample` would, with the same guarantees."""


class MicroBatch(NamedTuple):
    """Some records of one piece of a batch, and which share of that piece they are."""

    batch: Batch
    share: float


@dataclass(frozen=True)
class Execution:
    """How gradients are computed: by which form, on how many records at once, and at which scale.

    Guarantees: it changes speed and memory, never the guarantee of a run.

    Args:
        form: the form of per-sample gradients, or several to try in turn; `auto` chooses.
        micro_batch: the largest number of records processed at once; 1280 by default. A loss of K
            views processes a Kth of that, so that it needs no more memory.
        compile: whether to compile the fast form by `torch.compile`. Where that is impossible a
            line in the log says why, and `form` is used as it is.
        loss_scale: a power of two that multiplies the losses before the backward pass and is
            divided out before norms are taken, for gradients that float16 would round to zero. It
            is fixed and
            public: a scale that reacts to overflows, as a GradScaler's does, would reveal records.
        idle: patterns such as "experts.*" for the names of parameters that only some records reach.
            Where no record of a batch reaches them, they get zero plus noise. Without a pattern, a
            parameter that certification finds on no path to the loss is refused, since it may have
            been forgotten.

    Raises:
        ValueError: if `loss_scale` is not a power of two, `micro_batch` is below 1, or `idle` is a
            string.

    Example:
        >>> Execution(micro_batch=64, loss_scale=2.0**10).micro_batch
        64
    """

    form: Form | Sequence[Form] = auto
    micro_batch: int | None = None
    compile: bool = False
    loss_scale: float = 1.0
    idle: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.idle, str):
            raise ValueError(f"expected idle to be a tuple of patterns, got {self.idle!r} alone")
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
        """The forms to try, in this order."""
        forms = (self.form,) if isinstance(self.form, Form) else tuple(self.form)
        return (compiled, *forms) if self.compile else forms

    def objective(self, loss: Loss, params: Params, modules: Sequence[nn.Module] = ()) -> Objective:
        """Combine a loss with its parameters and modules, and with the idle parameters."""
        idle = frozenset(self._idle_of(params)) if self.idle else frozenset()
        return Objective(loss, params, tuple(modules), idle)

    def taker(
        self, objective: Objective, batch: Batch, capacity: int = 0
    ) -> Callable[[], AnyGradients]:
        """Return a function that computes the per-sample gradients of one micro-batch."""
        loss = objective.loss
        # The attribute first: an isinstance check of a protocol takes longer than a small sum.
        if hasattr(loss, "per_sample") and isinstance(loss, ClosedForm) and count(batch):
            return partial(loss.per_sample, objective.params, batch)
        if self.loss_scale != 1:
            return partial(self._scaled, objective, batch, capacity)
        return partial(gradients_of, objective, batch, forms=self.forms, capacity=capacity)

    def _scaled(self, objective: Objective, batch: Batch, capacity: int) -> AnyGradients:
        """Return the gradients of the scaled loss, with the scale divided out."""
        loss, scale = objective.loss, self.loss_scale
        large = replace(objective, loss=lambda part: scale * loss(part), foreseen=None)
        found = gradients_of(large, batch, forms=self.forms, capacity=capacity)
        return (1 / scale) * found

    def _idle_of(self, params: Params) -> list[str]:
        for pattern in self.idle:
            if not fnmatch.filter(params, pattern):
                raise ValueError(
                    f"expected a parameter for every pattern of idle, got none for {pattern!r}; "
                    "see dict(model.named_parameters()) for the names"
                )
        return [n for n in params if any(fnmatch.fnmatchcase(n, x) for x in self.idle)]

    def capacity(self, expected: float, *, rows: int = 1) -> int:
        """Return the size of the largest micro-batches, where batches have this expected size.

        A Poisson batch exceeds its expected size by four standard deviations once in 30 000 times.
        The size follows from the public expectation alone.
        """
        each = piece_size(expected)
        return min(math.ceil(each + 4 * math.sqrt(each)), self._largest(rows))

    def _largest(self, rows: int) -> int:
        return max((self.micro_batch or LARGEST_MICRO_BATCH) // rows, 1)

    def parts(
        self,
        batch: Batch,
        modules: Sequence[nn.Module] = (),
        *,
        rows: int = 1,
        pieces: Pieces | None = None,
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a batch whose records take `rows` rows; an empty batch is one.

        Each micro-batch is part of one piece. From the second one on the modules' buffers are
        restored after it: a buffer that counts passes would otherwise reveal the number of records.
        """
        most = self._largest(rows)
        # The proof of rounding covers a limited number of partial sums.
        if pieces is not None:
            pieces.require_few_sums(most)
        first = True
        for piece in _pieces(batch, pieces):
            size = count(piece)
            for start in range(0, max(size, 1), most):
                stop = min(start + most, size)
                part = piece if stop - start == size else cut(piece, start, stop)
                # Only one of a batch's passes may advance the buffers.
                with nullcontext() if first else restored({}, modules):
                    yield MicroBatch(part, (stop - start) / size if size else 1.0)
                first = False


def _pieces(batch: Batch, pieces: Pieces | None) -> Iterator[Batch]:
    dealt = [] if pieces is None else [p for p in pieces.places(count(batch)) if len(p)]
    if not dealt:
        yield batch
    for places in dealt:
        yield take(batch, places)


def fitting_micro_batch(
    loss: Loss, params: Params, batch: Batch, *, memory: int, modules: Sequence[nn.Module] = ()
) -> int:
    """Find the largest micro-batch whose activations and factors fit into `memory` bytes.

    It is measured: two small passes show what is kept for the backward pass and as factors, and how
    that grows with the number of records. The size depends on the shapes of the records given here,
    so measure on public or synthetic ones.

    Args:
        loss: maps a batch to one loss for each record.
        params: the private parameters by name.
        batch: records to measure with; a few are enough, since they are repeated.
        memory: the number of bytes.
        modules: the modules that the loss calls.

    Returns:
        The number of records, for `Execution(micro_batch=...)`.

    Raises:
        ValueError: if the batch is empty, or the memory is too small for the smallest micro-batch.

    Example:
        >>> layer = nn.Linear(100, 1)
        >>> params = dict(layer.named_parameters())
        >>> size = fitting_micro_batch(
        ...     lambda x: layer(x)[:, 0],
        ...     params,
        ...     torch.randn(4, 100),
        ...     memory=10**6,
        ...     modules=(layer,),
        ... )
        >>> 100 < size < 10_000
        True
    """
    size = count(batch)
    if size == 0:
        raise ValueError("expected a batch with at least one record to measure, got none")
    used = [
        _bytes_held(loss, params, take(batch, [i % size for i in range(n)]), modules)
        # Two sizes: the difference leaves out what does not grow with records.
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
    """Return the bytes that one pass keeps: each storage counted once, parameters left out."""
    certificate = certificate_for(loss, params, batch, modules=modules)
    batch, _ = unwrap_constants(batch)
    objective = Objective(loss, params, tuple(modules))
    own = {p.untyped_storage().data_ptr() for p in params.values()}
    held: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is reused

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda x: x)
    # Measuring must leave no trace in buffers, gradients or random state.
    with torch.random.fork_rng(), restored(params, modules), hooks:
        gradients = use_certificate(certificate, objective, batch, fresh=True)
    for x in gradients.held() if gradients is not None else ():
        note(x)
    return sum(storage.nbytes() for storage in held.values())
