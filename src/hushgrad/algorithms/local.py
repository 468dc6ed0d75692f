"""Local differential privacy: each record's gradient is randomised where the record is.

Whoever collects the reports sees each of them, so any two records must be hard to tell apart: a
report may change from any vector within the bound to any other, by twice the bound.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from dp_accounting import DpEvent
from jaxtyping import Float64
from torch import Tensor

from hushgrad.algorithms.algorithm import (
    Conditions,
    State,
    StepPlan,
    refuse_direct,
    require_full,
)
from hushgrad.algorithms.output import Output, last
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.events import PureDpEvent
from hushgrad.gradients import Gradients, require_factors
from hushgrad.gradients.factors import Dense, Factors, in_turn
from hushgrad.noise import Noise, gaussian, standard_normal
from hushgrad.rng import Rng
from hushgrad.run.permit import StepMechanism
from hushgrad.run.query import BatchPass, Part, answerable
from hushgrad.run.step import StepContext, release_once
from hushgrad.types import Bounded, Refused, Relation, Released

ReportRows = Float64[Tensor, "records entries"]
_REPORTS = "reports"
_LARGEST_EPSILON = 20.0  # of a pure report: the coin's rarer side still has 2²³ of 2⁵² outcomes


@dataclass(frozen=True)
class LocalGd:
    """LDP-GD: at each step every record reports its clipped gradient, randomised by itself.

    The estimate is the reports' mean over the public number of records. Every record takes part in
    every step.

    Guarantees: a report gets Gaussian noise of σ times the clipping bound L in each entry. A
    record's T reports are accounted for as T releases of sensitivity 2L, which is what replace-one
    means here; no other relation is accepted. With `pure` a report is ε0-LDP with ε0 = 1/σ.

    Args:
        pure: whether reports are randomised by `hemisphere` instead of Gaussian noise.
        output: which iterate the run returns.

    Example:
        >>> from hushgrad import Relation, plan
        >>> from hushgrad.sampling import FullBatch
        >>> p = plan(
        ...     records=100,
        ...     batch=100,
        ...     epochs=2,
        ...     delta=1e-3,
        ...     noise_multiplier=4.0,
        ...     sampling=FullBatch(),
        ...     relation=Relation.REPLACE_ONE,
        ...     algorithm=LocalGd(),
        ... )
        >>> round(p.epsilon, 2)
        2.05

    Reference: clipped DP-GD, appendix D, whose Theorem D.2 uses sensitivity L, too small by a
    factor of 2.
    """

    pure: bool = False
    output: Output = last
    carries_metrics: ClassVar[bool] = False
    repeats: ClassVar[tuple[int, int]] = (0, 1)

    def stage(self, step: int, conditions: Conditions) -> StepPlan:
        """One report of each record."""
        # Gaussian reports need no mechanism of their own: the plan's noise serves.
        mechanism = StepMechanism(pure_noise, pure_reports) if self.pure else None
        return StepPlan(conditions.sampling, query=Reports, mechanism=mechanism)

    def check(self, conditions: Conditions) -> None:
        """Refuse everything but full batches and replace-one."""
        require_full(conditions, "local differential privacy")
        refuse_direct(self.output)
        if conditions.relation is not Relation.REPLACE_ONE:
            raise Refused(
                "expected replace-one with local differential privacy, which compares any two "
                f"records, got {conditions.relation.value}; pass relation=Relation.REPLACE_ONE"
            )

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        """Return the mean of the reports."""
        sizes = {name: p.numel() for name, p in context.params.items()}
        total = torch.zeros(sum(sizes.values()), dtype=torch.float64)
        for part in context.batch_pass.parts():
            reports = context.release(Reports(part, context))
            # Reports are released rows, so adding them is post-processing.
            total += reports.values[_REPORTS].sum(0)
        pieces = (total / context.divisor).split(list(sizes.values()))
        found = zip(context.params.items(), pieces, strict=True)
        return {n: x.reshape(p.shape).to(p.device) for (n, p), x in found}, state


@answerable
@dataclass(frozen=True)
class Reports:
    """What each record of a micro-batch reports: its clipped gradient, as one row."""

    part: Part
    context: StepContext
    of_each_record: ClassVar[bool] = True

    def bounded(self, work: BatchPass | None) -> Bounded:
        """Return one row for each record, each within the bound."""
        rows, bound = clipped_rows(require_factors(self.part.gradients()), self.context)
        return Bounded({_REPORTS: rows}, bound)

    def event(self, noise_multiplier: float) -> DpEvent:
        """One Gaussian release of each record."""
        return gaussian(noise_multiplier).event


@answerable
@dataclass(frozen=True)
class OwnReport:
    """What one record reports from where it is: its gradient, clipped to L."""

    gradient: Mapping[str, Tensor]
    clip_norm: float
    of_each_record: ClassVar[bool] = False

    def bounded(self, work: BatchPass | None) -> Bounded:
        """Return the clipped gradient in float64; zeros if it is not finite."""
        # math.fsum is exact, so the norm is rounded only once.
        size = math.sqrt(
            math.fsum(float(x.double().square().sum()) for x in self.gradient.values())
        )
        scale = min(1.0, self.clip_norm / size) if size > 0 else 1.0
        finite = math.isfinite(size)
        rows = {n: x.double() * (scale if finite else 0.0) for n, x in self.gradient.items()}
        rows = {n: x.nan_to_num(0.0, 0.0, 0.0) for n, x in rows.items()}
        return Bounded(rows, self.clip_norm * (1 + SUM_SLACK))

    def event(self, noise_multiplier: float) -> DpEvent:
        """One Gaussian release."""
        return gaussian(noise_multiplier).event


def clipped_rows(gradients: Gradients, context: StepContext) -> tuple[ReportRows, float]:
    """Return each record's clipped gradient as one row in float64, and the bound on its norm."""
    params, records, gradients = context.params, gradients.batch, gradients.of_records_alone()
    partition, clip = context.batch_pass.partition, context.clip
    rows = {}
    for name, p in params.items():
        uses = gradients.factors[name].values()
        # A report is a whole vector, so factors must be written out.
        written = [use.materialised().reshape(records, *p.shape) for use in uses]
        rows[name] = sum(written, p.new_zeros(records, *p.shape))
    dense: Factors = {name: {(0,): Dense(x)} if records else {} for name, x in rows.items()}
    norms = partition.norms(Gradients(dense, params, gradients.losses, in_turn(records)).sq_norms())
    shares = partition.spread(clip.weights(norms))
    flat = [_weighted(rows[name], shares[name]) for name in params]
    return torch.cat(flat, 1).cpu(), clip.bound(len(partition.names)) * (1 + SUM_SLACK)


def _weighted(rows: Tensor, weights: Float64[Tensor, " records"]) -> ReportRows:
    scaled = rows.detach().double().flatten(1) * weights[:, None]
    return torch.where(weights[:, None] == 0, 0.0, scaled)  # 0·nan is not 0


def hemisphere(rows: ReportRows, epsilon: float, *, bound: float, rng: Rng) -> ReportRows:
    """Return ε-LDP reports of vectors of norm at most `bound` (L), unbiased.

    A vector is rounded at random to one of the two vectors ±L on its line, such that its mean
    stays. Then u is drawn uniformly on the unit sphere, independently of the record, and flipped to
    the hemisphere of that vector with probability e^ε/(1 + e^ε), to the other one otherwise. The
    report is u times L (e^ε + 1)/((e^ε − 1)·E|u_1|), with E|u_1| = Γ(d/2)/(√π Γ((d + 1)/2)).

    Guarantees: for any two records the probability of any report differs by a factor of at most
    e^ε. Only a sign depends on the record, so the low bits of a report reveal nothing more.

    Args:
        rows: one vector for each record, in float64.
        epsilon: ε of a report.
        bound: L, the largest norm of a row.
        rng: a key for these rows alone: with the same draws the signs of two reports of one record
            would reveal the record.

    Returns:
        One report for each row.

    Raises:
        ValueError: if `epsilon` is not between 0 and 20.

    Example:
        >>> rows = torch.ones(4, 9).double() / 3
        >>> hemisphere(rows, 1.0, bound=1.0, rng=Rng.from_os()).shape
        torch.Size([4, 9])

    Reference: Duchi, Jordan and Wainwright 2018, Minimax Optimal Procedures for Locally Private
    Estimation, section 4.2.3.
    """
    if not 0 < epsilon <= _LARGEST_EPSILON:
        raise ValueError(
            f"expected 0 < epsilon <= {_LARGEST_EPSILON:g}, got {epsilon}; 1 is usual, and "
            "beyond 20 a coin of 52 bits hardly ever shows its rarer side"
        )
    records, entries = rows.shape
    normal = standard_normal(records * entries, rng.derive("sphere")).reshape(records, entries)
    # A normalised Gaussian vector is uniform on the sphere.
    u = normal / torch.linalg.vector_norm(normal, dim=1, keepdim=True)
    chances = torch.from_numpy(rng.derive("coins").uniforms(2 * records)).reshape(2, records)
    size = torch.linalg.vector_norm(rows, dim=1)
    # P(+L) = ½ + |v|/2L makes the mean of ±L along v equal to v.
    along = torch.where(chances[0] < 0.5 + size / (2 * bound), 1.0, -1.0)
    # One of 2⁵² outcomes less, so that no rounding makes the true side likelier than ε allows.
    truly = torch.where(chances[1] < 1 / (1 + math.exp(-epsilon)) - 2.0**-52, 1.0, -1.0)
    side = torch.where((u * rows).sum(1) >= 0, 1.0, -1.0)
    # In logarithms: Γ overflows beyond 170, and d may be millions.
    log_mean = math.lgamma(entries / 2) - math.lgamma((entries + 1) / 2) - math.log(math.pi) / 2
    radius = bound / math.tanh(epsilon / 2) * math.exp(-log_mean)
    reports: ReportRows = radius * (along * truly * side)[:, None] * u
    return reports


def report(
    gradient: Mapping[str, Tensor],
    *,
    clip_norm: float,
    noise_multiplier: float,
    rng: Rng,
    step: int,
) -> dict[str, Tensor]:
    """Return what one record sends: its gradient, clipped to L, with Gaussian noise.

    It is made where the record is, for use outside of `train`.

    Guarantees: a report is a Gaussian release of noise multiplier σ; any two records differ by at
    most 2L in it.

    Args:
        gradient: the record's gradient by parameter.
        clip_norm: L, the largest norm that is reported.
        noise_multiplier: σ, noise ÷ L.
        rng: the record's own secret key.
        step: the number of the report; each of a record's reports needs another one.

    Returns:
        The report, by parameter.

    Raises:
        ValueError: if the noise multiplier is negative.

    Example:
        >>> gradient = {"weight": torch.ones(3)}
        >>> sent = report(gradient, clip_norm=1.0, noise_multiplier=1.0, rng=Rng.from_os(), step=0)
        >>> sent["weight"].shape
        torch.Size([3])

    Reference: clipped DP-GD, appendix D.
    """
    query = OwnReport(gradient, clip_norm)
    noise = gaussian(noise_multiplier)
    return release_once(query, noise, rng=rng.derive("own report", step)).values


def pure_noise(noise_multiplier: float) -> Noise:
    """Return what makes a report ε0-LDP with ε0 = 1/σ, stated as a kind of noise of scale σ·L."""
    plain = gaussian(noise_multiplier)
    if noise_multiplier == 0:
        return plain
    return replace(plain, name="pure", event=PureDpEvent(1 / noise_multiplier))


def pure_reports(bounded: Bounded, noise: Noise, *, rng: Rng, step: int) -> Released:
    """Return pure reports, with draws that depend on the step and on the bits of these rows."""
    rows, bound, scale = bounded.sum[_REPORTS], bounded.l2, noise.scale(bounded)
    epsilon = bound / scale if scale else math.inf
    # Other rows get other draws, also with the same key and step.
    digest = hashlib.blake2b(rows.numpy().tobytes(), digest_size=32).digest()
    labels = (step, f"pure {epsilon.hex()} {bound.hex()} {tuple(rows.shape)}", digest)
    if scale:
        rows = hemisphere(rows, epsilon, bound=bound, rng=rng.derive("pure", *labels))
    tag = rng.tag("release", *labels)[:16]
    return Released({_REPORTS: rows}, noise.event, bound, tag)
