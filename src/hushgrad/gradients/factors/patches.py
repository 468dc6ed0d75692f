"""Per-sample gradients of convolution weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hushgrad.batches.records import MULTIPLE
from hushgrad.gradients.factors.choice import costs
from hushgrad.gradients.factors.kinds import Dense, Factor, Outer


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
        few = _products_are_faster(geometry, positions * columns * batch / x.numel())
        if few and not _is_worth_folding(geometry):
            patches = _patches(x, geometry)
            return Dense(torch.bmm(_as_rows(gradient).mT, patches).reshape(batch, *geometry.weight))
    return Dense(_materialise(x, gradient, geometry))


_VECTOR = 8  # channels that a processor's convolution takes at once
_MOST_COPIES = 10  # of the input, which patches may need


def _products_are_faster(geometry: Geometry, copies: float) -> bool:
    """Is it faster to write patches and multiply them than to convolve?

    Where the channels fill no vector, as three colours do not, a convolution over few of them
    multiplies patches itself, more slowly, one record at a time.
    """
    return geometry.weight[1] % _VECTOR != 0 and copies <= _MOST_COPIES


def _as_rows(gradient: Tensor) -> Tensor:
    return gradient.movedim(2, -1).flatten(1, -2)


def _patches(x: Tensor, geometry: Geometry) -> Tensor:
    """What each position of the output has seen: [batch, positions, columns].

    Copied from views of the input, by rows of positions: several times faster than `F.unfold`.
    """
    spatial = len(geometry.stride)
    pads = [n for pad in reversed(geometry.padding) for n in (pad, pad)]
    seen = F.pad(x, pads) if any(pads) else x
    settings = zip(geometry.weight[2:], geometry.dilation, geometry.stride, strict=True)
    for dim, (size, hole, step) in enumerate(settings, start=3):
        seen = seen.unfold(dim, hole * (size - 1) + 1, step)[..., ::hole]
    places, kernel = range(3, 3 + spatial), range(3 + spatial, 3 + 2 * spatial)
    by_column: Tensor = seen.permute(0, 2, *kernel, 1, *places).flatten(1, 1 + spatial)
    return by_column.flatten(2).mT


_PIECE = 2**22  # bytes of gradients that one call writes: it needs three times as much


def _materialise(x: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    """All per-sample weight gradients, some records at a time, so that little memory is needed."""
    batch, size = len(x), math.prod(geometry.weight) * x.element_size()
    write = _convolve_in_groups
    if _is_worth_folding(geometry):  # the copies of the input may be larger than what is written
        write, copies = _folded, geometry.weight[-1] / geometry.stride[-1]
        size = max(size, int(2 * copies * x[0].nbytes))
    some = max(_PIECE // size // MULTIPLE, 1) * MULTIPLE
    if batch <= some:
        return write(x, gradient, geometry)
    written = x.new_empty(batch, *geometry.weight)
    for start in range(0, batch, some):
        piece = slice(start, start + some)
        written[piece] = write(x[piece], gradient[piece], geometry)
    return written


def _convolve_in_groups(x: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    """One grouped convolution, with the samples as groups.

    That costs what the ordinary weight gradient costs; patches and products cost eight times it.
    """
    batch = x.shape[0]
    # The rows that a record shares are the grouped convolution's batch, which it adds up.
    rows, out = (z.transpose(0, 1).flatten(1, 2) for z in (x, gradient))
    shape = (batch * geometry.weight[0], *geometry.weight[1:])
    _, weights, _ = torch.ops.aten.convolution_backward(
        out.contiguous(),
        rows.contiguous(),
        x.new_empty(shape),  # never read; one that is not contiguous would be copied
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


# --- few channels: a row of the kernel as channels -----------------------------------------------

_LANES = 16  # channels, in and out, of which a grouped convolution wants a multiple
_MOST_IDLE = 1.2  # multiplications, zeros among them, for one that counts


def _is_worth_folding(geometry: Geometry) -> bool:
    """Are the channels few, but full vectors once a row of the kernel is channels too?"""
    if len(geometry.stride) != 2 or geometry.groups > 1 or any(d != 1 for d in geometry.dilation):
        return False
    channels, rows = _after_folding(geometry)
    return (
        geometry.weight[1] % _VECTOR != 0
        and geometry.weight[0] % _LANES == 0
        and channels * rows <= _MOST_IDLE * math.prod(geometry.weight[1:])
    )


def _after_folding(geometry: Geometry) -> tuple[int, int]:
    """Channels, zeros among them, and the rows of the kernel that remain."""
    _, channels, height, width = geometry.weight
    step = geometry.stride[0]
    folded = channels * step * width
    return -(-folded // _LANES) * _LANES, -(-height // step)


def _folded(x: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    """The same convolution over more channels: those of a whole row of the kernel.

    Rows that a stride steps over together are channels as well, so that 8x8 over one channel in
    steps of 2 is 4x1 over 16 channels in steps of 1. Only entries change places, none is computed.
    """
    out, channels, height, width = geometry.weight
    (step, across), (high, wide) = geometry.stride, geometry.padding
    lanes, rows = _after_folding(geometry)
    used = (gradient.shape[-2] - 1 + rows) * step
    below = max(used - x.shape[-2] - high, 0)
    seen = F.pad(x, (wide, wide, high, below))[..., :used, :].unfold(-1, width, across)
    apart = seen[..., : gradient.shape[-1], :].unflatten(3, (-1, step)).permute(0, 1, 2, 4, 6, 3, 5)
    folded = apart.flatten(2, 4)
    if lanes > folded.shape[2]:
        folded = F.pad(folded, (0, 0, 0, 0, 0, lanes - folded.shape[2]))
    plain = Geometry((out, lanes, rows, 1), (1, 1), (0, 0), (1, 1), 1)
    weights = _convolve_in_groups(folded, gradient, plain)[:, :, : channels * step * width, :, 0]
    back = weights.unflatten(2, (channels, step, width)).permute(0, 1, 2, 5, 3, 4)
    whole: Tensor = back.flatten(3, 4)[..., :height, :].contiguous()
    return whole
