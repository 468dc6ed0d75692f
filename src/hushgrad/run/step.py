"""One private step: what an algorithm asks of a batch, and the stages in order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from hushgrad.clipping.aggregate import aggregate, piece_error, sum_over_same_records
from hushgrad.clipping.groups import Grouping, whole
from hushgrad.clipping.pieces import Pieces
from hushgrad.clipping.rules import Clip, automatic
from hushgrad.gradients import Gradients
from hushgrad.gradients.guards import restored
from hushgrad.iterates import Values, exchange_values
from hushgrad.noise import Noise, release
from hushgrad.rng import Rng
from hushgrad.run.augmentation import rows_per_record
from hushgrad.run.execution import Execution
from hushgrad.run.metrics import Metrics
from hushgrad.types import (
    Batch,
    Bounded,
    EagerWeights,
    Loss,
    Params,
    PerSample,
    Refused,
    Relation,
    Released,
)

Observed = Callable[[Batch], Mapping[str, Tensor]]
"""The watched values of a micro-batch's records, by name."""

_AUTOMATIC = automatic()
_PLAIN = Execution()


@dataclass(frozen=True)
class Summand:
    """What is summed for each record: a per-sample gradient, clipped by a rule, times `factor`.

    `losses` are the records' losses where they are not those of `gradients`.
    """

    gradients: PerSample
    clip: Clip
    factor: float = 1.0
    losses: Tensor | None = None


@dataclass(frozen=True)
class Part:
    """A micro-batch, and the per-sample gradients of its records at one point or at two.

    It is a `share` of its piece.
    """

    loss: Loss
    params: Params
    batch: Batch
    modules: Sequence[nn.Module]
    execution: Execution
    share: float = 1.0
    foreseen: EagerWeights | None = None
    capacity: int = 0

    @cached_property
    def here(self) -> Gradients:
        """Gradients at the model's point."""
        return self.execution.gradients(
            self.loss, self.params, self.batch, self.modules, self.foreseen, self.capacity
        )

    def at(self, point: Values) -> Gradients:
        """Gradients at another point, by the random draws and buffers that `here` starts from.

        To be asked for before `here`, which moves them on.
        """
        assert "here" not in vars(self)
        with (
            torch.random.fork_rng(),
            restored({}, self.modules),
            exchange_values(self.params, point),
        ):
            return self.execution.gradients(
                self.loss, self.params, self.batch, self.modules, capacity=self.capacity
            )


Ask = Callable[[Part], Sequence[Summand]]
"""A query: what is summed for the records of a micro-batch, as terms that are added up."""


@dataclass(frozen=True)
class BatchPass:
    """A pass over a batch: the loss, where gradients are taken, and how.

    `expected` is the rule that the query will clip by, as far as it is known: with it a form may
    sum each group as soon as its norms are there. `pieces` deals the records of a large batch;
    without it the batch is summed as one, in float64 where it is too large for float32.
    `batch_size` is the public expected size of the batches, for which the model is certified at
    once; without it each larger one is tested.
    """

    loss: Loss
    params: Params
    batch: Batch
    groups: Grouping = whole
    modules: Sequence[nn.Module] = ()
    execution: Execution = _PLAIN
    metrics: Metrics | None = None
    observed: Observed = lambda part: {}
    expected: Clip | None = None
    pieces: Pieces | None = None
    batch_size: float = 0.0

    def sum(self, ask: Ask) -> Bounded:
        """Sum what is asked for over the records, with their metrics beside it.

        Guarantees: adding or removing one record moves the sum by at most `l2`, whatever the
        record and the others are. Nothing is noised yet: a `Bounded` must not leave the process.
        """
        partition = self.groups(tuple(self.params))
        groups = len(partition.names)
        total: Bounded | None = None
        for part in self.parts():
            terms = list(ask(part))
            norms = [partition.norms(term.gradients.sq_norms()) for term in terms]
            weights = [term.clip.weights(n) for term, n in zip(terms, norms, strict=True)]
            bounded = sum_over_same_records(
                aggregate(
                    term.gradients,
                    partition.spread(w if term.factor == 1 else term.factor * w),
                    bound=abs(term.factor) * term.clip.bound(groups),
                    share=part.share,
                )
                for term, w in zip(terms, weights, strict=True)
            )
            if self.metrics is not None:
                losses = terms[0].losses
                losses = terms[0].gradients.losses if losses is None else losses
                rows = self.metrics.rows(losses, norms[0], weights[0], self.observed(part.batch))
                bounded = self.metrics.beside(bounded, rows)
            total = bounded if total is None else total + bounded
        assert total is not None
        return total

    def parts(self) -> Iterator[Part]:
        """The micro-batches; an empty batch is one."""
        rows = rows_per_record(self.loss)
        run = self.execution
        capacity = run.capacity(self.batch_size, rows=rows)
        parts = run.parts(self.batch, self.modules, rows=rows, pieces=self.pieces)
        for batch, share in parts:
            yield Part(
                self.loss,
                self.params,
                batch,
                self.modules,
                run,
                share,
                self._foreseen(share),
                capacity,
            )

    def _foreseen(self, share: float) -> EagerWeights | None:
        """The weights of each group by itself, if there are several and the rule allows it."""
        clip, partition = self.expected, self.groups(tuple(self.params))
        groups = len(partition.names)
        if clip is None or clip.mapped or groups == 1:
            return None

        def weights(squares: Mapping[str, Tensor]) -> Tensor:
            group = partition.of[next(iter(squares))]
            norms = whole(tuple(squares)).norms(squares)[:, 0]
            return clip.group_weights(norms, group=group, groups=groups)

        within = piece_error(clip.bound(groups), share=share)
        return EagerWeights(partition.members, weights, within)


@dataclass
class StepContext:
    """One step of an algorithm: a batch that may be asked once, and the noise of the answer.

    Guarantees: noise is added once, whatever the batch, and scaled by the bound on one record.
    `bounded` is the sum without it, and private. What has been released is in `releases`.
    `regulariser` reads no record; `penalty` is its gradient, once it is added to the estimate.
    """

    work: BatchPass
    clip: Clip
    noise: Noise
    divisor: float
    step: int
    rng: Rng
    relation: Relation = Relation.ADD_REMOVE
    regulariser: Callable[[], Tensor] | None = None
    bounded: Bounded | None = None
    releases: list[Released] = field(default_factory=list)
    penalty: dict[str, Tensor] = field(default_factory=dict)

    @property
    def params(self) -> Params:
        """The parameters, at the point where gradients are taken."""
        return self.work.params

    @property
    def digest(self) -> bytes:
        """What tells a replay of the step's releases from others."""
        each = [released.digest for released in self.releases]
        return each[0] if len(each) == 1 else hashlib.blake2b(b"".join(each)).digest()[:16]

    def mean(self, ask: Ask) -> dict[str, Tensor]:
        """The released sum of what is asked for, divided by the public size of a batch."""
        if self.releases:
            raise Refused(
                "expected one query for each step, which is what the plan accounts for, got a "
                "second; ask for both as terms of one"
            )
        self.bounded = self.work.sum(ask)
        released = release(self.bounded, self.noise, rng=self.rng, step=self.step)
        self.releases.append(released)
        values = released.values
        return {name: values[name].div_(self.divisor) for name in self.params}  # in their memory


def gradient_of(function: Callable[[], Tensor], params: Params) -> dict[str, Tensor]:
    """The gradient of a function of the parameters alone; what it does not use is left out."""
    with torch.enable_grad():
        found = torch.autograd.grad(function(), list(params.values()), allow_unused=True)
    return {n: g for n, g in zip(params, found, strict=True) if g is not None}


def clipped_sum(
    loss: Loss,
    params: Params,
    batch: Batch,
    *,
    clip: Clip = _AUTOMATIC,
    groups: Grouping = whole,
    modules: Sequence[nn.Module] = (),
    execution: Execution = _PLAIN,
    metrics: Metrics | None = None,
    observed: Observed = lambda part: {},
) -> Bounded:
    """Sum the batch's clipped per-sample gradients, with their metrics beside them.

    Guarantees: adding or removing one record moves the sum by at most `l2`, whatever the record
    and the others are. Nothing is noised yet: a `Bounded` must not leave the process.
    """
    work = BatchPass(loss, params, batch, groups, modules, execution, metrics, observed, clip)
    return work.sum(lambda part: [Summand(part.here, clip)])
