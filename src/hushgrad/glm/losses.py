"""Losses ℓ(z, y) of a linear score z = <θ, x>, as values; and penalties on θ.

A record's gradient is ℓ'(z, y)·x, so its norm is |ℓ'(z, y)|·‖x‖ and needs no autograd. Labels of
two classes are −1 and +1, those of several classes 0, 1, …; scores of several classes have one
column for each. Everything is float64.
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
    """A loss of a linear score.

    `lipschitz` is the least known bound on |ℓ'| (its Euclidean norm where scores are vectors) and
    `smoothness` on |ℓ''|; infinite where there is none. `convex` is convexity in the score, and
    `corners` are the scores at which ℓ' has a corner or a jump.

    Guarantees: a record's value and derivative depend on its own score and label alone. A function
    of the user's is mapped over the records, so that it cannot look at the others.
    """

    name: str
    value: OfScores
    derivative: OfScores
    lipschitz: float = math.inf
    smoothness: float = math.inf
    convex: bool = True
    vector: bool = False
    corners: Callable[[Tensor], list[Tensor]] = lambda y: []
    mapped: bool = True  # False only for the losses below, which take each record by itself

    def __post_init__(self) -> None:
        if self.mapped:
            object.__setattr__(self, "value", _each(self.value))
            object.__setattr__(self, "derivative", _each(self.derivative))

    def __repr__(self) -> str:
        return self.name


def _each(function: OfScores) -> OfScores:
    """The function applied to each record by itself."""

    def alone(z: Tensor, y: Tensor) -> Tensor:
        return function(z[None], y[None])[0]

    def apply(z: Tensor, y: Tensor) -> Tensor:
        if not len(z):
            return function(z, y)
        try:
            return torch.func.vmap(alone)(z, y)
        except RuntimeError:  # one that branches on its values cannot be vectorised
            return torch.stack([alone(*one) for one in zip(z, y, strict=True)])

    return apply


_library_loss = functools.partial(ScoreLoss, mapped=False)


def logistic() -> ScoreLoss:
    """log(1 + e^(−yz)), for labels −1 and +1."""
    return _library_loss(
        "logistic",
        lambda z, y: F.softplus(-y * z),
        lambda z, y: -y * torch.sigmoid(-y * z),
        lipschitz=1.0,
        smoothness=0.25,
    )


def multinomial() -> ScoreLoss:
    """−log softmax(z)_y, for one score of each class.

    ‖ℓ'‖ reaches √2, when all the weight is on a wrong class; √(K/(K−1)) is no bound.
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
    """(z − y)²/2; no bound on its slope without one on scores and labels."""
    return _library_loss(
        "squared", lambda z, y: (z - y).square() / 2, lambda z, y: z - y, smoothness=1.0
    )


def huber(knot: float = 1.0) -> ScoreLoss:
    """(z − y)²/2 up to |z − y| = `knot`, and straight beyond."""
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
    """max(0, 1 − yz), for labels −1 and +1; at the corner the derivative is taken as 0."""
    return _library_loss(
        "hinge",
        lambda z, y: (1 - y * z).clamp(min=0),
        lambda z, y: torch.where(y * z < 1, -y, 0.0).to(z.dtype),
        lipschitz=1.0,
        corners=lambda y: [y],
    )


def smoothed_hinge(width: float = 0.5) -> ScoreLoss:
    """The hinge with a parabola of half-width `width` (h) in the place of its corner.

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
    """max(0, 1 + the largest score of another class − z_y), for one score of each class.

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
    """e^z − yz: counts with mean e^z; neither slope nor curvature has a bound."""
    return _library_loss(
        "poisson", lambda z, y: torch.exp(z) - y * z, lambda z, y: torch.exp(z) - y
    )


def savage() -> ScoreLoss:
    """1/(1 + e^(yz))², bounded and not convex.

    Reference: Masnadi-Shirazi and Vasconcelos 2008, On the Design of Loss Functions.
    """

    def derivative(z: Tensor, y: Tensor) -> Tensor:
        s = torch.sigmoid(-y * z)
        return -2 * y * s.square() * torch.sigmoid(y * z)

    steepest = (15 - math.sqrt(33)) / 24  # where s of the second derivative turns
    return _library_loss(
        "savage",
        lambda z, y: torch.sigmoid(-y * z).square(),
        derivative,
        lipschitz=8 / 27,  # 2s²(1 − s) at s = 2/3
        smoothness=2 * steepest**2 * (1 - steepest) * (2 - 3 * steepest),
        convex=False,
    )


def tangent() -> ScoreLoss:
    """(2 arctan(yz) − 1)², bounded and not convex; it also punishes what is too right.

    Reference: Masnadi-Shirazi et al. 2010, On the Design of Robust Classifiers.
    """

    def derivative(z: Tensor, y: Tensor) -> Tensor:
        v = y * z
        return 4 * y * (2 * torch.atan(v) - 1) / (1 + v.square())

    return _library_loss(
        "tangent",
        lambda z, y: (2 * torch.atan(y * z) - 1).square(),
        derivative,
        # Found by root finding, rounded up; tests/glm/test_losses.py looks for larger ones.
        lipschitz=6.1686,
        smoothness=8.4847,
        convex=False,
    )


def bi_tempered(t1: float = 0.8, t2: float = 1.2, *, vector: bool = False) -> ScoreLoss:
    """The bi-tempered logistic loss: bounded for t1 < 1, heavy-tailed for t2 > 1, not convex.

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
    """A loss of one's own; its derivative is taken by autograd, record by record, if left out.

    `lipschitz`, `smoothness` and `convex` are the user's word. Objective and output perturbation
    rest on them. Clipped gradients do not: they are clipped whatever was stated. Both functions
    are applied to each record by itself.
    """

    def by_autograd(z: Tensor, y: Tensor) -> Tensor:
        slopes: Tensor = torch.func.grad(lambda s: value(s, y).sum())(z)
        return slopes

    return ScoreLoss(name, value, derivative or by_autograd, lipschitz, smoothness, convex, vector)


@dataclass(frozen=True)
class Penalty:
    """A function of the parameters alone, which reads no record and needs no noise."""

    name: str
    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor], Tensor]

    def __repr__(self) -> str:
        return self.name


def ridge(strength: float) -> Penalty:
    """λ‖θ‖²/2."""
    return Penalty(
        f"ridge({strength:g})",
        lambda theta: strength / 2 * theta.square().sum(),
        lambda theta: strength * theta,
    )


def bounded_ridge(strength: float = 1e-3) -> Penalty:
    """λ Σ θ²/(1 + θ²), not convex.

    Reference: DP-SRM, section 7.1, with λ = 1e-3.
    """
    return Penalty(
        f"bounded_ridge({strength:g})",
        lambda theta: strength * (theta.square() / (1 + theta.square())).sum(),
        lambda theta: 2 * strength * theta / (1 + theta.square()).square(),
    )


def _of_label(x: Tensor, y: Tensor) -> Tensor:
    """The entry of each record's own class."""
    return x.gather(1, y.long()[:, None])[:, 0]


def _one_hot(z: Tensor, y: Tensor) -> Tensor:
    return F.one_hot(y.long(), z.shape[1]).to(z.dtype)


def _two(z: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(z), z], 1)


def _log_t(u: Tensor, t: float) -> Tensor:
    return u.log() if t == 1 else (u.pow(1 - t) - 1) / (1 - t)


def _exp_t(u: Tensor, t: float) -> Tensor:
    return u.exp() if t == 1 else (1 + (1 - t) * u).clamp(min=0).pow(1 / (1 - t))


_NEWTON = 60  # steps; 9 reach the last bit for 10 classes, and each adds up to 1 to λ


def _tempered_softmax(z: Tensor, t: float) -> Tensor:
    """exp_t(z − λ), with λ such that the entries add up to 1.

    The sum is convex and falls with λ, so that Newton's method from the largest score, where it is
    at least 1, comes up to λ and never passes it.
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
