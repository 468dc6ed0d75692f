"""One private fit of a linear model, by any of four algorithms."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy import ndarray
from scipy import sparse
from torch import Tensor

from hushgrad.accounting import PLD, Target, least_noise
from hushgrad.clipping.rules import Clip, abadi
from hushgrad.glm.defaults import (
    INTERCEPT,
    Public,
    descent_settings,
    objective_strength,
    output_strength,
)
from hushgrad.glm.descent import Descent, descend
from hushgrad.glm.exact import EXACT
from hushgrad.glm.fits import Fit, remember_fit, sample_of
from hushgrad.glm.losses import ScoreLoss, ridge
from hushgrad.glm.perturbation import (
    TOLERANCE,
    PerturbationProblem,
    least_strength,
    objective_noise,
    objective_perturbation,
    output_perturbation,
)
from hushgrad.glm.rows import LONGEST, RowSource, scaled_rows
from hushgrad.glm.statement import GlmGuarantee
from hushgrad.ledger import Budget
from hushgrad.noise import gaussian
from hushgrad.rng import Rng
from hushgrad.run.plan import Plan
from hushgrad.run.resuming import Fingerprint, none
from hushgrad.types import Refused, Relation

ALGORITHMS = ("sgd", "gd", "objective", "output")
"""Minibatch and full-batch descent, objective and output perturbation."""


@dataclass(frozen=True)
class Linear:
    """The kind of linear model that is fitted.

    `loss` is used by descent and `smooth` by the perturbations; None where that is impossible.
    `slope` and `curvature` bound the derivatives of `loss`, or stand for such bounds: gradients are
    clipped to `slope` × the bound on a row.
    """

    loss: ScoreLoss
    smooth: ScoreLoss | None
    classes: int
    slope: float
    curvature: float
    reach: float


@dataclass(frozen=True)
class FitSettings:
    """The user's choices; see the estimators. `family` is that of the estimator, see `fits`."""

    epsilon: float
    delta: float
    algorithm: str
    feature_norm: float
    clip_norm: str | float | Clip
    fit_intercept: bool
    records: int | None
    batch: int | None
    steps: int | None
    learning_rate: float | None
    regularization: float | None
    rng: Rng
    budget: Budget | None
    family: str = ""

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"expected an algorithm among {', '.join(ALGORITHMS)}, got {self.algorithm!r}"
            )
        if self.clip_norm != "auto" and not isinstance(self.clip_norm, int | float | Clip):
            raise ValueError(
                f"expected clip_norm 'auto', a number or a clipping rule, got {self.clip_norm!r}"
            )
        Target(self.epsilon, self.delta)
        for name in ("records", "batch", "steps"):
            value = getattr(self, name)
            if value is not None and (value != int(value) or value < 1):
                raise ValueError(f"expected {name} to be a whole number >= 1, got {value}")
        for name in ("learning_rate", "regularization"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"expected {name} >= 0 and finite, got {value}")


@dataclass(frozen=True)
class Fitted:
    """A fitted model: scores are features·coefᵀ + intercept."""

    coef: Float64[ndarray, "classes features"]
    intercept: Float64[ndarray, " classes"]
    guarantee: GlmGuarantee
    steps: int


def fit(features: Any, labels: Tensor, linear: Linear, settings: FitSettings) -> Fitted:
    """Fit a linear model privately; `features` is a finite array or sparse matrix.

    Raises:
        ValueError: if a setting does not suit the data or the loss.
        Refused: if the stated number of records is far from the number of rows.
    """
    records = settings.records or features.shape[0]
    _require_near(records, features.shape[0])
    if settings.delta * records >= 1:
        raise ValueError(
            f"expected delta below 1 / records = {1 / records:.2g}, got {settings.delta}; such a "
            "delta would allow a record to be published"
        )
    # The intercept is a column of constants, which the rows' norm includes.
    behind = INTERCEPT if settings.fit_intercept else 0.0
    rows = scaled_rows(features, feature_norm=settings.feature_norm, intercept=behind)
    public = Public(
        records=records,
        epsilon=settings.epsilon,
        delta=settings.delta,
        # A number taken from the rows may only be used where all neighbours have the same.
        relation=Relation.ADD_REMOVE if settings.records else Relation.REPLACE_ONE,
        classes=linear.classes,
        row_norm=math.hypot(1.0, behind) * LONGEST,
        slope=linear.slope,
        curvature=linear.curvature,
        reach=linear.reach,
    )
    by = _by_descent if settings.algorithm in ("sgd", "gd") else _by_perturbation
    theta, guarantee, steps = by(rows, labels, linear, settings, public)
    sample = sample_of(features, labels.numpy())
    # Fits on the same records compose, so the guarantee counts those that this process has made.
    earlier = remember_fit(
        Fit(settings.family, sample, public.relation, guarantee.spent, guarantee.delta)
    )
    # Rows were divided by their bound and the intercept's column was scaled: undo both.
    found = theta.numpy()
    weights = found[:, : features.shape[1]] / settings.feature_norm
    intercept = found[:, -1] * INTERCEPT if settings.fit_intercept else np.zeros(linear.classes)
    return Fitted(weights, intercept, guarantee.after(earlier), steps)


def _require_near(stated: int, rows: int) -> None:
    """Refuse a public number of records that is far from the number of rows.

    Steps, noise and δ would be chosen for other data. Folds are allowed: two folds are near the
    whole. The number of rows is private, and not in the message.
    """
    if 2 * stated >= rows and 2 * rows + 1 >= stated:
        return
    off = "more than twice" if rows > stated else "less than half"
    raise Refused(
        f"expected `records` to be the public number of records, about that of the rows, got "
        f"{stated} for {off} as many rows; state the number that is public, or leave it out for "
        "the guarantee of replacing one record"
    )


def _by_descent(
    rows: RowSource, labels: Tensor, linear: Linear, settings: FitSettings, public: Public
) -> tuple[Tensor, GlmGuarantee, int]:
    # A smaller clipping norm shortens gradients, so the rate grows.
    clip, scale = _clip(settings.clip_norm, public)
    chosen = descent_settings(
        public,
        full=settings.algorithm == "gd",
        batch=settings.batch,
        steps=settings.steps,
        rate=settings.learning_rate,
    )
    # Full batches compose to one Gaussian, whose ε is known exactly.
    accountant = EXACT if settings.algorithm == "gd" else PLD
    target = Target(settings.epsilon, settings.delta, public.relation, accountant)
    sigma, spent = least_noise(
        lambda z: chosen.sampling.run_event(
            gaussian(z).event, num_records=public.records, num_steps=chosen.steps
        ),
        target,
    )
    plan = Plan(
        records=public.records,
        sampling=chosen.sampling,
        steps=chosen.steps,
        noise_multiplier=sigma,
        delta=settings.delta,
        relation=public.relation,
        clip=clip,
        accountant=accountant,
    )
    strength = settings.regularization
    descent = Descent(
        # A rate that the user chose is used as it is.
        rate=chosen.rate if settings.learning_rate else chosen.rate * scale,
        momentum=chosen.momentum,
        penalty=ridge(strength) if strength else None,
    )
    done = descend(
        rows,
        labels,
        classes=linear.classes,
        loss=linear.loss,
        plan=plan,
        descent=descent,
        rng=settings.rng,
        budget=settings.budget,
        fingerprint=_fingerprint(rows, labels, settings.budget) if settings.budget else none,
    )
    guarantee = GlmGuarantee(
        # Basic composition with what the run was charged beyond its plan.
        spent=math.fsum([spent, *(charge.epsilon for charge in done.charges)]),
        delta=math.fsum([plan.delta, *(charge.delta for charge in done.charges)]),
        relation=public.relation,
        sampling=plan.sampling.statement,
        accountant="PLD accountant" if accountant is PLD else "exact Gaussian accountant",
        mechanism=f"{plan.steps} steps, noise multiplier {sigma:.4g}, clipping {clip!r} of rows "
        f"divided by feature_norm = {settings.feature_norm:g}",
        public=_public(settings),
        reproducible=settings.rng.reproducible,
    )
    return done.theta, guarantee, plan.steps


def _clip(clip_norm: str | float | Clip, public: Public) -> tuple[Clip, float]:
    """Return the rule, and the factor by which steps grow to make up for shorter gradients."""
    longest = public.slope * public.row_norm
    if isinstance(clip_norm, str):
        return abadi(longest), 1.0
    clip = clip_norm if isinstance(clip_norm, Clip) else abadi(clip_norm)
    return clip, max(1.0, longest / clip.bound(1))


def _by_perturbation(
    rows: RowSource, labels: Tensor, linear: Linear, settings: FitSettings, public: Public
) -> tuple[Tensor, GlmGuarantee, int]:
    if linear.smooth is None:
        raise ValueError(
            f"expected algorithm 'sgd' or 'gd' for the loss {linear.loss}, got "
            f"{settings.algorithm!r}, which needs a loss of bounded slope and curvature"
        )
    problem = PerturbationProblem(
        loss=linear.smooth,
        classes=linear.classes,
        row_norm=public.row_norm,
        strength=1.0,
        epsilon=settings.epsilon,
        delta=settings.delta,
        relation=public.relation,
    )
    objective = settings.algorithm == "objective"
    # The estimators state the penalty of the mean, the proofs that of the sum.
    strength = (settings.regularization or 0.0) * public.records
    if not strength:
        strength = _strength(problem, public, linear.classes * rows.width, objective)
    problem = replace(problem, strength=strength)
    perturb = objective_perturbation if objective else output_perturbation
    found = perturb(
        rows,
        labels,
        problem,
        rng=settings.rng,
        budget=settings.budget,
        fingerprint=_fingerprint(rows, labels, settings.budget) if settings.budget else none,
    )
    left = f"regularization {strength / public.records:.4g} a record, the minimiser's gradient "
    guarantee = GlmGuarantee(
        spent=settings.epsilon,
        delta=settings.delta,
        relation=public.relation,
        sampling="no sampling",
        accountant=(
            "accounted by its own privacy loss" if objective else "exact Gaussian accountant"
        ),
        mechanism=f"{settings.algorithm} perturbation by noise of {found.noise:.4g}, {left}"
        f"certified below {TOLERANCE * problem.gradient_norm:.2g}, rows divided by feature_norm = "
        f"{settings.feature_norm:g}",
        public=_public(settings),
        reproducible=settings.rng.reproducible,
    )
    return found.theta, guarantee, 1


def _strength(
    problem: PerturbationProblem, public: Public, parameters: int, objective: bool
) -> float:
    if not objective:
        return output_strength(public)
    least = least_strength(problem.loss, problem.classes, problem.row_norm, 0.99 * problem.epsilon)
    noise = objective_noise(
        replace(problem, strength=least, epsilon=0.99 * problem.epsilon, delta=0.99 * problem.delta)
    )
    return max(least, objective_strength(public, noise=noise, parameters=parameters))


def _public(settings: FitSettings) -> tuple[str, ...]:
    count = "the number of records"
    if settings.records:
        count += f", stated as {settings.records} (the rows were at most twice and at least half)"
    return (count, "the number of features", "all arguments")


def _fingerprint(rows: RowSource, labels: Tensor, budget: Budget) -> Fingerprint:
    """Return a function that digests the records as they are used, under a key.

    A budget that already has other records takes these for a share of them, as folds are, and
    charges the fit to them.
    """

    def digest(key: bytes) -> str:
        hashed = hashlib.blake2b(key=key, digest_size=16)
        x: Any = rows.x  # type: ignore[attr-defined]
        parts = [x.data, x.indices, x.indptr] if sparse.issparse(x) else [x.numpy()]
        for part in [*parts, labels.numpy()]:
            hashed.update(f"{part.dtype} {part.shape} ".encode())
            hashed.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        found = hashed.hexdigest()
        return budget.share(found) if key == budget.salt else found

    return digest
