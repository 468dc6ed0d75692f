"""One private step: an algorithm asks, and what comes back has noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from dp_accounting import DpEvent
from torch import Tensor, nn

from hushgrad.clipping.groups import Grouping, whole
from hushgrad.clipping.rules import Clip, automatic
from hushgrad.noise import Noise, release
from hushgrad.rng import Rng
from hushgrad.run.execution import Execution
from hushgrad.run.metrics import Metrics
from hushgrad.run.permit import Allowance, Permit
from hushgrad.run.query import BatchPass, ClippedSum, Query, RecordMetrics, Summand
from hushgrad.types import Batch, Bounded, Loss, Params, Relation, Released

_AUTOMATIC = automatic()
_PLAIN = Execution()


@dataclass(frozen=True)
class StepContext:
    """What an algorithm is given at one step: the drawn batch to ask, and what the plan says.

    Guarantees: `release` is the only way to a release, and it refuses whatever the plan does not
    allow before any noise is drawn.

    Args:
        rng: the key of the step's noise.
        permit: what the step may release.
        work: the drawn batch, and how it is processed; None where a query holds its own records.
        clip: the clipping rule of this step.
        divisor: the public number that sums are divided by.
        relation: what makes two data sets neighbours.
        regulariser: the user's penalty, a function of the parameters alone.
        penalty: the gradient of the regulariser, once it was added to the estimate.

    Example:
        An algorithm's step asks for a clipped sum, and gets it back with noise:

        >>> def step(self, context, state):
        ...     query = ClippedSum(lambda here: [Summand(here, context.clip)])
        ...     return context.mean(context.release(query)), state
    """

    rng: Rng
    permit: Permit
    work: BatchPass | None = None
    clip: Clip = _AUTOMATIC
    divisor: float = 1.0
    relation: Relation = Relation.ADD_REMOVE
    regulariser: Callable[[], Tensor] | None = None
    penalty: dict[str, Tensor] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The number of the step, from 0."""
        return self.permit.step

    @property
    def params(self) -> Params:
        """The parameters, at the current iterate."""
        return self.batch_pass.objective.params

    @property
    def batch_pass(self) -> BatchPass:
        """The drawn batch, and how it is processed."""
        assert self.work is not None, "this step has no batch"
        return self.work

    @property
    def releases(self) -> Sequence[Released]:
        """The releases of this step so far."""
        return self.permit.releases

    @property
    def noise(self) -> Noise:
        """The noise of the step's first kind of release."""
        return self.permit.allowances[0].noise

    def release(self, query: Query, *, noise: Noise | None = None) -> Released:
        """Answer a query, with the noise that the plan accounts for.

        Args:
            query: what is asked of the batch that was drawn for the step.
            noise: how much noise, where the algorithm pays for each release out of a limit.

        Returns:
            The sum with its noise, on a public grid.

        Raises:
            Refused: if the plan does not allow the release: another kind of query, a second one,
                another batch, less noise or another kind of it.
        """
        permit, allowed = self.permit, self.permit.allowance(query)
        # An adaptive algorithm may measure the same sum again with fresh noise.
        bounded = permit.sum_of(query)
        if bounded is None:
            bounded = query.bounded(self.work)
        applied = allowed.noise if noise is None else noise
        permit.require(
            query, bounded, applied, allowed, None if self.work is None else self.work.batch
        )
        # A second release must not have the noise of the first, whose sum may be the same.
        number = len(permit.releases)
        rng = self.rng.derive("release", number) if number else self.rng
        if allowed.add is not None:
            released = allowed.add(bounded, applied, rng=rng, step=permit.step)
        else:
            past, buffer = permit.past, permit.buffer
            released = release(
                bounded, applied, rng=rng, step=permit.step, past=past, buffer=buffer
            )
        permit.note(query, bounded, released)
        return released

    def affords(self, *events: DpEvent) -> bool:
        """Return whether releases that cost this much together still fit into the algorithm's
        limit.

        Raises:
            Refused: if the algorithm has no limit.
        """
        return self.permit.affords(*events)

    def mean(self, released: Released) -> dict[str, Tensor]:
        """Divide a released sum by the public size of a batch, reusing the memory of the sum."""
        values = released.values
        # In place: a sum can be as large as the model, and is not needed again.
        return {name: values[name].div_(self.divisor) for name in self.params}


def release_once(query: Query, noise: Noise, *, rng: Rng) -> Released:
    """Make one release outside of a run: an evaluation, a perturbed minimiser, a record's own
    report.

    Guarantees: exactly one release, with exactly this noise. It is entered in no ledger; the caller
    does that.

    Args:
        query: what is asked; it holds its own records.
        noise: how much noise the answer gets.
        rng: the key of this release alone; a second release needs another key.

    Returns:
        The sum with its noise, on a public grid.

    Raises:
        Refused: if this is not a query of this library.

    Example:
        >>> from hushgrad.algorithms.local import OwnReport
        >>> from hushgrad.noise import gaussian
        >>> query = OwnReport({"weight": torch.ones(2)}, clip_norm=1.0)
        >>> release_once(query, gaussian(1.0), rng=Rng.fixed(0)).event
        GaussianDpEvent(noise_multiplier=1.0)
    """
    permit = Permit(0, (Allowance(type(query), noise),))
    return StepContext(rng, permit).release(query)


def gradient_of(function: Callable[[], Tensor], params: Params) -> dict[str, Tensor]:
    """Return the gradient of a function of the parameters alone; parameters it does not use are
    left out.
    """
    with torch.enable_grad():
        found = torch.autograd.grad(function(), list(params.values()), allow_unused=True)
    return {n: g for n, g in zip(params, found, strict=True) if g is not None}


def _no_metrics(batch: Batch) -> dict[str, Tensor]:
    return {}


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
    observed: RecordMetrics = _no_metrics,
) -> Bounded:
    """Sum the batch's clipped per-sample gradients, with their metrics beside them.

    Guarantees: adding or removing one record moves the sum by at most `l2`, whatever that record
    and the other records are. No noise is added yet: a `Bounded` must not leave the process.

    Args:
        loss: a function of a batch that returns one value for each record.
        params: the private parameters by name.
        batch: nested tensors whose first dimension is the records.
        clip: the clipping rule; automatic clipping has no threshold to tune.
        groups: the parameters that are clipped together.
        modules: the modules that the loss calls, whose buffers are checked.
        execution: the form of per-sample gradients and the size of micro-batches.
        metrics: numbers of each record that are summed beside its gradient.
        observed: the metrics' values that are not computed from the loss and the norms.

    Returns:
        The sum, and the bound on one record's share of it.

    Raises:
        Refused: if the model cannot be handled correctly; the message names the remedy.

    Example:
        >>> layer = nn.Linear(3, 1)
        >>> params = dict(layer.named_parameters())
        >>> bounded = clipped_sum(lambda x: layer(x)[:, 0], params, torch.randn(5, 3))
        >>> sorted(bounded.sum), bounded.l2
        (['bias', 'weight'], 1.004)

    Reference: Abadi et al. 2016, Deep Learning with Differential Privacy, Algorithm 1.
    """
    # The same query as in a run, so that both compute the same sum.
    objective = execution.objective(loss, params, modules)
    work = BatchPass(objective, batch, groups, execution, metrics, observed, clip)
    return ClippedSum(lambda here: [Summand(here, clip)]).bounded(work)
