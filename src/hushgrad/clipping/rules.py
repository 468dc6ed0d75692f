"""Clipping rules: functions from one record's gradient norms to its weights, with a bound.

A rule is a function of one record's group norms. The library applies it to each record separately,
so that it cannot look at other records in the batch, and clamps its weights to the bound that the
rule states.

Reference: Bu et al. 2023, Automatic Clipping, section 3 and the table of clipping functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

LARGEST_NORM = 2.0**100
"""A record with a larger norm is treated as not finite and contributes nothing."""

SMALLEST_NORM = 2.0**-100
"""A weight that would scale a gradient from below this norm to the bound is 0: it has no digits."""

LARGEST_WEIGHT = 2.0**120
"""A larger weight becomes 0, because it would overflow float32."""

ClipNorm = float | Sequence[float]
Weigh = Callable[[Tensor, Tensor], Tensor]
"""Maps one record's group norms and the groups' clipping norms to one weight for each group."""


@dataclass(frozen=True)
class Clip:
    """A clipping rule; `abadi`, `automatic`, … make the usual ones, and `custom` your own.

    Guarantees: weighted by `weights`, a record's gradient has Euclidean norm at most `bound`,
    whatever `weigh` returns, provided that the norms are upper bounds on the true ones.

    Args:
        name: how guarantees and reports name it.
        weigh: maps one record's group norms, and the groups' clipping norms, to weights.
        clip_norm: R, one number or one for each group.
        keeps: maps the groups' clipping norms to the bounds that the rule keeps.
        mapped: whether to apply `weigh` record by record; False only for the library's own rules.

    Example:
        >>> clip = abadi(1.0)
        >>> clip.weights(torch.tensor([[0.5], [2.0]])).flatten()
        tensor([1.0000, 0.5000], dtype=torch.float64)
        >>> clip.bound(1)
        1.0
    """

    name: str
    weigh: Weigh
    clip_norm: ClipNorm
    keeps: Callable[[list[float]], list[float]] = lambda clip_norms: clip_norms
    mapped: bool = True  # the rules below are False: they are elementwise already

    def clip_norms(self, groups: int) -> list[float]:
        """Return R for each of L groups: a number R becomes R/√L each, a sequence is used as is."""
        if isinstance(self.clip_norm, int | float):
            return [self.clip_norm / math.sqrt(groups)] * groups
        if len(self.clip_norm) != groups:
            raise ValueError(
                f"expected a clipping norm for each of the {groups} groups, got "
                f"{len(self.clip_norm)}; pass one number to split it evenly"
            )
        return list(self.clip_norm)

    def bound(self, groups: int) -> float:
        """Return the largest norm that one record's weighted gradient can have."""
        return math.hypot(*self.keeps(self.clip_norms(groups)))

    def weights(self, norms: Float[Tensor, "batch group"]) -> Float[Tensor, "batch group"]:
        """Return one weight for each record and group, in float64."""
        norms = norms.double()
        groups = norms.shape[1]
        clip_norms = torch.tensor(self.clip_norms(groups), dtype=norms.dtype, device=norms.device)
        usable = norms <= LARGEST_NORM  # nan is not
        usable = usable if groups == 1 else usable.all(1, keepdim=True)
        if self.mapped:
            # A user's rule gets copies: it could write to its input, which the clamp below reads.
            weights = _map_records(self.weigh, torch.where(usable, norms, 1.0), clip_norms)
            weights = torch.nan_to_num(weights.detach(), 0.0, 0.0, 0.0)
        else:
            weights = self.weigh(norms, clip_norms)  # NaN only where a norm is not usable
        bound = self.bound(groups)
        size = torch.linalg.vector_norm(weights * norms, dim=1, keepdim=True)
        weights = weights / (size / bound).clamp(min=1.0)
        most = min(bound / SMALLEST_NORM, LARGEST_WEIGHT)
        return torch.where(usable & (weights.abs() <= most), weights, 0.0)

    def group_weights(
        self, norms: Float[Tensor, " batch"], *, group: int, groups: int
    ) -> Float[Tensor, " batch"]:
        """Return the weights of one group, for a rule that treats groups separately."""
        assert not self.mapped
        alone = norms.new_zeros(len(norms), groups)
        alone[:, group] = norms
        return self.weights(alone)[:, group]

    def at(self, clip_norm: ClipNorm) -> Clip:
        """Return the rule at the clipping norm of a later step: this one, as it does not adapt."""
        return self

    def next_rule(self, clip: Clip, clipped: float) -> Clip:
        """Return the rule of the next step: this one, as it does not adapt."""
        return self

    def __repr__(self) -> str:
        name, _, options = self.name.partition("(")
        own = f"{options.removesuffix(')')}, " if options else ""
        return f"{name}({own}clip_norm={self.clip_norm})"


@dataclass(frozen=True)
class Adaptive:
    """Adaptive clipping: the clipping norm follows a quantile of the gradients' norms.

    After each step the norm C becomes `C·exp(−η(share below C − quantile))`. The share is released
    with noise, as a metric in the same event as the gradient, so that adapting costs no further
    privacy.

    Args:
        quantile: the share of records that should not be clipped.
        clip_norm: C of the first step.
        rate: η, how fast C follows the quantile.
        rule: makes the rule at a given C.

    Raises:
        ValueError: if the quantile is not between 0 and 1, or a number is not positive.

    Example:
        >>> adaptive = Adaptive(quantile=0.5)
        >>> adaptive.next_rule(adaptive.at(1.0), clipped=0.9)  # too many were clipped: C grows
        abadi(clip_norm=1.0832870676749586)

    Reference: Andrew et al. 2021, Differentially Private Learning with Adaptive Clipping,
    Algorithm 1, with η = 0.2.
    """

    quantile: float = 0.5
    clip_norm: float = 1.0
    rate: float = 0.2
    rule: Callable[[float], Clip] = field(default_factory=lambda: abadi)

    def __post_init__(self) -> None:
        _require_positive(self.clip_norm)
        _require_positive(self.rate, "rate")
        if not 0 < self.quantile < 1:
            raise ValueError(
                f"expected 0 < quantile < 1, got {self.quantile}; 0.5 clips half of the records"
            )

    def at(self, clip_norm: ClipNorm) -> Clip:
        """Return the rule at this clipping norm."""
        assert isinstance(clip_norm, int | float)
        return self.rule(clip_norm)

    def next_rule(self, clip: Clip, clipped: float) -> Clip:
        """Return the next step's rule, given this step's rule and the released share of clipped."""
        assert isinstance(clip.clip_norm, int | float)
        below = min(max(1 - clipped, 0.0), 1.0)
        moved = clip.clip_norm * math.exp(-self.rate * (below - self.quantile))
        return self.at(min(max(moved, self.clip_norm / _FARTHEST), self.clip_norm * _FARTHEST))

    def __repr__(self) -> str:
        return f"adaptive(quantile={self.quantile}, from {self.rule(self.clip_norm)!r})"


_FARTHEST = 2.0**20  # C stays within this factor of its start, so that noise cannot overflow it


def _map_records(weigh: Weigh, norms: Tensor, clip_norms: Tensor) -> Tensor:
    """Apply `weigh` to each record's norms separately."""
    if len(norms) == 0:
        return norms
    try:
        weights = torch.func.vmap(weigh, in_dims=(0, None))(norms, clip_norms)
    except RuntimeError:  # a rule that branches on its values cannot be vectorised
        weights = torch.stack([weigh(one, clip_norms) for one in norms])
    if weights.shape != norms.shape:
        raise ValueError(
            f"expected one weight for each of the {norms.shape[1]} groups of a record, got a "
            f"tensor of shape {tuple(weights.shape[1:])}; return one weight for each norm"
        )
    return weights.double()


def abadi(clip_norm: ClipNorm = 1.0) -> Clip:
    """Return Abadi's clipping: weight `min(1, R/|g|)`, which shortens gradients above norm R.

    Guarantees: a contribution has norm at most R. Gradients of norm up to R stay unchanged.

    Args:
        clip_norm: R, one number for all groups together or one for each group.

    Raises:
        ValueError: if R is not positive and finite.

    Example:
        >>> abadi(1.0).weights(torch.tensor([[4.0]]))
        tensor([[0.2500]], dtype=torch.float64)

    Reference: Abadi et al. 2016, Deep Learning with Differential Privacy, Algorithm 1.
    """
    _require_positive(clip_norm)
    return Clip("abadi", lambda n, r: torch.clamp(r / n, max=1.0), clip_norm, mapped=False)


def automatic(gamma: float = 0.01, clip_norm: ClipNorm = 1.0) -> Clip:
    """Return automatic clipping (AUTO-S): weight `R/(|g| + γ)`, which needs no tuning of R.

    R only rescales the learning rate. Small gradients stay smaller than large ones, unlike under
    `normalize`.

    Args:
        gamma: γ, which keeps the weights of small gradients bounded.
        clip_norm: R.

    Raises:
        ValueError: if γ or R is not positive and finite.

    Example:
        >>> automatic().weights(torch.tensor([[1.99]]))
        tensor([[0.5000]], dtype=torch.float64)

    Reference: Bu et al. 2023, Automatic Clipping, eq. (4.1), γ = 0.01; DP-NSGD with r = γ at R = 1.
    """
    _require_positive(clip_norm)
    _require_positive(gamma, "gamma")
    name = f"automatic(gamma={gamma})"
    return Clip(name, lambda n, r: r / (n + gamma), clip_norm, mapped=False)


def normalize(clip_norm: ClipNorm = 1.0) -> Clip:
    """Return normalisation (AUTO-V): weight `R/|g|`, so that every gradient gets norm R.

    A zero gradient stays zero.

    Args:
        clip_norm: R.

    Raises:
        ValueError: if R is not positive and finite.

    Example:
        >>> normalize(1.0).weights(torch.tensor([[0.5], [2.0]])).flatten()
        tensor([2.0000, 0.5000], dtype=torch.float64)

    Reference: Bu et al. 2023, Automatic Clipping, section 3.
    """
    _require_positive(clip_norm)
    return Clip("normalize", lambda n, r: torch.where(n > 0, r / n, 0.0), clip_norm, mapped=False)


def discard(clip_norm: ClipNorm = 1.0) -> Clip:
    """Return global clipping: weight `1[|g| < R]`, which keeps a gradient or drops it.

    Args:
        clip_norm: R.

    Raises:
        ValueError: if R is not positive and finite.

    Example:
        >>> discard(1.0).weights(torch.tensor([[0.5], [2.0]])).flatten()
        tensor([1., 0.], dtype=torch.float64)

    Reference: Bu et al. 2021, On the Convergence and Calibration of Deep Learning with DP.
    """
    _require_positive(clip_norm)
    return Clip("discard", lambda n, r: (n < r).to(n.dtype), clip_norm, mapped=False)


def reparameterized(clip_norm: ClipNorm = 1.0) -> Clip:
    """Return Abadi's rule divided by R: weight `min(1/R, 1/|g|)`, with the bound 1 instead of R.

    Changing R then does not change the noise. With L groups each keeps the bound 1/√L.

    Args:
        clip_norm: R.

    Raises:
        ValueError: if R is not positive and finite.

    Example:
        >>> reparameterized(4.0).bound(1)
        1.0

    Reference: De et al. 2022, Unlocking High-Accuracy DP Image Classification.
    """
    _require_positive(clip_norm)

    def weigh(norms: Tensor, clip_norms: Tensor) -> Tensor:
        share = 1 / math.sqrt(len(clip_norms))
        return torch.minimum(share / clip_norms, share / norms)

    def keeps(clip_norms: list[float]) -> list[float]:
        return [1 / math.sqrt(len(clip_norms))] * len(clip_norms)

    return Clip("reparameterized", weigh, clip_norm, keeps, mapped=False)


def custom(weigh: Callable[[Tensor], Tensor], *, bound: float, name: str = "custom") -> Clip:
    """Return a rule of your own: a function of one record's group norms, and the bound it keeps.

    Guarantees: the weights are clamped to the bound, and NaN becomes 0. A function that exceeds
    its bound costs utility, never privacy; `hushgrad.testing.check_clip_rule` finds out.

    Args:
        weigh: maps one record's norms, one per group, to its weights.
        bound: the largest norm of a weighted gradient.
        name: how guarantees and reports name the rule.

    Raises:
        ValueError: if the bound is not positive and finite.

    Example:
        >>> clip = custom(lambda norms: 1 / (1 + norms), bound=1.0)
        >>> clip.weights(torch.tensor([[1.0]]))
        tensor([[0.5000]], dtype=torch.float64)
    """
    _require_positive(bound, "bound")
    return Clip(name, lambda norms, _: weigh(norms), bound)


def _require_positive(value: ClipNorm, name: str = "clip_norm") -> None:
    values = [value] if isinstance(value, int | float) else list(value)
    if not values or not all(math.isfinite(v) and v > 0 for v in values):
        raise ValueError(f"expected {name} > 0 and finite, got {value}; 1.0 is a common choice")
