"""Products with a parameter, in every spelling, against ordinary autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from uses import away_from_zero, run, twofold

SIZES = st.integers(1, 5)
BATCHES = st.sampled_from([1, 2, 3, 8, 9])
SEEDS = st.integers(0, 1000)

# einsum of [batch, t, d] whose gradient is one outer product at each position.
MATRICES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "F.linear": (lambda h, w: torch.einsum("btd,od->bto", h, w), (40, 40)),
    "h @ w": (lambda h, w: torch.einsum("btd,do->bot", h, w), (40, 40)),
    "heads made": (lambda h, w: torch.einsum("btd,dhk->bhtk", h, w), (40, 4, 10)),
    "sequence first": (
        lambda h, w: torch.einsum("tbd,hkd->tbhk", h.transpose(0, 1), w).transpose(0, 1),
        (4, 10, 40),
    ),
    "heads summed": (
        lambda h, w: torch.einsum("bthk,ohk->bto", h.unflatten(-1, (4, 10)), w), (40, 4, 10)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MATRICES)
def test_einsum_by_a_matrix_stays_factored(kind: str) -> None:
    function, shape = MATRICES[kind]
    gradients = run(lambda h, w: 0.1 * function(h, w), [shape], torch.randn(5, 2, 40))
    assert gradients.held_gradients["operands.0"].form == "Gram"


# Product of the activation [batch, *middle, d] and parameters whose shapes are given by d.
PRODUCTS: dict[str, tuple[Callable[..., Tensor], Callable[[int], list[tuple[int, ...]]]]] = {
    "F.linear": (lambda h, w: F.linear(h, w), lambda d: [(3, d)]),
    "F.linear with keywords": (lambda h, w, b: F.linear(input=h, weight=w, bias=b),
                               lambda d: [(3, d), (3,)]),
    "h @ w": (lambda h, w: h @ w, lambda d: [(d, 3)]),
    "h @ w.T": (lambda h, w: h @ w.T, lambda d: [(3, d)]),
    "torch.matmul": (lambda h, w: torch.matmul(h, w), lambda d: [(d, 3)]),
    "torch.matmul with keywords": (lambda h, w: torch.matmul(h, other=w), lambda d: [(d, 3)]),
    "h.matmul(w)": (lambda h, w: h.matmul(w), lambda d: [(d, 3)]),
    "h.__rmatmul__": (lambda h, w: w.__rmatmul__(h), lambda d: [(d, 3)]),
    "w @ h": (lambda h, w: w @ h.mT, lambda d: [(3, d)]),
    "torch.matmul(w, h)": (lambda h, w: torch.matmul(w, h.mT), lambda d: [(3, d)]),
    "h @ vector": (lambda h, v: h @ v, lambda d: [(d,)]),
    "vector @ h": (lambda h, v: v @ h.mT, lambda d: [(d,)]),
    "heads by matmul": (lambda h, w: h.unsqueeze(-3) @ w, lambda d: [(2, d, 3)]),
    "heads on the left": (lambda h, w: w @ h.mT.unsqueeze(-3), lambda d: [(2, 3, d)]),
    "heads by einsum": (lambda h, w: torch.einsum("...d,hdk->...hk", h, w), lambda d: [(2, d, 3)]),
    "einsum": (lambda h, w: torch.einsum("...i,oi->...o", h, w), lambda d: [(3, d)]),
    "einsum, turned": (lambda h, w: torch.einsum("...i,io->...o", h, w), lambda d: [(d, 3)]),
    "einsum, weight first": (lambda h, w: torch.einsum("oi, ...i -> ...o", w, h),
                             lambda d: [(3, d)]),
    "einsum, implicit output": (lambda h, w: torch.einsum("...i,io", h, w), lambda d: [(d, 3)]),
    "einsum, several made": (lambda h, w: torch.einsum("...d,hkd->...kh", h, w),
                             lambda d: [(2, 3, d)]),
    "einsum, several summed": (
        lambda h, w: torch.einsum("...xy,oxy->...o", twofold(h), w),
        lambda d: [(3, 2, d)],
    ),
    "einsum, made between summed": (
        lambda h, w: torch.einsum("...xy,xoy->...o", twofold(h), w),
        lambda d: [(2, 3, d)],
    ),
    "einsum, by each head": (
        lambda h, w: torch.einsum("...hd,hdk->...hk", twofold(h), w),
        lambda d: [(2, d, 3)],
    ),
    "einsum, elementwise": (lambda h, w: torch.einsum("...i,i->...i", h, w), lambda d: [(d,)]),
    "einsum, inner": (lambda h, w: torch.einsum("...i,i->...", h, w), lambda d: [(d,)]),
    "einsum, outer": (lambda h, w: torch.einsum("...i,j->...ji", h, w), lambda d: [(3,)]),
    "einsum, diagonal": (lambda h, w: torch.einsum("...i,ii->...i", h, w), lambda d: [(d, d)]),
    "einsum, summed parameter": (lambda h, w: torch.einsum("...i,ij->...i", h, w),
                                 lambda d: [(d, 3)]),
    "einsum, summed input": (lambda h, w: torch.einsum("...i,jk->...jk", h, w),
                             lambda d: [(2, 3)]),
    "einsum, stretched": (lambda h, w: torch.einsum("...i,oi->...o", h, w), lambda d: [(3, 1)]),
    "einsum, dots in both": (lambda h, w: torch.einsum("...,...->...", h, w), lambda d: [(d,)]),
    "einsum, one operand": (lambda h, w: F.linear(h, torch.einsum("ij->ji", w)),
                            lambda d: [(d, 3)]),
    "einsum, a constant between": (
        lambda h, w: torch.einsum("...i,ij,oj->...o", h, torch.ones(h.shape[-1], 2), w),
        lambda d: [(3, 2)],
    ),
    "einsum, records twice": (
        lambda h, w: torch.einsum("...i,...j,oij->...o", h, h.tanh(), w), lambda d: [(3, d, d)]
    ),
    "einsum, two parameters": (
        lambda h, w, v: torch.einsum("...i,ij,oj->...o", h, w, v), lambda d: [(d, 2), (3, 2)]
    ),
    "bilinear": (lambda h, w, b: F.bilinear(h, h.tanh(), w, b), lambda d: [(2, d, d), (2,)]),
    "bilinear, no bias": (lambda h, w: F.bilinear(h, h.tanh(), w), lambda d: [(2, d, d)]),
    "bilinear, bias alone": (
        lambda h, b: F.bilinear(h, h.tanh(), torch.ones(2, *[h.shape[-1]] * 2), b),
        lambda d: [(2,)],
    ),
    "bilinear, a parameter as input": (
        lambda h, w, p: F.bilinear(h, p.expand_as(h), w), lambda d: [(2, d, d), (d,)]
    ),
    "tensordot": (lambda h, w: torch.tensordot(h, w, dims=1), lambda d: [(d, 3)]),
    "low rank": (lambda h, a, b: F.linear(F.linear(h, a), b), lambda d: [(2, d), (3, 2)]),
    "product of parameters": (lambda h, a, b: F.linear(h, b @ a), lambda d: [(2, d), (3, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("spelling", PRODUCTS)
@pytest.mark.parametrize("middle", [(2,), (3, 1)])
def test_products_are_exact(spelling: str, middle: tuple[int, ...]) -> None:
    function, shapes = PRODUCTS[spelling]
    run(function, shapes(4), away_from_zero(3, *middle, 4))


@given(
    spelling=st.sampled_from([*PRODUCTS]),
    middle=st.lists(SIZES, min_size=1, max_size=2),
    d=SIZES,
    batch=BATCHES,
    seed=SEEDS,
)
def test_products_of_any_shape_are_exact(
    spelling: str, middle: list[int], d: int, batch: int, seed: int
) -> None:
    torch.manual_seed(seed)
    function, shapes = PRODUCTS[spelling]
    run(function, shapes(d), away_from_zero(batch, *middle, d))


# The same for activations of one row to a record, [batch, 4].
ROW_PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "mm": (lambda h, w: torch.mm(h, w), [(4, 3)]),
    "h.mm(w)": (lambda h, w: h.mm(w), [(4, 3)]),
    "mm on the left": (lambda h, w: torch.mm(w, h.T).T, [(3, 4)]),
    "w @ h.T": (lambda h, w: (w @ h.T).T, [(3, 4)]),
    "h @ w": (lambda h, w: h @ w, [(4, 3)]),
    "mv": (lambda h, v: torch.mv(h, v), [(4,)]),
    "h.mv(v)": (lambda h, v: h.mv(v), [(4,)]),
    "h @ v": (lambda h, v: h @ v, [(4,)]),
    "v @ h.T": (lambda h, v: v @ h.T, [(4,)]),
    "addmm": (lambda h, b, w: torch.addmm(b, h, w), [(3,), (4, 3)]),
    "addmm, row of biases": (lambda h, b, w: torch.addmm(b, h, w), [(1, 3), (4, 3)]),
    "addmm, alpha and beta": (
        lambda h, b, w: torch.addmm(b, h, w, beta=0.3, alpha=-2), [(3,), (4, 3)]
    ),
    "addmm, bias alone": (
        lambda h, b: torch.addmm(b, h, torch.ones(4, 3), beta=0.3, alpha=-2), [(3,)]
    ),
    "addmm, public bias": (lambda h, w: torch.addmm(torch.ones(3), h, w, alpha=2), [(4, 3)]),
    "addmm, public bias and beta": (
        lambda h, w: torch.addmm(torch.ones(3), h, w, beta=2), [(4, 3)]
    ),
    "addmm, beta 0": (lambda h, w: torch.addmm(torch.ones(3), h, w, beta=0), [(4, 3)]),
    "addmm, bias from the records": (
        lambda h, w: torch.addmm(h, h, w, alpha=0.5), [(4, 4)]
    ),
    "addmm, bias from the records, beta": (
        lambda h, w: torch.addmm(h, h, w, beta=0.5), [(4, 4)]
    ),
    "addmm, method": (lambda h, b, w: b.addmm(h, w, alpha=3), [(3,), (4, 3)]),
    "addmm on the left": (lambda h, b, w: torch.addmm(b, w, h.T).T, [(3, 1), (3, 4)]),
    "addmv": (lambda h, b, v: torch.addmv(b, h, v), [(1,), (4,)]),
    "bmm with an expanded parameter": (
        lambda h, w: torch.bmm(h.unsqueeze(1), w.unsqueeze(0).expand(len(h), -1, -1)), [(4, 3)]
    ),
    "bmm on the left": (
        lambda h, w: torch.bmm(w.expand(len(h), 3, 4), h.unsqueeze(2)), [(3, 4)]
    ),
    "bmm, a parameter for each head": (
        lambda h, w: torch.bmm(h.expand(2, *h.shape), w).movedim(1, 0), [(2, 4, 3)]
    ),
    "baddbmm": (
        lambda h, b, w: torch.baddbmm(b, h.expand(2, *h.shape), w).movedim(1, 0),
        [(2, 1, 3), (2, 4, 3)],
    ),
    "outer": (lambda h, v: torch.einsum("bi,j->bij", h, v), [(3,)]),
    "quadratic": (lambda h, w: ((h @ w) * h).sum(1), [(4, 4)]),
    "multi_dot": (lambda h, a, b: torch.linalg.multi_dot([h, a, b]), [(4, 2), (2, 3)]),
    "cdist": (lambda h, c: torch.cdist(h, c).square(), [(3, 4)]),
    "kernel": (lambda h, c: (h.unsqueeze(1) - c).square().sum(-1), [(3, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("spelling", ROW_PRODUCTS)
def test_products_of_rows_are_exact(spelling: str) -> None:
    function, shapes = ROW_PRODUCTS[spelling]
    run(function, shapes, away_from_zero(3, 4))
