"""Where the records are in a tensor, and how to bring them to the front."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hushgrad.types import Shape


class Ambiguous(Exception):
    """More than one dimension could be the batch at this probe size."""


@dataclass(frozen=True)
class Layout:
    """The records lie along `dim`, which counts `batch * share` entries.

    With `share` above 1 a dimension is flattened into the batch, behind the records
    (`records_first`, as `view(B * T, d)` leaves it) or before them (`view(T * B, d)`).
    """

    dim: int
    share: int = 1
    records_first: bool = True

    def split(self, x: Tensor, batch: int) -> Tensor:
        """Return `x` as [batch, ...]: each record's part keeps the rank of `x`."""
        if self.share == 1:
            # The 1 in the place of the records keeps the rank, which rules index from the left.
            front = x.movedim(self.dim, 0) if self.dim else x
            return front.unsqueeze(self.dim + 1)
        # Flattened: the records and what they share are taken apart again, in either order.
        sizes = (batch, self.share) if self.records_first else (self.share, batch)
        at = self.dim if self.records_first else self.dim + 1
        parts: Tensor = x.unflatten(self.dim, sizes)
        return parts.movedim(at, 0)

    def rows(self, x: Tensor, batch: int) -> Tensor:
        """Return `x` as [batch, t, last dimension]."""
        each = self.split(x, batch)
        # Positions of all dimensions between the records and the features count alike.
        return each if each.dim() == 3 else each.flatten(1, -2)

    def fits(self, shape: Shape, batch: int) -> bool:
        return len(shape) > self.dim and shape[self.dim] == self.share * batch

    def without(self, shape: Shape) -> Shape:
        """The shape that one record's part has."""
        return (*shape[: self.dim], self.share, *shape[self.dim + 1 :])

    def __str__(self) -> str:
        if self.share == 1:
            return f"dim {self.dim}"
        order = f"(batch, {self.share})" if self.records_first else f"({self.share}, batch)"
        return f"dim {self.dim} as {order}"


def infer(shape: Shape, batch: int, records_first: bool = True) -> Layout | None:
    """Find the one dimension that counts the records of a probe; none means unbatched.

    Only ever used at probe sizes that are prime, and believed only if a second size agrees.
    """
    # At a prime size no feature dimension is a multiple by accident: `probe_sizes` avoids those.
    found = [dim for dim, size in enumerate(shape) if size and size % batch == 0]
    # Two candidates cannot be told apart here; another pair of sizes may tell.
    if len(found) > 1:
        raise Ambiguous(f"dimensions {found} of a tensor follow the batch")
    if not found:
        return None
    return Layout(found[0], shape[found[0]] // batch, records_first)
