"""Per-sample gradients of all parameters: the narrow waist that every form fills."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from hushgrad.gradients.factors.choice import settle
from hushgrad.gradients.factors.gram import Rough, share_rows
from hushgrad.gradients.factors.held import LARGEST_FACTOR, LARGEST_PRODUCT, Gradient, measure
from hushgrad.gradients.factors.kinds import Dense, Factor, OneHot, Outer, Rows, Use
from hushgrad.gradients.factors.slots import Slots, in_turn
from hushgrad.gradients.factors.sums import Summation, rows_within
from hushgrad.numerics import Square, exact_products, wide
from hushgrad.types import Params, PerSample, Refused

UseKey = tuple[int, ...]
Factors = Mapping[str, Mapping[UseKey, Use]]
"""For each parameter the factors of its uses, by call site."""
_NONE: Mapping[str, Rough] = {}


@final
class Gradients:
    """Per-sample gradients in factored form, and the losses that they are gradients of.

    Guarantees: `sq_norms` is an upper bound, at most 2 % above its estimate, on the squared norm
    of each record's gradient; a record that is not finite has norm inf.

    Args:
        factors: for each parameter the factors of its uses, by call site.
        params: the parameters by name, for their shapes.
        losses: one for each record.
        slots: where the records stand among the factors' rows; `in_turn(n)` if each is one.
        rough: norms that were computed already, by parameter.

    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> each = Dense(torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    >>> gradients = Gradients({"p": {(0,): each}}, {"p": p}, torch.zeros(2), in_turn(2))
    >>> gradients.weighted_sum({"p": torch.tensor([0.5, 2.0])})["p"].tolist()
    [3.5, 2.0]
    """

    def __init__(
        self,
        factors: Factors,
        params: Params,
        losses: Float[Tensor, " batch"],
        slots: Slots,
        rough: Mapping[str, Rough] = _NONE,
    ) -> None:
        self.factors, self._params, self._rough = factors, params, rough
        self._losses, self._slots = losses, slots
        self.form = ""  # the form that they were taken in, where there is one
        self._versions = _versions(self.held())

    @property
    def losses(self) -> Float[Tensor, " batch"]:
        return self._losses

    @property
    def batch(self) -> int:
        """How many records there are, padding aside."""
        return len(self._losses)

    @cached_property
    def held_gradients(self) -> dict[str, Gradient]:
        """Each parameter's gradient as it is held; a parameter that nothing used is absent."""
        with torch.no_grad(), exact_products(self._losses.device):
            return {
                name: settle(
                    tuple(uses.values()), tuple(self._params[name].shape), self._rough.get(name)
                )
                for name, uses in self.factors.items()
                if uses
            }

    def require_unwritten(self) -> None:
        """Refuse to go on if a factor was written: it may be a view of the caller's batch."""
        if _versions(self.held()) != self._versions:
            raise Refused(
                "the batch, or a tensor made from it, was written after its gradients were taken, "
                "so norms and sums would differ; use the gradients first, or pass a copy"
            )

    @cached_property
    def squares(self) -> dict[str, Square]:
        """Squared norms as estimate and slack."""
        self.require_unwritten()
        _, _, held = self._measurement
        none = Square(self._zeros(), self._zeros())
        return {name: held.get(name, none).each(self._slots.of_records) for name in self._params}

    @cached_property
    def _measurement(self) -> tuple[float, Float[Tensor, "used rows"], dict[str, Square]]:
        """What `measure` returns, and the squares of all rows."""
        if not self.held_gradients:
            return 0.0, self._zeros().expand(0, -1), {}
        with torch.no_grad(), exact_products(self._losses.device), share_rows():
            largest, uppers = measure(self.held_gradients.values())
            return (
                largest,
                uppers,
                {name: each.square for name, each in self.held_gradients.items()},
            )

    def sq_norms(self) -> dict[str, Float[Tensor, " batch"]]:
        self.require_unwritten()
        _, uppers, _ = self._measurement
        norms = dict(zip(self.held_gradients, self._slots.of_records(uppers).unbind(), strict=True))
        if len(norms) == len(self._params):
            return norms
        none = self._slots.of_records(self._zeros())
        return {name: norms.get(name, none) for name in self._params}

    def _zeros(self) -> Float[Tensor, " rows"]:
        return torch.zeros(self._slots.rows, dtype=torch.float64, device=self._losses.device)

    def weighted_sum(
        self, weights: Mapping[str, Float[Tensor, " batch"]], *, within: float = math.inf
    ) -> dict[str, Tensor]:
        self.require_unwritten()
        with torch.no_grad(), exact_products(self._losses.device):
            largest, uppers, _ = self._measurement
            # Padding counts too: a copy has draws of its own.
            # 0 · nan is not 0: where any row is not finite, rows of weight 0 are masked out.
            finite = math.isfinite(largest) or bool(uppers.isfinite().all())
            # Parameters of one group share their weights, which are spread and looked at once.
            shared = {id(w): w for w in weights.values()}
            spread = {key: self._slots.of_rows(w) for key, w in shared.items()}
            fits = {
                key: largest < LARGEST_FACTOR and largest * _most(w) < LARGEST_PRODUCT
                for key, w in shared.items()
            }
            own = {name: spread[id(weights[name])] for name in self.held_gradients}
            extents = {name: gradient.extents for name, gradient in self.held_gradients.items()}
            rows = rows_within(extents, own, within=within)
            sums = {}
            for name, gradient in self.held_gradients.items():
                keep = None if finite else own[name] != 0
                how = Summation(keep, fits[id(weights[name])], rows[name])
                sums[name] = gradient.weighted_sum(own[name], how)
        return {
            name: sums[name] if name in sums else wide(torch.zeros_like(p))
            for name, p in self._params.items()
        }

    def held(self) -> list[Tensor]:
        """The tensors that the factors consist of."""
        return [x for uses in self.factors.values() for f in uses.values() for x in f.parts]

    def _each(self, function: Callable[[Use], Use]) -> Factors:
        self.require_unwritten()
        return {
            name: {key: function(factor) for key, factor in uses.items()}
            for name, uses in self.factors.items()
        }

    def of_records_alone(self) -> Gradients:
        """The same without the rows that count for nothing, in the batch's order."""
        cut = self._each(lambda factor: factor.at(self._slots.places))
        return Gradients(cut, self._params, self._losses, in_turn(self.batch))

    def __add__(self, other: PerSample) -> Gradients:
        """Add gradients of the same records, for instance at another point."""
        one, two = _of_same_records(self, other)
        sides = (one.factors, two.factors)
        joined = {
            name: {
                (side, *key): factor
                for side, factors in enumerate(sides)
                for key, factor in factors[name].items()
            }
            for name in self._params
        }
        return Gradients(joined, self._params, one._losses + two._losses, one._slots)

    def __rmul__(self, factor: float) -> Gradients:
        scaled = self._each(lambda x: x.scaled(factor))
        return Gradients(scaled, self._params, factor * self._losses, self._slots)


def _most(weights: Tensor) -> float:
    """By how much a weight multiplies at most, 1 at least."""
    return max(float(torch.linalg.vector_norm(weights, math.inf)), 1.0) if len(weights) else 1.0


def _versions(tensors: list[Tensor]) -> list[int]:
    return [0 if x.is_inference() else x._version for x in tensors]


def difference(new: PerSample, old: PerSample) -> Gradients:
    """Subtract per-sample gradients at two iterates, without subtracting large numbers.

    Uses are paired by call site: `b'(x)a' - b(x)a = b'(x)(a'-a) + (b'-b)(x)a`. Where the two passes
    do not pair, both gradients are written out and subtracted.

    Args:
        new, old: gradients of the same records and parameters, in any form except `recomputed`.

    Raises:
        Refused: if one of them holds no factors.
        ValueError: if they are of other records or parameters.

    Example:
        >>> from hushgrad.gradients import per_sample
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> loss = lambda x: (x * weight).sum(1).square()
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> old = per_sample(loss, {"weight": weight}, rows)
        >>> weight.data += 0.5
        >>> new = per_sample(loss, {"weight": weight}, rows)
        >>> [round(x, 3) for x in difference(new, old).sq_norms()["weight"].tolist()]
        [1.0, 1.0]

    Reference: the recursive estimators of STORM and DP-SRM need it at every step.
    """
    one, other = _of_same_records(new, old)
    paired = {
        name: _subtract(one, other, name) if pairs is None else pairs
        for name in one.factors
        for pairs in [_pair(one.factors[name], other.factors[name])]
    }
    return Gradients(paired, one._params, one._losses - other._losses, one._slots)


def _pair(new: Mapping[UseKey, Use], old: Mapping[UseKey, Use]) -> dict[UseKey, Use] | None:
    if new.keys() != old.keys():
        return None
    pairs: dict[UseKey, Use] = {}
    for key in new:
        factor = _difference_of_uses(new[key], old[key])
        if factor is None:
            return None
        pairs[key] = factor
    return pairs


def _difference_of_uses(new: Use, old: Use) -> Use | None:
    if not isinstance(new, Rows) and not isinstance(old, Rows):
        return _difference(new, old)
    if not (isinstance(new, Rows) and isinstance(old, Rows)) or new.rows != old.rows:
        return None
    inner = _difference(new.inner, old.inner)
    return None if inner is None else replace(new, inner=inner)


def _difference(new: Factor, old: Factor) -> Factor | None:
    if isinstance(new, Outer) and isinstance(old, Outer) and new.a.shape == old.a.shape:
        # Twice the positions, and no large numbers that cancel: both parts are small.
        a = torch.cat([new.a - old.a, old.a], 1)
        return Outer(a, torch.cat([new.b, new.b - old.b], 1))
    if isinstance(new, OneHot) and isinstance(old, OneHot) and torch.equal(new.index, old.index):
        return OneHot(new.index, new.b - old.b, new.rows)
    if isinstance(new, Dense) and isinstance(old, Dense):
        return Dense(new.values - old.values)
    return None


def _subtract(new: Gradients, old: Gradients, name: str) -> dict[UseKey, Use]:
    shape = new._params[name].shape
    total = torch.zeros((), device=new.losses.device)
    for sign, factors in ((1.0, new.factors[name]), (-1.0, old.factors[name])):
        for factor in factors.values():
            total = total + sign * factor.materialised().reshape(factor.batch, *shape)
    return {(0,): Dense(total)} if total.dim() else {}


def require_factors(gradients: PerSample) -> Gradients:
    """Return the same gradients, typed as those that hold factors.

    Args:
        gradients: per-sample gradients of any form.

    Raises:
        Refused: if they hold no factors, like those of the form `recomputed`, which are summed
            once.

    Example:
        >>> from hushgrad.gradients import per_sample
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> found = per_sample(lambda x: x @ weight, {"weight": weight}, torch.ones(3, 2))
        >>> require_factors(found) is found
        True
    """
    if isinstance(gradients, Gradients):
        return gradients
    raise Refused(
        "expected gradients in factored form, got some that hold no factors, so they cannot be "
        "added, subtracted or split up; use form=traced"
    )


def _of_same_records(first: PerSample, second: PerSample) -> tuple[Gradients, Gradients]:
    """Both in the batch's order, unless their records stand at the same places."""
    one, other = require_factors(first), require_factors(second)
    one.require_unwritten()
    other.require_unwritten()
    if one.batch != other.batch or one._params.keys() != other._params.keys():
        raise ValueError(
            "expected gradients of the same records and parameters, got others; take both from one "
            "batch and the same parameters"
        )
    if one._slots.same_as(other._slots):
        return one, other
    return one.of_records_alone(), other.of_records_alone()
