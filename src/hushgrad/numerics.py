"""Arithmetic that a bound can rest on: exact matrix products, and norms rounded upwards.

Privacy arithmetic has its own precision, whatever the model's: float32 or wider for factors and
sums, float64 for squares, no autocast, no TF32, no bfloat16 products inside float32 ones.
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
"""A squared norm's upper bound is at most this much above its estimate."""

_CHUNK = 256  # columns added in float32 before the sum goes on in float64


class Square(NamedTuple):
    """Squared norms, each within `slack` of its `estimate`."""

    estimate: Float[Tensor, " batch"]
    slack: Float[Tensor, " batch"]

    @property
    def upper(self) -> Float[Tensor, " batch"]:
        """The certified upper bound; inf where nothing finite can be said."""
        return torch.nan_to_num(self.estimate + self.slack, nan=torch.inf, posinf=torch.inf)

    def each(self, function: Callable[[Tensor], Tensor]) -> Square:
        """Both parts, put through a function."""
        return Square(function(self.estimate), function(self.slack))

    @property
    def loose(self) -> Bool[Tensor, " batch"]:
        """True where the slack is too large to be useful, or nothing finite is known."""
        # Infinite ones leave nan, which compares as false.
        return ~(RELATIVE_SLACK * self.estimate - self.slack >= 0)


def wide(x: Tensor) -> Tensor:
    """Return `x` in float32, or in float64 if it is that already."""
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
    """Squared norms of materialised vectors: no cancellation, only rounding and underflow.

    Runs of 256 entries are reduced in the vector's own type, the runs in float64; a float32
    reduction of 38 million entries in one go was seen to come out 0.27 % low.
    """
    return nothing_lost_at_zero(raw_square_norms(x), x)


def raw_square_norms(x: Float[Tensor, batch * shape]) -> Square:
    """Squared norms without a look at any value, as a compiled program needs them."""
    flat = x if x.dim() == 2 else x.reshape(x.shape[0], -1)
    count = flat.shape[1]
    body = count - count % _CHUNK
    if not body:
        estimate = _square_norm(flat)
    else:
        estimate = _square_norm(flat[:, :body].unflatten(1, (-1, _CHUNK))).sum(1)
        estimate = estimate if body == count else estimate.add_(_square_norm(flat[:, body:]))
    # Rounding of a run, and at most the smallest normal number for each square that underflows.
    slack = (min(_CHUNK, count) + 8) * rounding(x.dtype) * estimate
    return Square(estimate, slack.add_(count * smallest_normal(x.dtype)))


def nothing_lost_at_zero(square: Square, x: Float[Tensor, batch * shape]) -> Square:
    """A vector that is zero exactly has no slack."""
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
    """All inner products of the rows of `x` and `y`: `chunk` columns at a time, then float64."""
    total = None
    for start in range(0, x.shape[-1], chunk):
        part = torch.bmm(x[..., start : start + chunk], y[..., start : start + chunk].mT)
        total = part.double() if total is None else total.add_(part)
    if total is None:
        return x.new_zeros(x.shape[0], x.shape[1], y.shape[1], dtype=torch.float64)
    return total


_FEW = 2**20  # multiplications that are over before oneDNN has begun
_LARGE = 2**14  # entries of a weight


def product(
    x: Float[Tensor, "rows n"], y: Float[Tensor, "n columns"]
) -> Float[Tensor, "rows columns"]:
    """The matrix product, by oneDNN where torch has it and it is worth the call.

    On processors that are not Intel's, MKL leaves half of the vector unit idle and oneDNN does not.
    """
    worth_it = x.numel() * y.shape[1] >= _FEW and y.shape[1] >= 32
    found = _by_onednn(x, y.mT, None) if worth_it else None
    return x @ y if found is None else found


def linear_product(
    x: Float[Tensor, "*rows n"],
    w: Float[Tensor, "columns n"],
    bias: Float[Tensor, " columns"] | None = None,
) -> Float[Tensor, "*rows columns"]:
    """`F.linear`, by oneDNN where `is_for_onednn`."""
    found = _by_onednn(x, w, bias) if is_for_onednn(w) else None
    return F.linear(x, w, bias) if found is None else found


def is_for_onednn(w: Float[Tensor, "columns n"]) -> bool:
    """Is it worth the call to multiply rows by this weight?

    A row keeps its bits whatever the number of rows, so they have no say in it.
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
    """Has it no gaps? Through gaps oneDNN goes by a slow reference: 2000 times as long was seen.

    Those of the other operand do not matter: it is copied.
    """
    return w.is_contiguous() or w.mT.is_contiguous()


@functools.cache
def _onednn_linear() -> Any:
    """torch's own operation for `x @ w.T` by oneDNN, if this torch has one that does that.

    It is not public: torch calls it from the programs that it compiles.
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
