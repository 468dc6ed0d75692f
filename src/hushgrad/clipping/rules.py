"""Clipping rules: one record's norms in, its weights out, and the bound they keep.

A rule is a function of one record's group norms. The library maps it over the batch, so that it
cannot look at the other records, and clamps what comes back to the bound that the rule states.

Reference: Bu et al., Automatic Clipping, section 3 and table of clipping functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

LARGEST_NORM = 2.0**100
"""A record whose norm is above this counts as not finite and contributes nothing."""

SMALLEST_NORM = 2.0**-100
"""A weight that could bring a gradient below this up to its bound is 0: no digits are left."""

LARGEST_WEIGHT = 2.0**120
"""A weight above this would not be a float32; it is 0."""

ClipNorm = float | Sequence[float]
Weigh = Callable[[Tensor, Tensor], Tensor]
"""One record's group norms and the groups' clipping norms, to one weight for each group."""


@dataclass(frozen=True)
class Clip:
    """A clipping rule.

    Guarantees: with `weights` a record's contribution has Euclidean norm at most `bound`,
    whatever `weigh` returns, provided that the norms given are not below the true ones.
    """

    name: str
    weigh: Weigh
    clip_norm: ClipNorm
    keeps: Callable[[list[float]], list[float]] = lambda clip_norms: clip_norms
    mapped: bool = True  # False only for the rules below: each row and group is taken by itself

    def clip_norms(self, groups: int) -> list[float]:
        """R for each group: a number R is shared out as R/√L, a sequence is taken as it is."""
        if isinstance(self.clip_norm, int | float):
            return [self.clip_norm / math.sqrt(groups)] * groups
        if len(self.clip_norm) != groups:
            raise ValueError(
                f"expected a clipping norm for each of the {groups} groups, got "
                f"{len(self.clip_norm)}; pass one number to share it out evenly"
            )
        return list(self.clip_norm)

    def bound(self, groups: int) -> float:
        """The largest norm that one record's contribution can have."""
        return math.hypot(*self.keeps(self.clip_norms(groups)))

    def weights(self, norms: Float[Tensor, "batch group"]) -> Float[Tensor, "batch group"]:
        """One weight for each record and group, in float64."""
        norms = norms.double()
        groups = norms.shape[1]
        clip_norms = torch.tensor(self.clip_norms(groups), dtype=norms.dtype, device=norms.device)
        usable = norms <= LARGEST_NORM  # nan is not
        usable = usable if groups == 1 else usable.all(1, keepdim=True)
        if self.mapped:
            # A user's rule gets copies: the clamp below must not read what a rule has written.
            weights = _map_records(self.weigh, torch.where(usable, norms, 1.0), clip_norms)
            weights = torch.nan_to_num(weights.detach(), 0.0, 0.0, 0.0)
        else:
            weights = self.weigh(norms, clip_norms)  # nan only where a norm is not usable
        bound = self.bound(groups)
        size = torch.linalg.vector_norm(weights * norms, dim=1, keepdim=True)
        weights = weights / (size / bound).clamp(min=1.0)
        most = min(bound / SMALLEST_NORM, LARGEST_WEIGHT)
        return torch.where(usable & (weights.abs() <= most), weights, 0.0)

    def group_weights(
        self, norms: Float[Tensor, " batch"], *, group: int, groups: int
    ) -> Float[Tensor, " batch"]:
        """The weights of one group, for a rule that takes each by itself."""
        assert not self.mapped
        alone = norms.new_zeros(len(norms), groups)
        alone[:, group] = norms
        return self.weights(alone)[:, group]

    def at(self, clip_norm: ClipNorm) -> Clip:
        """The rule of a later step: this one, which follows nothing."""
        return self

    def next_rule(self, clip: Clip, clipped: float) -> Clip:
        """The rule of the next step: this one."""
        return self

    def __repr__(self) -> str:
        name, _, options = self.name.partition("(")
        own = f"{options.removesuffix(')')}, " if options else ""
        return f"{name}({own}clip_norm={self.clip_norm})"


@dataclass(frozen=True)
class Adaptive:
    """Clip at a quantile of the gradients' norms, which is followed from step to step.

    The share of clipped records is released in the same event as the gradient, as a metric, and
    moves the norm: `C·exp(−η(share below C − quantile))`. Only released values move it.

    Reference: Andrew et al. 2021, Differentially Private Learning with Adaptive Clipping, η = 0.2.
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
        """The rule at the norm of one step."""
        assert isinstance(clip_norm, int | float)
        return self.rule(clip_norm)

    def next_rule(self, clip: Clip, clipped: float) -> Clip:
        """The rule of the next step, from that of this step and its released share of clipped."""
        assert isinstance(clip.clip_norm, int | float)
        below = min(max(1 - clipped, 0.0), 1.0)
        moved = clip.clip_norm * math.exp(-self.rate * (below - self.quantile))
        return self.at(min(max(moved, self.clip_norm / _FARTHEST), self.clip_norm * _FARTHEST))

    def __repr__(self) -> str:
        return f"adaptive(quantile={self.quantile}, from {self.rule(self.clip_norm)!r})"


_FARTHEST = 2.0**20  # noise alone must not carry the norm out of what float32 can hold


def _map_records(weigh: Weigh, norms: Tensor, clip_norms: Tensor) -> Tensor:
    """Apply `weigh` to each record's norms by themselves."""
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
    """Shorten a gradient to norm R, `min(1, R/|g|)`; a shorter one stays (Abadi et al. 2016)."""
    _require_positive(clip_norm)
    return Clip("abadi", lambda n, r: torch.clamp(r / n, max=1.0), clip_norm, mapped=False)


def automatic(gamma: float = 0.01, clip_norm: ClipNorm = 1.0) -> Clip:
    """AUTO-S, `R/(|g| + γ)`: nothing to tune, and small gradients stay distinguishable.

    Reference: Automatic Clipping, eq. (4.1), γ = 0.01; DP-NSGD with r = γ at R = 1.
    """
    _require_positive(clip_norm)
    _require_positive(gamma, "gamma")
    name = f"automatic(gamma={gamma})"
    return Clip(name, lambda n, r: r / (n + gamma), clip_norm, mapped=False)


def normalize(clip_norm: ClipNorm = 1.0) -> Clip:
    """AUTO-V, `R/|g|`: every gradient gets norm R; a zero gradient stays zero."""
    _require_positive(clip_norm)
    return Clip("normalize", lambda n, r: torch.where(n > 0, r / n, 0.0), clip_norm, mapped=False)


def discard(clip_norm: ClipNorm = 1.0) -> Clip:
    """Global clipping, `1[|g| < R]`: keep a gradient as it is or leave it out."""
    _require_positive(clip_norm)
    return Clip("discard", lambda n, r: (n < r).to(n.dtype), clip_norm, mapped=False)


def reparameterized(clip_norm: ClipNorm = 1.0) -> Clip:
    """`min(1/R, 1/|g|)`: Abadi's rule divided by R, so that the bound is 1 and not R.

    With L groups each keeps the bound 1/√L, whatever its R.
    """
    _require_positive(clip_norm)

    def weigh(norms: Tensor, clip_norms: Tensor) -> Tensor:
        share = 1 / math.sqrt(len(clip_norms))
        return torch.minimum(share / clip_norms, share / norms)

    def keeps(clip_norms: list[float]) -> list[float]:
        return [1 / math.sqrt(len(clip_norms))] * len(clip_norms)

    return Clip("reparameterized", weigh, clip_norm, keeps, mapped=False)


def custom(weigh: Callable[[Tensor], Tensor], *, bound: float, name: str = "custom") -> Clip:
    """Any function of one record's group norms, and the bound that it promises to keep.

    The weights are clamped to the bound and nan counts as 0, so a broken promise costs utility
    and never privacy. `hushgrad.testing.check_clip_rule` tells whether the promise holds.
    """
    _require_positive(bound, "bound")
    return Clip(name, lambda norms, _: weigh(norms), bound)


def _require_positive(value: ClipNorm, name: str = "clip_norm") -> None:
    values = [value] if isinstance(value, int | float) else list(value)
    if not values or not all(math.isfinite(v) and v > 0 for v in values):
        raise ValueError(f"expected {name} > 0 and finite, got {value}; 1.0 is a common choice")
