"""Arithmetic with error bounds: full-precision matrix products, and upper bounds on norms.

Privacy arithmetic has its own precision, independent of the model's: float32 or wider for factors
and sums, float64 for squares, no autocast, no TF32, no bfloat16 products inside float32 ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

RELATIVE_SLACK = 0.02
"""The upper bound on a squared norm is at most this much above its estimate, relative to it."""

_CHUNK = 256  # float32 sums of this many columns are then added in float64


class Square(NamedTuple):
    """Estimates of squared norms; the true value is within `slack` of `estimate`."""

    estimate: Float[Tensor, " batch"]
    slack: Float[Tensor, " batch"]

    @property
    def upper(self) -> Float[Tensor, " batch"]:
        """The certified upper bound; inf where estimate or slack is NaN or infinite."""
        return torch.nan_to_num(self.estimate + self.slack, nan=torch.inf, posinf=torch.inf)

    def each(self, function: Callable[[Tensor], Tensor]) -> Square:
        """Apply a function to the estimate and to the slack."""
        return Square(function(self.estimate), function(self.slack))

    @property
    def loose(self) -> Bool[Tensor, " batch"]:
        """True where the slack is too large to be useful, or the bound is not finite."""
        # inf - inf is NaN, which compares as false, so that infinite estimates are loose.
        return ~(RELATIVE_SLACK * self.estimate - self.slack >= 0)


def wide(x: Tensor) -> Tensor:
    """Return `x` in float32, or unchanged if it is float32 or float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@functools.cache
def rounding(dtype: torch.dtype) -> float:
    """The unit roundoff u of a wide floating-point type."""
    return torch.finfo(dtype).eps / 2


@functools.cache
def smallest_normal(dtype: torch.dtype) -> float:
    """The smallest normal number of a floating-point type."""
    return torch.finfo(dtype).tiny


# Every switch that can lower the precision of a float32 product or convolution.
_backends: Any = torch.backends
_ON_PROCESSORS: tuple[Any, ...] = (_backends.mkldnn.matmul, _backends.mkldnn.conv)
_ANYWHERE = (*_ON_PROCESSORS, _backends.cuda.matmul, _backends.cudnn.conv)


_EXACT = ("ieee", "none")


class exact_products:  # noqa: N801 (used as a function; a generator would take twice the time)
    """Run matrix products and convolutions at the full precision of their operands.

    Autocast is off and every switch that lets float32 products run in TF32 or bfloat16 is set to
    IEEE; all are restored on the way out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.type

    def __enter__(self) -> None:
        switches = _ON_PROCESSORS if self._device == "cpu" else _ANYWHERE
        settings = [(switch, switch.fp32_precision) for switch in switches]
        self._lowered = [(switch, before) for switch, before in settings if before not in _EXACT]
        for switch, _ in self._lowered:
            switch.fp32_precision = "ieee"
        cast = torch.is_autocast_enabled(self._device)
        self._cast = torch.autocast(self._device, enabled=False) if cast else None
        if self._cast is not None:
            self._cast.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._cast is not None:
            self._cast.__exit__(*error)
        for switch, before in self._lowered:
            switch.fp32_precision = before


def square_norms(x: Float[Tensor, batch * shape]) -> Square:
    """Return the squared norms of materialised vectors.

    There is no cancellation, so only rounding and underflow count. Chunks of 256 entries are
    reduced in the vector's own type, and the chunks are added in float64: a single float32
    reduction of 38 million entries was measured to be 0.27 % too low.
    """
    return without_slack_at_zero(raw_square_norms(x), x)


def raw_square_norms(x: Float[Tensor, batch * shape]) -> Square:
    """Return squared norms without branching on values, as a compiled program needs it."""
    flat = x if x.dim() == 2 else x.reshape(x.shape[0], -1)
    count = flat.shape[1]
    body = count - count % _CHUNK
    if not body:
        estimate = _square_norm(flat)
    else:
        estimate = _square_norm(flat[:, :body].unflatten(1, (-1, _CHUNK))).sum(1)
        estimate = estimate if body == count else estimate.add_(_square_norm(flat[:, body:]))
    # Rounding within a chunk, plus at most the smallest normal number per square that underflows.
    slack = (min(_CHUNK, count) + 8) * rounding(x.dtype) * estimate
    return Square(estimate, slack.add_(count * smallest_normal(x.dtype)))


def without_slack_at_zero(square: Square, x: Float[Tensor, batch * shape]) -> Square:
    """Set the slack to 0 for vectors that are exactly zero."""
    estimate, slack = square
    if bool(estimate.all()):
        return square
    none = (estimate == 0).nonzero().flatten()
    zero = (x[none].reshape(len(none), -1) == 0).all(1)
    return Square(estimate, slack.index_fill(0, none[zero], 0))


def _square_norm(runs: Tensor) -> Tensor:
    squares: Tensor = torch.linalg.vector_norm(runs, dim=-1).double().square_()
    return squares


def inner_products(
    x: Float[Tensor, "batch s d"], y: Float[Tensor, "batch t d"], chunk: int
) -> Float[Tensor, "batch s t"]:
    """Return all inner products of rows of `x` and `y`, adding chunks of columns in float64."""
    total = None
    for start in range(0, x.shape[-1], chunk):
        part = torch.bmm(x[..., start : start + chunk], y[..., start : start + chunk].mT)
        total = part.double() if total is None else total.add_(part)
    if total is None:
        return x.new_zeros(x.shape[0], x.shape[1], y.shape[1], dtype=torch.float64)
    return total


_FEW = 2**20  # multiplications; with fewer, the overhead of a call of oneDNN dominates
_LARGE = 2**14  # entries of a weight, likewise


def product(
    x: Float[Tensor, "rows n"], y: Float[Tensor, "n columns"]
) -> Float[Tensor, "rows columns"]:
    """Return the matrix product, by oneDNN where torch has it and the product is large enough.

    MKL uses only half of the vector unit on processors that are not Intel's; oneDNN uses all of it.
    """
    worth_it = x.numel() * y.shape[1] >= _FEW and y.shape[1] >= 32
    found = _by_onednn(x, y.mT, None) if worth_it else None
    return x @ y if found is None else found


def linear_product(
    x: Float[Tensor, "*rows n"],
    w: Float[Tensor, "columns n"],
    bias: Float[Tensor, " columns"] | None = None,
) -> Float[Tensor, "*rows columns"]:
    """Return `F.linear(x, w, bias)`, by oneDNN if `is_for_onednn(w)`."""
    found = _by_onednn(x, w, bias) if is_for_onednn(w) else None
    return F.linear(x, w, bias) if found is None else found


def is_for_onednn(w: Float[Tensor, "columns n"]) -> bool:
    """Return whether products with this weight are large enough for oneDNN.

    The answer must not depend on the number of rows: then a record's result would change with the
    size of its batch.
    """
    return w.dim() == 2 and w.numel() >= _LARGE and min(w.shape) >= 32 and _is_single(w)


def _by_onednn(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor | None:
    operands = (x, w) if bias is None else (x, w, bias)
    operation = _onednn_linear() if all(_is_single(y) for y in operands) and _packed(w) else None
    if operation is None:
        return None
    found: Tensor = operation(x, w, bias, "none", [], "")
    return found


def _is_single(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32


def _packed(w: Tensor) -> bool:
    """Return whether a weight has no gaps in memory.

    With gaps oneDNN falls back to a reference kernel, measured to be 2000 times as slow. Gaps in
    the other operand do not matter, because oneDNN copies it.
    """
    return w.is_contiguous() or w.mT.is_contiguous()


@functools.cache
def _onednn_linear() -> Any:
    """Return torch's operation for `x @ w.T` by oneDNN, or None if this torch has none.

    It is a private operation, which torch calls from compiled programs, so it is tested here
    before it is used.
    """
    try:
        linear = torch.ops.mkldnn._linear_pointwise
        x, w = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
        same = torch.equal(linear(x, w, None, "none", [], ""), x @ w.mT)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return linear if same else None


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Are two tensors equal, nan included?"""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if torch.equal(x, y):
        return True
    if not (x.is_floating_point() or x.is_complex()):
        return False
    return bool(((x == y) | (x.isnan() & y.isnan())).all())
