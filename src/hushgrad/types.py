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
"""A tensor's shape."""

Loss = Callable[[Any], Tensor]
"""A function of a batch that returns one loss for each record."""


class Refused(ValueError):
    """Raised before anything is released, where hushgrad could not keep a guarantee.

    Guarantees: nothing was released by the call that raises it. The message says what was
    expected, what came instead, and how to mend it.

    Example:
        >>> from hushgrad.sampling import Shuffled, require_relation
        >>> try:
        ...     require_relation(Shuffled(64), Relation.ADD_REMOVE)
        ... except Refused as refusal:
        ...     print(str(refusal).split(";")[0])
        expected replace-one or zero-out with shuffled epochs in batches of 64, no amplification, \
got add-remove
    """


class NotCovered(Refused):
    """Raised by one form of per-sample gradients where another form might work."""


class Relation(Enum):
    """What makes two data sets neighbours: the adjacency that a guarantee is stated for.

    - `ADD_REMOVE`: one record more or less.
    - `REPLACE_ONE`: one record has other contents. Sums move twice as far as under add/remove.
    - `ZERO_OUT`: one record is blanked and contributes nothing.

    Example:
        >>> Relation("replace-one")
        <Relation.REPLACE_ONE: 'replace-one'>

    Reference: Ponomareva et al. 2023, How to DP-fy ML, on the neighbouring relation.
    """

    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"
    ZERO_OUT = "zero-out"


@runtime_checkable
class PerSample(Protocol):
    """One gradient for each record of a batch, in the two views that clipping needs: norms, sums.

    Guarantees: `sq_norms` is never below the squared norm of what `weighted_sum` adds for that
    record.
    """

    @property
    def losses(self) -> Float[Tensor, " batch"]:
        """Each record's loss. Private: it must not leave the process without noise."""

    def sq_norms(self) -> dict[str, Float[Tensor, " batch"]]:
        """An upper bound on the squared norm, for each parameter and record, in float64."""

    def weighted_sum(
        self, weights: Mapping[str, Float[Tensor, " batch"]], *, within: float = math.inf
    ) -> dict[str, Tensor]:
        """Sum the records' gradients with these weights; weight 0 leaves out a record, NaN or not.

        Guarantees: the rounding error is at most `within`, in Euclidean norm over all parameters,
        for every possible batch.
        """

    def __add__(self, other: Any) -> PerSample: ...

    def __rmul__(self, factor: float) -> PerSample: ...


@dataclass(frozen=True)
class EagerWeights:
    """Clipping weights that depend on the norms of one group of parameters only.

    A form may use them to compute the weighted sum early, during the backward pass. It must
    compute the sum again if the caller then asks for other weights, or for a smaller error than
    `within`.

    Args:
        group: for each parameter, the names of all parameters in its group.
        weights: maps the squared norms of a group's parameters to the records' weights.
        within: the error that the early sum may have.
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
    """A sum over records, and a bound on how far one record can move it.

    Guarantees: adding or removing any one record changes `sum` by at most `l2` in Euclidean norm.
    A `Bounded` is private: it must not leave the process before noise is added.

    Args:
        sum: the summed tensors, by parameter name.
        l2: the clipping bound R times 1 + s, where the constant s covers rounding
            (docs/rounding.md).
        l1: a bound on the sum of absolute values, where one is known; Laplace noise needs it.

    Example:
        >>> import torch
        >>> part = Bounded({"w": torch.ones(2)}, l2=1.0)
        >>> (part + part).sum["w"]
        tensor([2., 2.], dtype=torch.float64)
    """

    sum: dict[str, Tensor]
    l2: float
    l1: float | None = None

    def sensitivity(self, relation: Relation) -> float:
        """Return the largest distance between the sums over two neighbouring batches.

        >>> Bounded({}, l2=1.0).sensitivity(Relation.REPLACE_ONE)
        2.0
        """
        return 2 * self.l2 if relation is Relation.REPLACE_ONE else self.l2

    def __add__(self, other: Bounded) -> Bounded:
        """Add the sum of another micro-batch, in float64; no record may be in both."""
        if (self.l2, self.l1) != (other.l2, other.l1) or self.sum.keys() != other.sum.keys():
            raise ValueError(
                f"expected two sums with one bound and the same parameters, got l2 {self.l2} and "
                f"{other.l2}; clip every micro-batch of a step by the same rule and groups"
            )
        sums = {name: self.sum[name].double() + other.sum[name] for name in self.sum}
        return Bounded(sums, self.l2, self.l1)


@dataclass(frozen=True)
class Released:
    """A noisy sum: public, so it may reach an optimizer, a log or a file.

    Args:
        values: the noisy tensors, by parameter name.
        event: what the accountant charges for it.
        l2: the bound that the noise was scaled by.
        digest: identifies the release. A replay has the same digest and costs nothing.
    """

    values: dict[str, Tensor]
    event: DpEvent
    l2: float
    digest: bytes
