"""Losses ℓ(z, y) of a linear score z = <θ, x>, as values, and penalties on θ.

A record's gradient is ℓ'(z, y)·x, so its norm is |ℓ'(z, y)|·‖x‖ and needs no autograd. Labels are
−1 and +1 for two classes, and 0, 1, … for several; scores of several classes have one column for
each. Everything is float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

OfScores = Callable[[Tensor, Tensor], Tensor]
"""A function of scores [batch] or [batch, classes] and labels [batch]."""


@dataclass(frozen=True)
class ScoreLoss:
    """A loss of a linear score; `logistic`, `squared`, … make the usual ones, `custom` your own.

    Guarantees: a record's value and derivative depend on its own score and label only. A user's
    functions are applied to each record separately, so that they cannot look at the others.

    Args:
        name: how guarantees name it.
        value: ℓ(z, y), one value for each record.
        derivative: ℓ'(z, y); a vector for each record if scores are vectors.
        lipschitz: the smallest known bound on |ℓ'| (its Euclidean norm for vectors), or inf.
        smoothness: the smallest known bound on |ℓ''|, or inf.
        convex: whether ℓ is convex in the score.
        vector: whether a record has one score for each class.
        corners: maps labels to the scores at which ℓ' has a corner or a jump.
        mapped: whether to apply the functions record by record; False only for the library's.

    Example:
        >>> loss = logistic()
        >>> z, y = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        >>> loss.value(z, y), loss.derivative(z, y), loss.lipschitz
        (tensor([0.6931], dtype=torch.float64), tensor([-0.5000], dtype=torch.float64), 1.0)
    """

    name: str
    value: OfScores
    derivative: OfScores
    lipschitz: float = math.inf
    smoothness: float = math.inf
    convex: bool = True
    vector: bool = False
    corners: Callable[[Tensor], list[Tensor]] = lambda y: []
    mapped: bool = True  # the losses below are False: they are elementwise already

    def __post_init__(self) -> None:
        if self.mapped:
            object.__setattr__(self, "value", _each(self.value))
            object.__setattr__(self, "derivative", _each(self.derivative))

    def __repr__(self) -> str:
        return self.name


def _each(function: OfScores) -> OfScores:
    """Return the function that applies `function` to each record separately."""

    def alone(z: Tensor, y: Tensor) -> Tensor:
        return function(z[None], y[None])[0]

    def apply(z: Tensor, y: Tensor) -> Tensor:
        if not len(z):
            return function(z, y)
        try:
            return torch.func.vmap(alone)(z, y)
        except RuntimeError:  # a function that branches on its values cannot be vectorised
            return torch.stack([alone(*one) for one in zip(z, y, strict=True)])

    return apply


_library_loss = functools.partial(ScoreLoss, mapped=False)


def logistic() -> ScoreLoss:
    """Return the logistic loss log(1 + e^(−yz)), for labels −1 and +1."""
    return _library_loss(
        "logistic",
        lambda z, y: F.softplus(-y * z),
        lambda z, y: -y * torch.sigmoid(-y * z),
        lipschitz=1.0,
        smoothness=0.25,
    )


def multinomial() -> ScoreLoss:
    """Return the multinomial loss −log softmax(z)_y, for one score per class.

    ‖ℓ'‖ approaches √2 when all probability is on a wrong class, so √(K/(K−1)) is not a bound.
    """
    return _library_loss(
        "multinomial",
        lambda z, y: torch.logsumexp(z, 1) - _of_label(z, y),
        lambda z, y: torch.softmax(z, 1) - _one_hot(z, y),
        lipschitz=math.sqrt(2),
        smoothness=0.5,  # of diag(p) − ppᵀ, reached at p = (½, ½, 0, …)
        vector=True,
    )


def squared() -> ScoreLoss:
    """Return the squared loss (z − y)²/2, whose slope is unbounded."""
    return _library_loss(
        "squared", lambda z, y: (z - y).square() / 2, lambda z, y: z - y, smoothness=1.0
    )


def huber(knot: float = 1.0) -> ScoreLoss:
    """Return the Huber loss: (z − y)²/2 up to |z − y| = `knot`, and linear beyond."""
    _require_positive("knot", knot)
    return _library_loss(
        f"huber({knot:g})",
        lambda z, y: F.huber_loss(z, y.to(z.dtype), reduction="none", delta=knot),
        lambda z, y: (z - y).clamp(-knot, knot),
        lipschitz=knot,
        smoothness=1.0,
        corners=lambda y: [y - knot, y + knot],
    )


def hinge() -> ScoreLoss:
    """Return the hinge loss max(0, 1 − yz), for labels −1 and +1; its slope at the corner is 0."""
    return _library_loss(
        "hinge",
        lambda z, y: (1 - y * z).clamp(min=0),
        lambda z, y: torch.where(y * z < 1, -y, 0.0).to(z.dtype),
        lipschitz=1.0,
        corners=lambda y: [y],
    )


def smoothed_hinge(width: float = 0.5) -> ScoreLoss:
    """Return the hinge loss with a parabola of half-width `width` (h) instead of its corner.

    Reference: Chaudhuri et al. 2011, Differentially Private Empirical Risk Minimization, eq. (8).
    """
    _require_positive("width", width)

    def value(z: Tensor, y: Tensor) -> Tensor:
        inside = (1 + width - y * z).clamp(0, 2 * width)
        return inside.square() / (4 * width) + (1 - width - y * z).clamp(min=0)

    return _library_loss(
        f"smoothed_hinge({width:g})",
        value,
        lambda z, y: -y * (1 + width - y * z).clamp(0, 2 * width) / (2 * width),
        lipschitz=1.0,
        smoothness=1 / (2 * width),
        corners=lambda y: [y * (1 - width), y * (1 + width)],
    )


def multiclass_hinge() -> ScoreLoss:
    """Return the multiclass hinge loss max(0, 1 + max of the other classes' scores − z_y).

    Reference: Crammer and Singer 2001, Multiclass Kernel-based Vector Machines.
    """

    def others(z: Tensor, y: Tensor) -> Tensor:
        return z.masked_fill(_one_hot(z, y).bool(), -math.inf)

    def derivative(z: Tensor, y: Tensor) -> Tensor:
        rival = others(z, y)
        lost = (1 + rival.amax(1) - _of_label(z, y) > 0).to(z.dtype)[:, None]
        return lost * (_one_hot(z, rival.argmax(1)) - _one_hot(z, y))

    return _library_loss(
        "multiclass_hinge",
        lambda z, y: (1 + others(z, y).amax(1) - _of_label(z, y)).clamp(min=0),
        derivative,
        lipschitz=math.sqrt(2),
        vector=True,
    )


def poisson() -> ScoreLoss:
    """Return the Poisson loss e^z − yz, for counts with mean e^z; its slope is unbounded."""
    return _library_loss(
        "poisson", lambda z, y: torch.exp(z) - y * z, lambda z, y: torch.exp(z) - y
    )


def savage() -> ScoreLoss:
    """Return the Savage loss 1/(1 + e^(yz))², bounded and not convex.

    Reference: Masnadi-Shirazi and Vasconcelos 2008, On the Design of Loss Functions.
    """

    def derivative(z: Tensor, y: Tensor) -> Tensor:
        s = torch.sigmoid(-y * z)
        return -2 * y * s.square() * torch.sigmoid(y * z)

    steepest = (15 - math.sqrt(33)) / 24  # the s at which |ℓ''| is largest
    return _library_loss(
        "savage",
        lambda z, y: torch.sigmoid(-y * z).square(),
        derivative,
        lipschitz=8 / 27,  # 2s²(1 − s) at s = 2/3
        smoothness=2 * steepest**2 * (1 - steepest) * (2 - 3 * steepest),
        convex=False,
    )


def tangent() -> ScoreLoss:
    """Return the tangent loss (2 arctan(yz) − 1)², bounded and not convex.

    It also penalises scores that are correct by a large margin.

    Reference: Masnadi-Shirazi et al. 2010, On the Design of Robust Classifiers.
    """

    def derivative(z: Tensor, y: Tensor) -> Tensor:
        v = y * z
        return 4 * y * (2 * torch.atan(v) - 1) / (1 + v.square())

    return _library_loss(
        "tangent",
        lambda z, y: (2 * torch.atan(y * z) - 1).square(),
        derivative,
        # Found numerically and rounded up; tests/glm/test_losses.py searches for larger ones.
        lipschitz=6.1686,
        smoothness=8.4847,
        convex=False,
    )


def bi_tempered(t1: float = 0.8, t2: float = 1.2, *, vector: bool = False) -> ScoreLoss:
    """Return the bi-tempered logistic loss: bounded for t1 < 1, heavy-tailed for t2 > 1.

    It is not convex.

    With t1 = t2 = 1 it is the logistic or, with `vector`, the multinomial loss. For two classes
    z is the score of +1, and that of −1 is 0.

    Reference: Amid et al. 2019, Robust Bi-Tempered Logistic Loss Based on Bregman Divergences.
    """
    if not 0 <= t1 <= 1 <= t2 < 2:
        raise ValueError(f"expected 0 <= t1 <= 1 <= t2 < 2, got {t1} and {t2}; try 0.8 and 1.2")

    def value(z: Tensor, y: Tensor) -> Tensor:
        p = _tempered_softmax(z, t2)
        own = _of_label(p, y)
        return (p.pow(2 - t1).sum(1) - 1) / (2 - t1) - _log_t(own, t1)

    def derivative(z: Tensor, y: Tensor) -> Tensor:
        p = _tempered_softmax(z, t2)
        u = (p - _one_hot(z, y)) * p.pow(t2 - t1)
        escort = p.pow(t2) / p.pow(t2).sum(1, keepdim=True)
        return u - escort * u.sum(1, keepdim=True)

    return _library_loss(
        f"bi_tempered({t1:g}, {t2:g})",
        value if vector else lambda z, y: value(_two(z), (y > 0).long()),
        derivative if vector else lambda z, y: derivative(_two(z), (y > 0).long())[:, 1],
        # With |u| <= |p − y|: ‖u‖ <= √2 and |Σu| <= 1; of two classes both terms have one sign.
        lipschitz=1 + math.sqrt(2) if vector else 1.0,
        convex=False,
        vector=vector,
    )


def custom(
    value: OfScores,
    derivative: OfScores | None = None,
    *,
    name: str = "custom",
    lipschitz: float = math.inf,
    smoothness: float = math.inf,
    convex: bool = False,
    vector: bool = False,
) -> ScoreLoss:
    """Return a loss of your own; without a derivative, autograd computes it record by record.

    `lipschitz`, `smoothness` and `convex` are your statements. The privacy of objective and output
    perturbation depends on them; that of clipped gradients does not, because they are clipped in
    any case. Both functions are applied to each record separately.
    """

    def by_autograd(z: Tensor, y: Tensor) -> Tensor:
        slopes: Tensor = torch.func.grad(lambda s: value(s, y).sum())(z)
        return slopes

    return ScoreLoss(name, value, derivative or by_autograd, lipschitz, smoothness, convex, vector)


@dataclass(frozen=True)
class Penalty:
    """A function of the parameters only, which reads no record and so needs no noise.

    Args:
        name: how guarantees name it.
        value: its value at θ.
        gradient: its gradient at θ.

    Example:
        >>> ridge(0.5).gradient(torch.tensor([2.0]))
        tensor([1.])
    """

    name: str
    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor], Tensor]

    def __repr__(self) -> str:
        return self.name


def ridge(strength: float) -> Penalty:
    """Return the ridge penalty λ‖θ‖²/2."""
    return Penalty(
        f"ridge({strength:g})",
        lambda theta: strength / 2 * theta.square().sum(),
        lambda theta: strength * theta,
    )


def bounded_ridge(strength: float = 1e-3) -> Penalty:
    """Return the bounded penalty λ Σ θ²/(1 + θ²), which is not convex.

    Reference: DP-SRM, section 7.1, with λ = 1e-3.
    """
    return Penalty(
        f"bounded_ridge({strength:g})",
        lambda theta: strength * (theta.square() / (1 + theta.square())).sum(),
        lambda theta: 2 * strength * theta / (1 + theta.square()).square(),
    )


def _of_label(x: Tensor, y: Tensor) -> Tensor:
    """Return the entry of each record's own class."""
    return x.gather(1, y.long()[:, None])[:, 0]


def _one_hot(z: Tensor, y: Tensor) -> Tensor:
    return F.one_hot(y.long(), z.shape[1]).to(z.dtype)


def _two(z: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(z), z], 1)


def _log_t(u: Tensor, t: float) -> Tensor:
    return u.log() if t == 1 else (u.pow(1 - t) - 1) / (1 - t)


def _exp_t(u: Tensor, t: float) -> Tensor:
    return u.exp() if t == 1 else (1 + (1 - t) * u).clamp(min=0).pow(1 / (1 - t))


_NEWTON = 60  # steps; 9 reach the last bit for 10 classes, and each increases λ by at most 1


def _tempered_softmax(z: Tensor, t: float) -> Tensor:
    """Return exp_t(z − λ), with λ such that the entries add up to 1.

    The sum is convex and decreasing in λ. So Newton's method, started at the largest score, where
    the sum is at least 1, approaches λ from below and never overshoots.
    """
    if t == 1:
        return torch.softmax(z, 1)
    shift = z.amax(1, keepdim=True)
    for _ in range(_NEWTON):
        p = _exp_t(z - shift, t)
        shift = shift + (p.sum(1, keepdim=True) - 1) / p.pow(t).sum(1, keepdim=True)
    p = _exp_t(z - shift, t)
    return p / p.sum(1, keepdim=True)


def _require_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"expected {name} > 0 and finite, got {value}; 1.0 is a common choice")
