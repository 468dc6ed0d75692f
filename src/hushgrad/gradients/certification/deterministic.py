"""Passes that can be compared: no random draws, and parameters perturbed at random."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hushgrad.gradients.certification.generators import GlobalGenerators
from hushgrad.types import Batch, Loss, Params


@dataclass(frozen=True)
class Seed:
    """Random draws that are drawn at random, each by itself from a fixed seed."""

    number: int


RandomDraws = float | Seed
"""What random draws come out as: all at one quantile, or as a seed says."""

MEDIAN = 0.5


class WithoutRandomness(TorchDispatchMode):
    """Replace every random draw by what `draws` says: by its median, dropout keeps all.

    A mode at this level also sees draws inside backward passes and recomputed activations. Python's
    and NumPy's generators it sees in the losses that are called by `choosing_draws`.
    `narrowest` is the least precise type that anything was computed in, wherever autocast began;
    `drew` tells whether there was a draw at all; `program` is a digest of the operations that ran.
    """

    def __init__(self, draws: RandomDraws = MEDIAN) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self.narrowest, self.drew, self.program = torch.float64, False, 0
        self._number = 0  # of the draw

    def choosing_draws(self, loss: Loss) -> Loss:
        """The loss, with Python's and NumPy's draws chosen for each call, all calls alike.

        Not for longer than a call: others draw from these generators, too.
        """

        def call(batch: Batch) -> Any:
            self._number, others = 0, GlobalGenerators()
            if isinstance(self._draws, Seed):
                others.start(None, self._draws.number)
            else:
                others.start(self._draws, 0)
            try:
                return loss(batch)
            finally:
                self.drew |= others.moved()
                others.restore()

        return call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Another operation beside other records is a coupling, even if all values agree.
        self.program = hash((self.program, func))
        result = self._run_or_draw(func, args, kwargs or {})
        if isinstance(result, Tensor) and result.is_floating_point():
            self.narrowest = min(self.narrowest, result.dtype, key=lambda t: t.itemsize)
        return result

    def _run_or_draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        own = kwargs.pop("generator", None)
        self._number += 1
        draw = self._table().get(func.overloadpacket)
        if draw is not None:
            self.drew = True
            found = draw(*args, **kwargs)
            if not isinstance(self._draws, Seed) or _is_single(found) or func in _BY_VALUE:
                return found
        if own is not None:  # the caller's stays where it is
            kwargs["generator"] = torch.Generator(own.device).manual_seed(self._seed())
        with torch.random.fork_rng(devices=[]):
            before = _seeded(self._seed()) if own is None else None
            result = func(*args, **kwargs)
            # Fused attention, for one, draws nothing where it has no dropout.
            self.drew |= before is None or not torch.equal(before, torch.get_rng_state())
            return result

    def _seed(self) -> int:
        """At a quantile, what has none starts from one seed: the same draw for the same shape."""
        return self._draws.number * 2**20 + self._number if isinstance(self._draws, Seed) else 0

    def _table(self) -> dict[Any, Callable[..., Any]]:
        """What draws come out as; a single number, where they are random, as one of all strata."""
        if not isinstance(self._draws, Seed):
            return _draws_at(self._draws)
        return _draws_at((int(_order(self._number)[self._draws.number % STRATA]) + 0.5) / STRATA)


STRATA = 24
"""So many seeds in turn meet every share of this size of what one number can be drawn as."""


@functools.lru_cache(maxsize=256)
def _order(number: int) -> NDArray[np.int64]:
    """In which order seeds meet the strata in one of a pass's draws."""
    return np.random.default_rng(number).permutation(STRATA)


# Its kernel draws for negative entries only, so that which draws a record gets depends on others;
# they are as random as before, and couple nothing.
_BY_VALUE = {torch.ops.aten.rrelu_with_noise.default}


def _is_single(drawn: Any) -> bool:
    return isinstance(drawn, Tensor) and drawn.numel() == 1


def _seeded(seed: int) -> Tensor | None:
    """Seed all generators; returns the processor's state where it has the only one."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
        return None
    # `torch.manual_seed` also leaves a note for devices to come, which takes milliseconds.
    torch.default_generator.manual_seed(seed)
    return torch.get_rng_state()


@functools.cache
def _draws_at(q: float) -> dict[Any, Callable[..., Any]]:
    """What each random operation returns at the quantile `q`; yes or no is its mean at the median.

    A branch taken with some probability, as by `rand() < 0.3`, shows at one quantile or another.
    """
    aten, z = torch.ops.aten, NormalDist().inv_cdf(q)

    def chance(p: Any) -> Any:
        return p if q == 0.5 else (p > q) * 1.0

    def whole(*bounds: int) -> int:
        low, high = bounds if len(bounds) == 2 else (0, *bounds) if bounds else (0, 2**24)
        return int(low + q * (high - low))

    def below(dtype: torch.dtype) -> float:
        """A draw from 0 to 1 is below 1 also where the quantile would be rounded to it."""
        return min(q, 1 - torch.finfo(dtype).eps / 2)

    def rand(size: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        dtype = dtype or torch.get_default_dtype()
        return torch.full(size, below(dtype), dtype=dtype, **kwargs)

    def rand_like(x: Tensor, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return torch.full_like(x, below(dtype or x.dtype), dtype=dtype, **kwargs)

    def bernoulli_(x: Tensor, p: Any = 0.5) -> Tensor:
        return x.copy_(chance(p)) if isinstance(p, Tensor) else x.fill_(chance(p))

    def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        kept = 1.0 if q == 0.5 or not train else chance(1 - p)
        scale = kept / (1 - p) if train and p < 1 else kept
        return x * scale, torch.full_like(x, bool(kept), dtype=torch.bool)

    def rrelu(
        x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
    ) -> Tensor:
        noise.copy_(torch.where(x <= 0, lower + q * (upper - lower), 1.0))
        return x * noise

    return {
        aten.bernoulli_: bernoulli_,
        aten.bernoulli: lambda x, p=None: bernoulli_(torch.empty_like(x), x if p is None else p),
        aten.uniform_: lambda x, low=0.0, high=1.0: x.fill_(low + below(x.dtype) * (high - low)),
        aten.normal_: lambda x, mean=0.0, std=1.0: x.fill_(mean + z * std),
        aten.exponential_: lambda x, rate=1.0: x.fill_(-math.log1p(-q) / rate),
        aten.random_: lambda x, *bounds: x.fill_(whole(*bounds)),
        aten.rand: rand,
        aten.randn: lambda size, **kwargs: torch.full(size, z, **kwargs),
        aten.randint: lambda *args, **kwargs: torch.full(args[-1], whole(*args[:-1]), **kwargs),
        aten.rand_like: rand_like,
        aten.randn_like: lambda x, **kwargs: torch.full_like(x, z, **kwargs),
        aten.randint_like: lambda x, *bounds, **kw: torch.full_like(x, whole(*bounds), **kw),
        aten.native_dropout: native_dropout,
        aten.rrelu_with_noise: rrelu,
    }


@contextmanager
def perturb_randomly(params: Params, by: float = 0.05, *, seed: int = 0) -> Iterator[None]:
    """Move every parameter a little for the length of the block, then put its own tensor back.

    At an initialisation with zeros (a last layer, LoRA's second factor) gradients vanish and a
    comparison of them would prove nothing.
    """
    saved = {name: p.data for name, p in params.items()}
    chance = np.random.default_rng(seed)
    try:
        for p in params.values():
            size = float(p.data.float().square().mean().sqrt())
            # Two gates at zero would still hide what lies behind them, were they moved a little.
            scale = by * (size + 0.02) if size > 1e-3 else 2 * by
            shift = torch.as_tensor(chance.standard_normal(p.shape, np.float32)) * scale
            p.data = p.data + shift.to(p.device, p.dtype)
        torch.clear_autocast_cache()  # it holds casts of the parameters as they were
        yield
    finally:
        for name, p in params.items():
            p.data = saved[name]
        torch.clear_autocast_cache()
