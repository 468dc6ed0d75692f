"""What is asked of a batch: a sum over its records, and how far one record can move it.

A query is a value. It says what is summed, and computes by itself how far one record moves the sum,
so that nobody who asks can state a bound that does not hold. Only queries whose classes are
registered by `answerable` are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from dp_accounting import DpEvent, GaussianDpEvent
from torch import Tensor

from hushgrad.batches.records import count
from hushgrad.clipping.aggregate import aggregate, piece_error, sum_over_same_records
from hushgrad.clipping.groups import Grouping, Groups, whole
from hushgrad.clipping.pieces import Pieces
from hushgrad.clipping.rules import Clip
from hushgrad.gradients import AnyGradients, Objective, restored
from hushgrad.iterates import Values, exchange_values
from hushgrad.run.augmentation import rows_per_record
from hushgrad.run.execution import Execution
from hushgrad.run.metrics import Metrics
from hushgrad.types import Batch, Bounded, EagerWeights, PerSample, Refused

RecordMetrics = Callable[[Batch], Mapping[str, Tensor]]
"""The watched values of a micro-batch's records, by name."""

_PLAIN = Execution()


@runtime_checkable
class Query(Protocol):
    """A question to a batch's records whose answer is a sum.

    Contract: the bound of `bounded` holds whatever the records are. A query that each record
    answers by itself, as in local privacy, has `of_each_record = True`: its sum has one row for
    each record, and the bound is that of a row.

    Example:
        >>> isinstance(ClippedSum(lambda here: []), Query)
        True
    """

    of_each_record: ClassVar[bool]

    def bounded(self, work: BatchPass | None) -> Bounded:
        """Return the sum over the batch's records, and how far one record moves it."""

    def event(self, noise_multiplier: float) -> DpEvent:
        """Return what an answer costs at this noise, where an algorithm pays for each release."""


_Kind = TypeVar("_Kind", bound=type)
_ANSWERABLE: set[type] = set()


def answerable(kind: _Kind) -> _Kind:
    """Register a class of queries, so that a step may answer them.

    Whoever registers a class has to prove the bound that its queries state. Subclasses are not
    registered with it, because they could state another bound.

    Args:
        kind: the class.

    Returns:
        The same class, so that this can be used as a decorator.

    Example:
        >>> is_answerable(ClippedSum(lambda here: []))
        True
        >>> class Other(ClippedSum): ...
        >>> is_answerable(Other(lambda here: []))
        False
    """
    _ANSWERABLE.add(kind)
    return kind


def is_answerable(query: object) -> bool:
    """Return whether this is a query of a registered class."""
    return type(query) in _ANSWERABLE


@dataclass(frozen=True)
class Summand:
    """What is summed for each record: a per-sample gradient, clipped by a rule, times `factor`.

    Guarantees: one record's part of the sum has norm at most `abs(factor)` times the rule's bound.

    Args:
        gradients: one vector for each record, as the query's function is given them.
        clip: the rule that weights each vector; made by `clipping`, never a subclass.
        factor: a public number.
        losses: the records' losses, where they are not those of `gradients`.

    Raises:
        Refused: if `clip` is not a clipping rule.

    Example:
        >>> from hushgrad.clipping import abadi
        >>> from hushgrad.gradients import per_sample
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> found = per_sample(lambda x: x @ weight, {"weight": weight}, torch.ones(3, 2))
        >>> Summand(found, abadi(0.5), factor=2.0).clip
        abadi(clip_norm=0.5)
    """

    gradients: PerSample
    clip: Clip
    factor: float = 1.0
    losses: Tensor | None = None

    def __post_init__(self) -> None:
        if type(self.clip) is not Clip:  # a subclass could state a bound that it does not keep
            raise Refused(
                f"expected a clipping rule, got a {type(self.clip).__name__}; make one of your own "
                "by clipping.custom(rule, bound=…), which is held to its bound"
            )


@dataclass(frozen=True)
class Part:
    """A micro-batch: some records of one piece of a batch; `BatchPass.parts` makes them.

    Args:
        objective: the loss, with its parameters and modules.
        batch: the records.
        gradients: computes the per-sample gradients at the current iterate.
        share: the share of the piece that these records are.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> objective = Execution().objective(lambda x: x @ weight, {"weight": weight})
        >>> part = next(BatchPass(objective, torch.ones(3, 2)).parts())
        >>> part.gradients().batch
        3
    """

    objective: Objective
    batch: Batch
    gradients: Callable[[], AnyGradients]
    share: float = 1.0

    def at(self, iterate: Values) -> AnyGradients:
        """Return the gradients at another iterate, with the same random draws as `gradients()`.

        Call it before `gradients()`, which advances the random state: dropout is then the same at
        both iterates.
        """
        with (
            torch.random.fork_rng(),
            restored({}, self.objective.modules),
            exchange_values(self.objective.params, iterate),
        ):
            return self.gradients()


@dataclass(frozen=True)
class BatchPass:
    """A pass over a batch: the objective whose gradients are taken, and how they are summed.

    Args:
        objective: the loss, with its parameters and modules.
        batch: the records.
        groups: the parameters that are clipped together.
        execution: the form of per-sample gradients and the size of micro-batches.
        metrics: numbers of each record that are summed beside its gradient.
        observed: the metrics' values that are not computed from the loss and the norms.
        expected: the rule that the query will clip by, as far as it is known. With it a form may
            sum each group as soon as the group's norms are known.
        pieces: splits the records of a large batch. Without it the batch is summed as one, in
            float64 where it is too large for float32.
        batch_size: the public expected size of the batches, for which the model is certified once;
            without it each larger batch is tested.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> objective = Execution().objective(lambda x: x @ weight, {"weight": weight})
        >>> work = BatchPass(objective, torch.ones(5, 2), execution=Execution(micro_batch=2))
        >>> [part.share for part in work.parts()]
        [0.4, 0.4, 0.2]
    """

    objective: Objective
    batch: Batch
    groups: Grouping = whole
    execution: Execution = _PLAIN
    metrics: Metrics | None = None
    observed: RecordMetrics = lambda part: {}
    expected: Clip | None = None
    pieces: Pieces | None = None
    batch_size: float = 0.0

    @cached_property
    def partition(self) -> Groups:
        """The groups of the objective's parameters."""
        return self.groups(tuple(self.objective.params))

    def parts(self) -> Iterator[Part]:
        """Yield the micro-batches; an empty batch is one micro-batch."""
        run, objective = self.execution, self.objective
        # A record of K views takes K rows of memory, so fewer records fit.
        rows = rows_per_record(objective.loss)
        # By the public expected size: a capacity that followed the batch would tell its size.
        capacity = run.capacity(self.batch_size, rows=rows)
        parts = run.parts(self.batch, objective.modules, rows=rows, pieces=self.pieces)
        for batch, share in parts:
            weights = self._eager_weights(share)
            # With weights known in advance the form `recomputed` needs no second pass.
            own = objective if weights is None else replace(objective, foreseen=weights)
            yield Part(own, batch, run.taker(own, batch, capacity), share)

    def _eager_weights(self, share: float) -> EagerWeights | None:
        """The weights of each group by itself, if there are several and the rule allows it."""
        clip, partition = self.expected, self.partition
        groups = len(partition.names)
        # A user's rule may combine the groups; with one group there is nothing to sum earlier.
        if clip is None or clip.mapped or groups == 1:
            return None

        def weights(squares: Mapping[str, Tensor]) -> Tensor:
            group = partition.of[next(iter(squares))]
            norms = whole(tuple(squares)).norms(squares)[:, 0]
            return clip.group_weights(norms, group=group, groups=groups)

        within = piece_error(clip.bound(groups), share=share)
        return EagerWeights(partition.members, weights, within)


@answerable
@dataclass(frozen=True)
class ClippedSum:
    """The sum of what `terms` returns for the records, each term clipped by its rule.

    Guarantees: adding or removing one record moves the sum, its metrics included, by at most `l2`,
    whatever that record and the other records are.

    Args:
        terms: maps the per-sample gradients of a micro-batch at the current iterate, followed by
            those at each of `iterates`, to the summands.
        iterates: other values of the parameters at which gradients are taken too.
        vectors: computes other vectors than the loss's gradients, such as the updates of clients.

    Example:
        What DP-SGD asks:

        >>> from hushgrad.clipping import automatic
        >>> query = ClippedSum(lambda here: [Summand(here, automatic())])

    Reference: Abadi et al. 2016, Deep Learning with Differential Privacy, Algorithm 1.
    """

    terms: Callable[..., Sequence[Summand]]
    iterates: Sequence[Values] = ()
    vectors: Callable[[Part], AnyGradients] | None = None
    of_each_record: ClassVar[bool] = False

    def bounded(self, work: BatchPass | None) -> Bounded:
        """Sum over the micro-batches, with the records' metrics beside the sum."""
        assert work is not None, "a clipped sum is asked of a batch"
        total: Bounded | None = None
        for part in work.parts():
            # Before the current iterate: Part.at needs the random state as it is now.
            earlier = [part.at(iterate) for iterate in self.iterates]
            here = part.gradients() if self.vectors is None else self.vectors(part)
            bounded = _summed(self.terms(here, *earlier), part, work)
            total = bounded if total is None else total + bounded
        assert total is not None
        return total

    def event(self, noise_multiplier: float) -> DpEvent:
        """One Gaussian release."""
        return GaussianDpEvent(noise_multiplier)


def _summed(terms: Sequence[Summand], part: Part, work: BatchPass) -> Bounded:
    """Return the clipped sum of one micro-batch."""
    partition, metrics = work.partition, work.metrics
    groups = len(partition.names)
    norms = [partition.norms(term.gradients.sq_norms()) for term in terms]
    # Fewer norms than records would leave some of them unclipped.
    records = count(part.batch)
    if not all(len(each) == records for each in norms):
        raise Refused(
            "expected one gradient for each record of the micro-batch, got another number of them; "
            "make terms of the gradients that the query is given"
        )
    # The rule is applied here and not by whoever asks, so that the bound below is kept.
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
    if metrics is None:
        return bounded
    # Metrics describe the first summand, the gradient at the current iterate.
    losses = terms[0].gradients.losses if terms[0].losses is None else terms[0].losses
    rows = metrics.rows(losses, norms[0], weights[0], work.observed(part.batch))
    return metrics.beside(bounded, rows)
