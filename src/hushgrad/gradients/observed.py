"""Values of records beside their gradients, such as whether a prediction was right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hushgrad.batches import records
from hushgrad.gradients.certification.deterministic import WithoutRandomness
from hushgrad.gradients.constants import unwrap_constants
from hushgrad.gradients.guards import guard_pass, restored
from hushgrad.gradients.probes import beside_others, replaced_places
from hushgrad.numerics import same_bits
from hushgrad.types import Batch, Refused

RecordValues = Callable[[Batch], Tensor]
"""A function of a batch that returns one value for each record."""

_MULTIPLE = 32  # rows that a batch is filled up to, so that a record keeps its bits


def observe(
    values: RecordValues, batch: Batch, *, modules: Sequence[nn.Module] = (), test: bool
) -> Float[Tensor, " batch"]:
    """Take each record's value, without gradients and without a trace in the modules.

    Random numbers are drawn from torch's generator, which moves on: no two records may share them.

    Args:
        values: `values(batch)` returns one value for each record.
        batch: nested tensors whose first dimension counts the records.
        modules: the modules that it runs; their buffers are put back.
        test: replace every second record, and require that the others' values keep their bits. A
            value that depends on other records has no bound on what one of them moves.

    Returns:
        The values in float64, one for each record.

    Raises:
        Refused: if a value depends on other records, or the shape is another.

    >>> observe(lambda x: x.square().sum(1), torch.tensor([[3.0, 4.0]]), test=True).tolist()
    [25.0]
    """
    size = records.count(batch)
    if size == 0:
        return torch.zeros(0, dtype=torch.float64)
    batch, _ = unwrap_constants(batch)
    # A record must keep its bits in batches of any size, also where nothing is clipped.
    padded = records.padded_size(size, _MULTIPLE)
    whole = records.pad(batch, size, padded)
    with torch.no_grad(), guard_pass({}, modules):
        if test:
            _check_independence(values, whole, modules)
        with restored({}, modules):
            return _call_values(values, whole, padded)[:size]


def _check_independence(values: RecordValues, batch: Batch, modules: Sequence[nn.Module]) -> None:
    size = records.count(batch)
    places = replaced_places(size)

    def kept(batch: Batch) -> Tensor:
        with WithoutRandomness() as neutral, restored({}, modules):
            return _call_values(neutral.choosing_draws(values), batch, size)[~places]

    expected, found = kept(batch), [kept(beside_others(batch, places, loud=False))]
    # Loud records show a coupling that a yes or no would hide; a function may refuse them.
    with suppress(Exception):
        found.append(kept(beside_others(batch, places, loud=True)))
    if not all(same_bits(expected, other) for other in found):
        raise Refused(
            "expected a watched value that depends on its own record alone, got one that changes "
            "with the other records of the batch; compute each record's value by itself"
        )


def _call_values(values: RecordValues, batch: Batch, size: int) -> Tensor:
    found = values(batch)
    if not isinstance(found, Tensor) or found.shape != (size,):
        # Not by its shape, which would tell the size of the batch.
        came = "a tensor of another shape" if isinstance(found, Tensor) else type(found).__name__
        raise Refused(
            f"expected one value for each record of the batch, got {came}; return a tensor like "
            "model(x).argmax(1) == y"
        )
    return found.detach().double()
