"""The oracle: a few records, each run by itself, and how far a batched run is from them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hushgrad.persample import records
from hushgrad.persample.gradients import Gradients
from hushgrad.persample.loop import one_record
from hushgrad.persample.neutral import WithoutRandomness
from hushgrad.persample.traced import checked_losses
from hushgrad.persample.watch import Watch
from hushgrad.types import Batch, Loss, Params, Refused

# How far a gradient may be from the one-record run's, relative to its norm: well above what
# reordered sums do, well below what a wrong layout or a missed use does.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
_COARSE = 5e-2  # bfloat16 and float16, and autocast to them
_LOSS_SHARE = 0.1  # a loss is compared ten times as strictly: no backward pass blurs it


@dataclass(frozen=True)
class Subject:
    """What is to be certified."""

    loss: Loss
    params: Params
    modules: tuple[nn.Module, ...]
    idle: frozenset[str]
    free_buffers: frozenset[str] = frozenset()


@dataclass
class Evidence:
    """The worst that certification saw; every figure is relative to the one-record run."""

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
    """Losses and gradients of a few records, each from a run of its own."""

    records: Batch
    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]

    @property
    def count(self) -> int:
        return len(self.losses)

    def probe(self, size: int) -> Batch:
        """A batch of `size` records that repeats the few in turn."""
        return records.take(self.records, [i % self.count for i in range(size)])


def coarse(params: Params) -> float:
    """What rounding alone does to a model in less than float32; 0 for others."""
    tolerance = _tolerance(params)
    return tolerance if tolerance == _COARSE else 0.0


def _tolerance(params: Params) -> float:
    device = next(iter(params.values())).device.type
    if torch.is_autocast_enabled(device):
        return _COARSE
    return max(_TOLERANCE.get(p.dtype, _COARSE) for p in params.values())


def consult(subject: Subject, few: Batch) -> Oracle:
    """Run each record by itself, in copies: kernels then act as they do in a batch.

    Records without a finite loss and gradient are left out: they can be compared with nothing,
    and an error that one of them caused would tell that it is there.
    """
    losses, gradients, finite = [], [], []
    watch = Watch(subject.params, subject.modules)
    for i in range(records.count(few)):
        alone = records.cut(few, i, i + 1)
        with WithoutRandomness():
            value, gradient = one_record(subject.loss, subject.params, alone, records.MULTIPLE)
        if all(bool(x.isfinite().all()) for x in (value, *gradient.values()) if x is not None):
            losses.append(value)
            gradients.append(gradient)
            finite.append(i)
    watch.check(subject.free_buffers)
    return Oracle(records.take(few, finite), losses, gradients)


def refuse_unreached(subject: Subject, oracle: Oracle) -> None:
    """Every private parameter must be on some record's path, unless it was named idle."""
    for name in subject.params:
        if name not in subject.idle and all(g[name] is None for g in oracle.gradients):
            raise Refused(
                f"the parameter {name} is trainable but on no path to the loss; freeze it with "
                "requires_grad_(False), or name it in idle to give it zero plus noise"
            )


def check_losses(subject: Subject, oracle: Oracle, size: int, evidence: Evidence) -> None:
    """No record's loss may depend on its mates, at any position."""
    with torch.no_grad(), WithoutRandomness():
        losses = checked_losses(subject.loss(oracle.probe(size)), size).double()
    alone = torch.stack(oracle.losses).double().repeat(-(-size // oracle.count))[:size]
    both_nan = losses.isnan() & alone.isnan()
    error = (losses - alone).abs() / (alone.abs() + 0.1)
    error = error.masked_fill(both_nan | (losses == alone), 0)
    worst = int(error.nan_to_num(nan=torch.inf).argmax())
    evidence.merge(Evidence(sizes=[size], loss=float(error[worst])))
    if not bool(error[worst] <= _LOSS_SHARE * _tolerance(subject.params)):
        raise Refused(
            f"the loss of a record depends on its mates: {float(alone[worst]):.6g} alone and "
            f"{float(losses[worst]):.6g} in a batch of {size}, so samples are mixed (a mean or a "
            "limit over the batch, BatchNorm, a loss normalised by the batch?); compute each "
            "record's loss from that record alone"
        )


def compare(
    gradients: Gradients, oracle: Oracle, subject: Subject, evidence: Evidence
) -> dict[str, float]:
    """The parameters whose gradients are off, and by how much; if none, add to the evidence."""
    exact = {name: _norms(oracle, name) for name in subject.params}
    total = torch.stack([*exact.values()]).square().sum(0).sqrt()
    turn = torch.arange(gradients.batch) % oracle.count
    errors = _vector_errors(gradients, oracle, exact, total)
    seen = Evidence(gradient=max(errors.values()))
    for name, square in gradients.squares.items():
        scale = torch.maximum(exact[name], 0.01 * total).clamp_min(1e-30)[turn]
        estimate, upper = (x.cpu().clamp_min(0).sqrt() for x in (square.estimate, square.upper))
        off, above = ((x - exact[name][turn]) / scale for x in (estimate, upper))
        worst = float(off.abs().nan_to_num(nan=torch.inf).max())
        errors[name] = max(errors[name], worst)
        lowest, highest = 1 + float(above.min()), 1 + float(above.max())
        seen.merge(Evidence(estimate=worst, lowest_norm=lowest, highest_norm=highest))
    wrong = {name: off for name, off in errors.items() if not off <= _tolerance(subject.params)}
    if not wrong:
        evidence.merge(seen)
    return wrong


def _norms(oracle: Oracle, name: str) -> Tensor:
    return torch.stack(
        [
            torch.zeros((), dtype=torch.float64) if g[name] is None else _norm(g[name])
            for g in oracle.gradients
        ]
    )


def _norm(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.double().square().sum().sqrt().cpu()


def _vector_errors(
    gradients: Gradients, oracle: Oracle, exact: dict[str, Tensor], total: Tensor
) -> dict[str, float]:
    """Compare the gradients themselves: one random combination of all of them tells."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(gradients.batch, generator=generator, dtype=torch.float64)
    turn = torch.arange(gradients.batch) % oracle.count
    share = torch.zeros(oracle.count, dtype=torch.float64).index_add_(0, turn, weights)
    sums = gradients.weighted_sum(dict.fromkeys(exact, weights.to(gradients.losses.device)))
    errors = {}
    for name, got in sums.items():
        gap = got.double()
        for weight, gradient in zip(share.tolist(), oracle.gradients, strict=True):
            one = gradient[name]
            gap = gap if one is None else gap.sub_(one, alpha=weight)
        scale = weights * torch.maximum(exact[name], 0.01 * total)[turn]
        errors[name] = float(_norm(gap) / scale.norm().clamp_min(1e-30))
    return errors


def differs(wrong: dict[str, float]) -> str:
    """Say which gradient is off the most."""
    name, off = max(wrong.items(), key=lambda item: item[1])
    return f"the gradient of {name} differs from its one-record run by {off:.2g} of its norm"
