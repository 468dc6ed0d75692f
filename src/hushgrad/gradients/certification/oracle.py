"""The oracle: a few records, each run by itself, and how far a batched run is from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hushgrad.batches import records
from hushgrad.gradients.certification.deterministic import (
    MEDIAN,
    RandomDraws,
    WithoutRandomness,
    perturb_randomly,
)
from hushgrad.gradients.comparison import COARSE, FINE, Precision, norm_of
from hushgrad.gradients.forms.choices import AnyGradients
from hushgrad.gradients.forms.loop import one_record
from hushgrad.gradients.guards import restored
from hushgrad.gradients.objective import Objective, layer_called
from hushgrad.gradients.probes import irregular
from hushgrad.parallel.single import refuse_wrapper_calls
from hushgrad.types import Batch, Refused

_BLUR = 4.0  # a pass rounds at every layer, a shift of the parameters but once
_COARSEST = 0.5


@dataclass
class Evidence:
    """The worst that certification saw; every figure is relative to the one-record run."""

    precision: Precision
    sizes: list[int] = field(default_factory=list)
    loss: float = 0.0
    gradient: float = 0.0
    estimate: float = 0.0
    lowest_norm: float = float("inf")
    highest_norm: float = 0.0

    def merge(self, other: Evidence) -> None:
        """Keep the worse of both."""
        self.sizes += other.sizes
        self.loss = max(self.loss, other.loss)
        self.gradient = max(self.gradient, other.gradient)
        self.estimate = max(self.estimate, other.estimate)
        self.lowest_norm = min(self.lowest_norm, other.lowest_norm)
        self.highest_norm = max(self.highest_norm, other.highest_norm)


@dataclass(frozen=True)
class Oracle:
    """Losses and gradients of a few records, each from a run of its own.

    A view at other draws has losses only.
    """

    records: Batch
    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]
    precision: Precision
    draws: RandomDraws = MEDIAN
    drew: bool = False  # did the loss draw any?
    wrote: bool = False  # did a run leave a parameter or buffer with other bits?

    @property
    def count(self) -> int:
        return len(self.losses)

    @cached_property
    def norms(self) -> dict[str, Tensor]:
        """Of each record's gradient, for each parameter; what has none has norm zero."""
        zero = torch.zeros((), dtype=torch.float64)
        return {
            name: torch.stack(
                [zero if g[name] is None else norm_of(g[name]) for g in self.gradients]
            )
            for name in self.gradients[0]
        }

    def probe(self, size: int) -> Batch:
        """A batch of `size` records that repeats the few."""
        return records.take(self.records, self.places(size).tolist())

    def places(self, size: int) -> Tensor:
        """Which of the few stands at each place of a probe."""
        return irregular(self.count, size)


def consult(objective: Objective, few: Batch) -> Oracle:
    """Run each record by itself, in copies: kernels then act as they do in a batch.

    Records without a finite loss and gradient are left out: they can be compared with nothing,
    and an error that one of them caused would tell that it is there.
    """
    return _consult(objective, few, MEDIAN, backward=True)


def view(objective: Objective, few: Batch, draws: RandomDraws) -> Oracle:
    """The losses of the same records at other draws."""
    return _consult(objective, few, draws, backward=False)


def _consult(objective: Objective, few: Batch, draws: RandomDraws, backward: bool) -> Oracle:
    neutral = WithoutRandomness(draws)
    with neutral, objective.guard_pass():
        alone, wrote = _each_alone(objective, few, backward, neutral)
    finite = [i for i, (loss, gradient) in enumerate(alone) if _is_finite(loss, gradient)]
    # A record that is nan by itself is nan in any batch, and can be compared with nothing.
    kept, one_by_one = records.take(few, finite), [alone[i] for i in finite]
    losses, gradients = [loss for loss, _ in one_by_one], [gradient for _, gradient in one_by_one]
    oracle = Oracle(kept, losses, gradients, COARSE, draws, neutral.drew, wrote)
    # Autocast may begin anywhere in the loss: what was computed in, not what was asked for.
    if neutral.narrowest in FINE:
        return replace(oracle, precision=FINE[neutral.narrowest])
    precision = _blur_precision(objective, oracle, neutral.narrowest, backward)
    return replace(oracle, precision=precision)


Alone = list[tuple[Tensor, dict[str, Tensor | None]]]


def _each_alone(
    objective: Objective, few: Batch, backward: bool, neutral: WithoutRandomness
) -> tuple[Alone, bool]:
    """Each record's loss and gradient, and whether a run wrote anything; it is put back."""
    alone, wrote, loss = [], False, neutral.choosing_draws(objective.loss)
    for i in range(records.count(few)):
        record, copies = records.cut(few, i, i + 1), records.MULTIPLE
        with restored(objective.params, objective.modules) as changed, refuse_wrapper_calls():
            run = one_record(loss, objective.params, record, copies, backward=backward)
            alone.append(run)
        wrote |= bool(changed)
    return alone, wrote


def _is_finite(loss: Tensor, gradient: dict[str, Tensor | None]) -> bool:
    return all(bool(x.isfinite().all()) for x in (loss, *gradient.values()) if x is not None)


def _blur_precision(
    objective: Objective, oracle: Oracle, dtype: torch.dtype, backward: bool
) -> Precision:
    """What rounding to a narrow type does to this model: shift its parameters by as much."""
    shift = perturb_randomly(objective.params, by=torch.finfo(dtype).eps / 2)
    with shift, WithoutRandomness(oracle.draws) as neutral:
        shifted, _ = _each_alone(objective, oracle.records, backward, neutral)
    off = off_loss = 0.0
    for i, (loss, gradient) in enumerate(shifted):
        # Relative to the parameter's own gradient, or to a share of the whole where that is more.
        whole = COARSE.floor * _whole_norm(oracle.gradients[i])
        for name, new in gradient.items():
            old = oracle.gradients[i][name]
            if new is not None and old is not None:
                off = max(off, float(norm_of(new - old) / torch.maximum(norm_of(old), whole)))
        # 0.1: below that losses are compared absolutely, as they may vanish.
        off_loss = max(off_loss, float((loss - oracle.losses[i]).abs() / (loss.abs() + 0.1)))
    gradient_, loss_ = (min(_COARSEST, _BLUR * x) for x in (off, off_loss))
    return replace(
        COARSE,
        gradient=max(COARSE.gradient, gradient_),
        loss=max(COARSE.loss, loss_),
    )


def _whole_norm(gradient: dict[str, Tensor | None]) -> Tensor:
    norms = [norm_of(x) for x in gradient.values() if x is not None]
    return torch.stack(norms).norm() if norms else torch.zeros((), dtype=torch.float64)


def refuse_unreached(objective: Objective, oracle: Oracle) -> None:
    """Every private parameter must be on some record's path, unless it was named idle."""
    for name in objective.params:
        if name not in objective.idle and all(g[name] is None for g in oracle.gradients):
            raise Refused(
                f"the parameter {name} is trainable but on no path to the loss"
                f"{_blocking_layer(objective)}; "
                "freeze it with requires_grad_(False) or, if only some records reach it (an "
                "expert), name it in idle, hg.Execution(idle=(…,)), to give it zero plus noise"
            )


def _blocking_layer(objective: Objective) -> str:
    """A quantised layer, whose kernel has no derivative, is a likely reason."""
    for module in objective.modules:
        for name, child in module.named_modules():
            if type(child).__module__.startswith("torch.ao.nn.quantized"):
                layer = f"{layer_called(name)} is a quantised {type(child).__name__}"
                return f" ({layer}, which passes none on)"
    return ""


def compare(gradients: AnyGradients, oracle: Oracle, evidence: Evidence) -> dict[str, float]:
    """The parameters whose gradients are off, and by how much; if none, add to the evidence."""
    exact = oracle.norms
    total = torch.stack([*exact.values()]).square().sum(0).sqrt()
    turn = oracle.places(gradients.batch)
    precision, floor = oracle.precision, oracle.precision.floor * total
    errors = _vector_errors(gradients, oracle, exact, floor)
    for name, square in gradients.squares.items():
        scale = torch.maximum(exact[name], floor).clamp_min(1e-30)[turn]
        off = (square.estimate.cpu().clamp_min(0).sqrt() - exact[name][turn]) / scale
        errors[name] = max(errors[name], _worst(off))
    wrong = {name: off for name, off in errors.items() if not off <= precision.gradient}
    if not wrong:
        estimate, upper = (_ratio(gradients, total[turn], which) for which in ("estimate", "upper"))
        seen = Evidence(precision, gradient=max(errors.values()), estimate=_worst(estimate - 1))
        seen.lowest_norm, seen.highest_norm = float(upper.min()), float(upper.max())
        evidence.merge(seen)
    return wrong


def _worst(off: Tensor) -> float:
    return float(off.abs().nan_to_num(nan=torch.inf).max())


def _ratio(gradients: AnyGradients, total: Tensor, which: str) -> Tensor:
    """The norms of the records' whole gradients, as multiples of the exact ones."""
    parts = [getattr(square, which) for square in gradients.squares.values()]
    norms = torch.stack(parts).sum(0).clamp_min(0).sqrt().cpu()
    return torch.where(norms == total, 1.0, norms / total)


def _vector_errors(
    gradients: AnyGradients, oracle: Oracle, exact: dict[str, Tensor], floor: Tensor
) -> dict[str, float]:
    """Compare the gradients themselves: one random combination of all of them tells."""
    weights = torch.from_numpy(np.random.default_rng(1).standard_normal(gradients.batch))
    turn = oracle.places(gradients.batch)
    # A record that stands at several places of the probe has the sum of their weights.
    share = torch.zeros(oracle.count, dtype=torch.float64).index_add_(0, turn, weights)
    sums = gradients.weighted_sum(dict.fromkeys(exact, weights.to(gradients.losses.device)))
    errors = {}
    for name, got in sums.items():
        gap = got.double()
        for weight, gradient in zip(share.tolist(), oracle.gradients, strict=True):
            one = gradient[name]
            gap = gap if one is None else gap.sub_(one, alpha=weight)
        scale = weights * torch.maximum(exact[name], floor)[turn]
        errors[name] = float(norm_of(gap) / scale.norm().clamp_min(1e-30))
    return errors
