"""Passes that can be compared: no random draws, and parameters in general position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hushgrad.types import Params


class WithoutRandomness(TorchDispatchMode):
    """Replace every random draw by its mean, so that dropout keeps all and scales nothing.

    A mode at this level also sees draws inside backward passes and recomputed activations, and
    `narrowest` is the least precise type that anything was computed in, wherever autocast began.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrowest = torch.float64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = self._drawn(func, args, kwargs or {})
        if isinstance(result, Tensor) and result.is_floating_point():
            self.narrowest = min(self.narrowest, result.dtype, key=lambda t: t.itemsize)
        return result

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        mean = _MEANS.get(func.overloadpacket)
        if mean is not None:
            return mean(*args, **_without_generator(kwargs))
        # Anything rarer starts from one seed at each call: the same draw for the same shape.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return func(*args, **kwargs)


def _without_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "generator"}


def _like(value: float) -> Callable[..., Tensor]:
    return lambda x, *args, **kwargs: torch.full_like(x, value)


def _of_size(value: float) -> Callable[..., Tensor]:
    return lambda size, *args, **kwargs: torch.full(size, value, **kwargs)


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    scale = 1 / (1 - p) if train and p < 1 else 1.0
    return x * scale, torch.ones_like(x, dtype=torch.bool)


def _rrelu(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Tensor:
    noise.copy_(torch.where(x <= 0, (lower + upper) / 2, 1.0))
    return x * noise


_aten = torch.ops.aten
_MEANS: dict[Any, Callable[..., Any]] = {
    _aten.bernoulli_: lambda x, p=0.5: x.copy_(p) if isinstance(p, Tensor) else x.fill_(p),
    _aten.bernoulli: lambda x, p=None: x.clone() if p is None else torch.full_like(x, p),
    _aten.uniform_: lambda x, low=0.0, high=1.0: x.fill_((low + high) / 2),
    _aten.normal_: lambda x, mean=0.0, std=1.0: x.fill_(mean),
    _aten.exponential_: lambda x, rate=1.0: x.fill_(1 / rate),
    _aten.rand: _of_size(0.5),
    _aten.randn: _of_size(0.0),
    _aten.rand_like: _like(0.5),
    _aten.randn_like: _like(0.0),
    _aten.native_dropout: _dropout,
    _aten.rrelu_with_noise: _rrelu,
}


@contextmanager
def in_general_position(params: Params, by: float = 0.05) -> Iterator[None]:
    """Move every parameter a little for the length of the block, then put its own tensor back.

    At an initialisation with zeros (a last layer, LoRA's second factor) gradients vanish and a
    comparison of them would prove nothing.
    """
    saved = {name: p.data for name, p in params.items()}
    generator = torch.Generator().manual_seed(0)
    try:
        for p in params.values():
            size = float(p.data.float().square().mean().sqrt())
            # Two gates at zero would still hide what lies behind them, were they moved a little.
            scale = by * (size + 0.02) if size > 1e-3 else 2 * by
            shift = torch.randn(p.shape, generator=generator) * scale
            p.data = p.data + shift.to(p.device, p.dtype)
        torch.clear_autocast_cache()  # it holds casts of the parameters as they were
        yield
    finally:
        for name, p in params.items():
            p.data = saved[name]
        torch.clear_autocast_cache()
