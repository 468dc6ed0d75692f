"""Broadcast arithmetic with a parameter, in place and not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compare import check
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from uses import away_from_zero, loss_of, run

from hushgrad.gradients import auto

BATCHES = st.sampled_from([1, 2, 3, 8, 9])
SEEDS = st.integers(0, 1000)


def iadd(h: Tensor, p: Tensor) -> Tensor:
    h = h.clone()
    h += p
    return h


def isub(h: Tensor, p: Tensor) -> Tensor:
    h = h.clone()
    h -= p
    return h


def imul(h: Tensor, p: Tensor) -> Tensor:
    h = h.clone()
    h *= p
    return h


def idiv(h: Tensor, p: Tensor) -> Tensor:
    h = h.clone()
    h /= p
    return h


# Only the activation's shape may come out of these.
IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "h += p": iadd,
    "h -= p": isub,
    "h *= p": imul,
    "h /= p": idiv,
    "h.add_(p)": lambda h, p: h.clone().add_(p),
    "h.add_(p, alpha)": lambda h, p: h.clone().add_(p, alpha=0.5),
    "h.sub_(p)": lambda h, p: h.clone().sub_(p),
    "h.mul_(p)": lambda h, p: h.clone().mul_(p),
    "h.div_(p)": lambda h, p: h.clone().div_(p),
    "h.tanh().mul_(p)": lambda h, p: (h * 1.0).mul_(p).tanh(),
}

ARITHMETIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "h + p": lambda h, p: h + p,
    "p + h": lambda h, p: p + h,
    "torch.add(h, p)": lambda h, p: torch.add(h, p),
    "torch.add(h, p, alpha)": lambda h, p: torch.add(h, p, alpha=0.5),
    "torch.add(p, h, alpha)": lambda h, p: torch.add(p, h, alpha=-2),
    "torch.add(input, other)": lambda h, p: torch.add(input=h, other=p),
    "h.add(p)": lambda h, p: h.add(p),
    "h - p": lambda h, p: h - p,
    "p - h": lambda h, p: p - h,
    "torch.sub(h, p, alpha)": lambda h, p: torch.sub(h, p, alpha=3),
    "torch.sub(p, h, alpha)": lambda h, p: torch.sub(p, h, alpha=3),
    "torch.subtract": lambda h, p: torch.subtract(h, p),
    "torch.rsub(h, p)": lambda h, p: torch.rsub(h, p),
    "torch.rsub(p, h)": lambda h, p: torch.rsub(p, h, alpha=2),
    "h * p": lambda h, p: h * p,
    "p * h": lambda h, p: p * h,
    "torch.mul": lambda h, p: torch.mul(p, h),
    "torch.multiply": lambda h, p: torch.multiply(h, p),
    "h.mul(p)": lambda h, p: h.mul(p),
    "h / p": lambda h, p: h / p,
    "p / h": lambda h, p: p / h,
    "torch.div": lambda h, p: torch.div(h, p),
    "torch.true_divide": lambda h, p: torch.true_divide(p, h),
    "h.div(p)": lambda h, p: h.div(p),
    "1 + p": lambda h, p: h * (1 + p),
    "2 - p": lambda h, p: h * (2 - p),
    "1 / p": lambda h, p: h * (1 / p),
    "-p": lambda h, p: h * -p,
    "p ** 2": lambda h, p: h * p**2,
    "h ** p": lambda h, p: h.abs() ** p,
    "torch.lerp": lambda h, p: torch.lerp(h, p, 0.3),
    "torch.addcmul": lambda h, p: torch.addcmul(h, h, p, value=0.5),
    "torch.maximum": lambda h, p: torch.maximum(h, 0.5 * p),
    "torch.where": lambda h, p: torch.where(h > 0, h, p),
    "torch.where, parameter first": lambda h, p: torch.where(h > 0, p, h),
    "public mask times p": lambda h, p: h + p * torch.ones(4).cumsum(0),
    "p by parameter twice": lambda h, p: (h * p) * p + p,
}


@pytest.mark.parametrize("spelling", [*ARITHMETIC, *IN_PLACE])
@pytest.mark.parametrize("shape", [(4,), (1, 3, 1)])
def test_arithmetic_is_exact(spelling: str, shape: tuple[int, ...]) -> None:
    run((ARITHMETIC | IN_PLACE)[spelling], [shape], away_from_zero(3, 3, 4))


SHAPES = [(), (1,), (4,), (3, 1), (1, 4), (3, 4), (1, 1, 1), (1, 3, 4), (1, 1, 4)]


@given(
    spelling=st.sampled_from([*ARITHMETIC, *IN_PLACE]),
    shape=st.sampled_from(SHAPES),
    batch=BATCHES,
    seed=SEEDS,
)
def test_arithmetic_of_any_shape_is_exact(
    spelling: str, shape: tuple[int, ...], batch: int, seed: int
) -> None:
    torch.manual_seed(seed)
    run((ARITHMETIC | IN_PLACE)[spelling], [shape], away_from_zero(batch, 3, 4))


@pytest.mark.parametrize("spelling", ["h + p", "p - h", "h * p", "p / h", "torch.where"])
@pytest.mark.parametrize("shape", [(5, 1, 4), (5, 1, 1), (2, 5, 1, 4), (5, 1, 1, 4)])
def test_a_parameter_of_more_dimensions_than_the_activation_is_exact(
    spelling: str, shape: tuple[int, ...]
) -> None:
    """The records move to the right when a parameter brings dimensions of its own."""

    def function(h: Tensor, p: Tensor) -> Tensor:
        return ARITHMETIC[spelling](h, p).movedim(-2, 0)

    run(function, [shape], away_from_zero(3, 4))


@pytest.mark.parametrize("spelling", ["h + p", "h * p", "h / p"])
def test_an_activation_smaller_than_the_parameter_is_exact(spelling: str) -> None:
    run(ARITHMETIC[spelling], [(3, 4)], away_from_zero(5, 1, 1))


@pytest.mark.parametrize("spelling", ["h += p", "h *= p", "h.add_(p)"])
def test_arithmetic_in_place_is_exact(spelling: str) -> None:
    """The activation is a copy of the input itself, which no gradient flows into."""
    p = nn.Parameter(away_from_zero(4))
    check(loss_of(lambda x: IN_PLACE[spelling](x, p)), {"p": p}, torch.randn(5, 4))


def test_arithmetic_in_place_on_a_part_is_exact() -> None:
    """`h[...] += p` writes through a view of the activation."""

    def function(h: Tensor, p: Tensor) -> Tensor:
        h = h.clone()
        h[:, 1:] += p
        return h

    run(function, [(3,)], away_from_zero(5, 4), form=auto)
