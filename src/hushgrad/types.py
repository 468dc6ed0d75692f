"""The values that pass between the stages; the type of a value names the stage it has reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from dp_accounting import DpEvent
from jaxtyping import Float
from torch import Tensor, nn

Params = Mapping[str, nn.Parameter]
"""The private parameters by name, in a fixed order."""

Batch = Any
"""Any nested structure of tensors whose first dimension counts the records."""

Shape = tuple[int, ...]

Loss = Callable[[Any], Tensor]
"""A function of a batch that returns one loss for each record."""


class Refused(ValueError):
    """Raised before anything is released, when no guarantee could be kept."""


class NotCovered(Refused):
    """Raised where one form of per-sample gradients cannot serve and another might."""


class Relation(Enum):
    """What makes two data sets neighbours: one record added or removed, replaced, or zeroed."""

    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"
    ZERO_OUT = "zero-out"


@runtime_checkable
class PerSample(Protocol):
    """One gradient for each record of a batch, as much of it as clipping and summing need.

    Guarantees: `sq_norms` is never below the square of the norm of what `weighted_sum` adds up
    for that record.
    """

    @property
    def losses(self) -> Float[Tensor, " batch"]:
        """Each record's loss. Private: it must not leave the process without noise."""

    def sq_norms(self) -> dict[str, Float[Tensor, " batch"]]:
        """An upper bound on the squared norm, for each parameter and record, in float64."""

    def weighted_sum(
        self, weights: Mapping[str, Float[Tensor, " batch"]], *, within: float = math.inf
    ) -> dict[str, Tensor]:
        """Sum the records' gradients with these weights; weight 0 means absent, even for nan.

        The result is off by at most `within`, in Euclidean norm over all parameters, whatever the
        records are.
        """

    def __add__(self, other: Any) -> PerSample: ...

    def __rmul__(self, factor: float) -> PerSample: ...


@dataclass(frozen=True)
class EagerWeights:
    """Weights that follow from the norms of one group of parameters alone.

    `group` has the names that share a parameter's group; `weights` takes the squared norms of all
    parameters of a group to the weights that its records will get. A form may sum by them ahead of
    time, and must sum again if other weights are asked for, or a smaller error than `within`.
    """

    group: Mapping[str, tuple[str, ...]]
    weights: Callable[[Mapping[str, Tensor]], Tensor]
    within: float = math.inf

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return len(set(self.group.values()))


@dataclass(frozen=True)
class Bounded:
    """A sum over records in which no record moves more than `l2` in Euclidean norm.

    `l2` is the clipping bound R times (1 + s), with s a constant that covers rounding; `l1` bounds
    the sum of absolute values too, where one is known. A `Bounded` is private: it must not leave
    the process.
    """

    sum: dict[str, Tensor]
    l2: float
    l1: float | None = None

    def sensitivity(self, relation: Relation) -> float:
        """Return how far apart the sums over two neighbouring batches can be.

        >>> Bounded({}, l2=1.0).sensitivity(Relation.REPLACE_ONE)
        2.0
        """
        return 2 * self.l2 if relation is Relation.REPLACE_ONE else self.l2

    def __add__(self, other: Bounded) -> Bounded:
        """Add the sum of another micro-batch, in float64; each record is in one of the two."""
        if (self.l2, self.l1) != (other.l2, other.l1) or self.sum.keys() != other.sum.keys():
            raise ValueError(
                f"expected two sums with one bound and the same parameters, got l2 {self.l2} and "
                f"{other.l2}; clip every micro-batch of a step by the same rule and groups"
            )
        sums = {name: self.sum[name].double() + other.sum[name] for name in self.sum}
        return Bounded(sums, self.l2, self.l1)


@dataclass(frozen=True)
class Released:
    """A sum with its noise: what may reach an optimizer, a log or a file.

    `event` is what made it, for the accountant; `l2` the bound that its noise was scaled by;
    `digest` tells a replay of the same release, which costs nothing, from another one.
    """

    values: dict[str, Tensor]
    event: DpEvent
    l2: float
    digest: bytes
