"""Per-sample gradients of convolution weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hushgrad.persample.factors import Dense, Factor, Outer
from hushgrad.persample.settled import costs


@dataclass(frozen=True)
class Geometry:
    """A convolution's settings, one entry for each spatial dimension."""

    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def geometry(
    weight: Tensor, stride: object, padding: object, dilation: object, groups: int
) -> tuple[Geometry, list[int]]:
    """Return the geometry, and the padding to apply to the input beforehand (as `F.pad` wants it).

    `padding="same"` may be uneven, which a convolution cannot express by itself.
    """
    spatial = weight.dim() - 2
    steps, holes = each(stride, spatial), each(dilation, spatial)
    before: list[int] = []
    if padding == "same":
        for size, hole in zip(reversed(weight.shape[2:]), reversed(holes), strict=True):
            total = hole * (size - 1)
            before += [total // 2, total - total // 2]
    pads = (0,) * spatial if isinstance(padding, str) else each(padding, spatial)
    return Geometry(tuple(weight.shape), steps, pads, holes, groups), before


def each(value: object, spatial: int) -> tuple[int, ...]:
    """A setting, one entry for each spatial dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)  # type: ignore[arg-type]
    return values * spatial if len(values) == 1 else values


def convolution_factor(
    x: Float[Tensor, "batch share channels *space"],
    gradient: Float[Tensor, "batch share out *space_out"],
    geometry: Geometry,
) -> Factor:
    """The factor of a convolution's weight: patches where few positions meet many channels."""
    batch, share, out = gradient.shape[:3]
    positions = share * math.prod(gradient.shape[3:])
    columns = math.prod(geometry.weight[1:])
    if geometry.groups == 1 and len(geometry.stride) <= 2:
        # Only shapes matter for the cost, and an expanded scalar has them for nothing.
        sketch = Outer(x.new_empty(1).expand(batch, positions, columns), _as_rows(gradient))
        cost = costs((sketch,), (out, columns))
        patches_fit = batch * positions * columns <= 4 * x.numel()
        # To cut out the patches costs about as much again as the products of their rows.
        if 2 * cost["Gram"][0] < cost["materialised"][0] and patches_fit:
            return Outer(_patches(x, geometry), _as_rows(gradient))
    return Dense(_materialise(x, gradient, geometry))


def _as_rows(gradient: Tensor) -> Tensor:
    return gradient.movedim(2, -1).flatten(1, -2)


def _patches(x: Tensor, geometry: Geometry) -> Tensor:
    batch = x.shape[0]
    flat = x.flatten(0, 1)
    lift = len(geometry.stride) == 1  # unfold knows two dimensions only
    image = flat.unsqueeze(2) if lift else flat
    settings = [
        (one, *values) if lift else values
        for one, values in (
            (1, geometry.weight[2:]),
            (1, geometry.dilation),
            (0, geometry.padding),
            (1, geometry.stride),
        )
    ]
    kernel, dilation, padding, stride = settings
    columns: Tensor = F.unfold(image, kernel, dilation, padding, stride)
    patches: Tensor = columns.mT.unflatten(0, (batch, -1)).flatten(1, 2)
    return patches


def _materialise(x: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    """All per-sample weight gradients by one grouped convolution, with the samples as groups.

    That costs what the ordinary weight gradient costs; patches and products cost eight times it.
    """
    batch = x.shape[0]
    # The rows that a record shares are the grouped convolution's batch, which it adds up.
    rows, out = (z.transpose(0, 1).flatten(1, 2) for z in (x, gradient))
    shape = (batch * geometry.weight[0], *geometry.weight[1:])
    _, weights, _ = torch.ops.aten.convolution_backward(
        out.contiguous(),
        rows.contiguous(),
        x.new_empty(()).expand(shape),
        None,
        list(geometry.stride),
        list(geometry.padding),
        list(geometry.dilation),
        False,
        [0] * len(geometry.stride),
        batch * geometry.groups,
        [False, True, False],
    )
    each: Tensor = weights.reshape(batch, *geometry.weight)
    return each
