"""Certified norms, on gradients that were built to break them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from hushgrad.clipping.rules import (
    Clip,
    abadi,
    automatic,
    custom,
    discard,
    normalize,
    reparameterized,
)
from hushgrad.gradients.factors.choice import settle
from hushgrad.gradients.factors.gradients import Gradients, difference
from hushgrad.gradients.factors.held import Gram, Materialised
from hushgrad.gradients.factors.kinds import Dense, Factor, OneHot, Outer
from hushgrad.gradients.factors.slots import in_turn
from hushgrad.gradients.factors.sums import Summation
from hushgrad.numerics import RELATIVE_SLACK, exact_products, product, square_norms

RULES = [
    abadi(0.5),
    automatic(),
    automatic(gamma=1e-6),
    normalize(2.0),
    discard(3.0),
    reparameterized(0.1),
    custom(lambda n: 1e9 / n, bound=1.0),
]


def true_squares(factors: tuple[Factor, ...], shape: tuple[int, ...]) -> Tensor:
    """Squared norms of the factors as they stand, written out in float64."""
    squares = []
    for i in range(factors[0].batch):
        total = sum(factor.record(i).reshape(shape) for factor in factors)
        squares.append(total.square().sum())
    return torch.stack(squares)


def gradients_of(*factors: Factor, shape: tuple[int, ...]) -> Gradients:
    batch = factors[0].batch
    params = {"w": nn.Parameter(torch.zeros(shape))}
    uses = {"w": {(i,): factor for i, factor in enumerate(factors)}}
    return Gradients(uses, params, torch.zeros(batch), in_turn(batch))


def assert_certified(factors: tuple[Factor, ...], shape: tuple[int, ...]) -> None:
    """Upper bound, close estimate, and no record above any rule's bound."""
    batch = factors[0].batch
    written = sum(factor.materialised().reshape(batch, *shape) for factor in factors)
    exact = {  # what each form adds up: the factors' own product, or its float32 rounding
        "Gram": true_squares(factors, shape),
        "materialised": true_squares((Dense(written),), shape),
    }
    for gradient in (Gram(factors, shape), Materialised(factors, shape)):
        square, true = gradient.square, exact[gradient.form]
        assert (square.upper >= true * (1 - 1e-12)).all(), gradient.form
        normal = true > 1e-60
        assert (square.slack[normal] <= RELATIVE_SLACK * square.estimate[normal]).all()
        assert ((square.estimate - true).abs()[normal] <= RELATIVE_SLACK * true[normal]).all()
        for rule in RULES:
            assert_bounded(gradient, rule, batch)


def assert_bounded(gradient: Gram | Materialised, rule: Clip, batch: int) -> None:
    """Each record's contribution, taken from the sum itself and measured in float64."""
    weights = rule.weights(gradient.square.upper.sqrt()[:, None])[:, 0]
    for i in range(batch):
        alone = torch.zeros_like(weights)
        alone[i] = weights[i]
        how = Summation(None, False, (gradient.extents[0].terms,))
        contribution = gradient.weighted_sum(alone, how).double()
        assert contribution.square().sum().sqrt() <= rule.bound(1) * (1 + 1e-5), rule


def cancelling(noise: float, batch: int = 4, d: int = 96, p: int = 80) -> Outer:
    """`a_1 = a_2` and `b_2 = -b_1 + noise`: all but the noise cancels."""
    a1, b1 = torch.randn(batch, d), torch.randn(batch, p)
    b2 = -b1 + noise * torch.randn(batch, p)
    return Outer(torch.stack([a1, a1], 1), torch.stack([b1, b2], 1))


@pytest.mark.parametrize("noise", [1.0, 3e-2, 3e-4, 1e-5, 3e-7, 0.0])
def test_cancellation_between_positions(noise: float) -> None:
    assert_certified((cancelling(noise),), (80, 96))


def test_a_plain_gram_norm_would_have_been_wrong() -> None:
    """The test above has teeth: the uncertified float32 norm is far too small here."""
    factor = cancelling(3e-4)
    gram = torch.bmm(factor.a, factor.a.mT) * torch.bmm(factor.b, factor.b.mT)
    true = true_squares((factor,), (80, 96))
    assert (gram.sum((1, 2)) < 0.5 * true).any()


@pytest.mark.parametrize("kappa", [10.0**k for k in range(8)])
def test_cancellation_of_every_strength(kappa: float) -> None:
    assert_certified((cancelling(1 / kappa),), (80, 96))


@pytest.mark.parametrize("t", [1, 2, 64, 300, 1500])
def test_many_positions(t: int) -> None:
    factor = Outer(torch.randn(2, t, 24), torch.randn(2, t, 8))
    assert_certified((factor,), (8, 24))


def test_wide_layers_are_added_in_chunks() -> None:
    factor = Outer(torch.randn(2, 3, 5000) + 1, torch.randn(2, 3, 3000) + 1)
    square = Gram((factor,), (3000, 5000)).square
    true = true_squares((factor,), (3000, 5000))
    assert (square.upper >= true).all()
    assert ((square.estimate - true).abs() <= 1e-5 * true).all()


@pytest.mark.parametrize(
    ("left", "right"),
    [(1e-30, 1.0), (1e-25, 1e25), (1e-22, 1e-22), (1e18, 1e18), (1e-38, 1e-3), (1e20, 1e-20)],
)
def test_near_underflow_and_overflow(left: float, right: float) -> None:
    factor = Outer(torch.randn(3, 4, 40) * left, torch.randn(3, 4, 30) * right)
    assert_certified((factor,), (30, 40))


def test_rows_of_very_different_size() -> None:
    """One position has a small activation, the other a small gradient; squares underflow."""
    a = torch.randn(3, 2, 20) * torch.tensor([1.0, 1e-28])[:, None]
    b = torch.randn(3, 2, 10) * torch.tensor([1e-28, 1.0])[:, None]
    assert_certified((Outer(a, b),), (10, 20))


@pytest.mark.parametrize("scale", [1e-21, 1e-5, 1e19])
def test_under_flush_denormal(scale: float) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        factor = Outer(torch.randn(3, 4, 40) * scale, torch.randn(3, 4, 30) * 1e-19)
        assert_certified((factor,), (30, 40))
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_under_lowered_matmul_precision_and_autocast(precision: str) -> None:
    factor = cancelling(3e-2)
    gradients = gradients_of(factor, shape=(80, 96))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            squares = gradients.squares["w"]
            total = gradients.weighted_sum({"w": torch.ones(4, dtype=torch.float64)})["w"]
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    true = true_squares((factor,), (80, 96))
    assert (squares.upper >= true).all()
    assert ((squares.estimate - true).abs() <= 1e-3 * true).all()
    expected = sum(factor.record(i) for i in range(4))
    assert total.dtype == torch.float32
    assert torch.allclose(total.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", ["norms", "sums"])
def test_norms_are_exact_whichever_is_asked_for_first_under_autocast(first: str) -> None:
    factor = Outer(torch.randn(4, 3, 40), torch.randn(4, 3, 30))
    gradients = gradients_of(factor, shape=(30, 40))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if first == "sums":
            gradients.weighted_sum({"w": torch.ones(4, dtype=torch.float64)})
        upper = gradients.sq_norms()["w"]
    true = true_squares((factor,), (30, 40))
    assert (upper >= true).all()
    assert (upper <= 1.001 * true).all()


@pytest.mark.parametrize("rows", [1, 90])
@pytest.mark.parametrize("layout", ["packed", "transposed", "with gaps"])
def test_products_are_exact_in_every_layout(rows: int, layout: str) -> None:
    x, y = torch.randn(rows, 300), torch.randn(300, 120)
    if layout == "transposed":
        x, y = (z.mT.contiguous().mT for z in (x, y))
    if layout == "with gaps":
        x, y = (torch.cat([z, z], 1)[:, : z.shape[1]] for z in (x, y))
    scale = x.double().norm(dim=1)[:, None] * y.double().norm(dim=0)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with exact_products(torch.device("cpu")):
            found = product(x, y)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert ((found - x.double() @ y.double()).abs() <= 1e-6 * scale).all()


def test_exact_products_restores_every_switch() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with exact_products(torch.device("cpu")):
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_a_materialised_norm_of_forty_million_entries() -> None:
    x = torch.full((1, 40_000_000), 1.1)
    square = square_norms(x)
    true = 40_000_000 * float(torch.tensor(1.1)) ** 2
    assert true <= float(square.upper) <= true * 1.0001
    assert abs(float(square.estimate) / true - 1) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_gradient_is_zero_without_slack(dtype: torch.dtype) -> None:
    outer = Outer(torch.randn(3, 4, 5, dtype=dtype), torch.zeros(3, 4, 6, dtype=dtype))
    for factor in (outer, OneHot(torch.zeros(3, 4, dtype=torch.long), outer.b, 6)):
        assert not Gram((factor,), (6, -1)).square.upper.any()
    assert not Materialised((Dense(torch.zeros(3, 7)),), (7,)).square.upper.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["a", "b"])
def test_a_record_that_is_not_finite_has_norm_inf_and_can_be_left_out(
    bad: float, where: str
) -> None:
    a, b = torch.randn(3, 4, 50), torch.randn(3, 4, 60)
    {"a": a, "b": b}[where][1, 2, 3] = bad
    gradients = gradients_of(Outer(a, b), shape=(60, 50))
    norms = gradients.sq_norms()["w"]
    assert norms[1] == math.inf
    assert norms[[0, 2]].isfinite().all()
    total = gradients.weighted_sum({"w": torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)})["w"]
    expected = b[0].mT @ a[0] + 2 * b[2].mT @ a[2]
    assert torch.allclose(total, expected, atol=1e-4)


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e19, math.inf])
def test_a_mate_whose_norm_takes_a_second_look_moves_no_bits(t: int, scale: float) -> None:
    """All parameters are looked at once; where one record fails, each is looked at by itself."""
    a, b = torch.randn(8, t, 20), torch.randn(8, t, 30)
    weights = torch.rand(8, dtype=torch.float64)
    weights[7] = 0
    found = []
    for loud in (1.0, scale):
        beside = torch.cat([b[:7], b[7:] * loud])
        params = {"w": nn.Parameter(torch.zeros(30, 20)), "v": nn.Parameter(torch.zeros(30))}
        uses = {"w": {(0,): Outer(a, beside)}, "v": {(0,): Dense(beside.sum(1))}}
        gradients = Gradients(uses, params, torch.zeros(8), in_turn(8))
        sums = gradients.weighted_sum(dict.fromkeys(params, weights))
        found.append([x[:7] for x in gradients.sq_norms().values()] + [*sums.values()])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_tied_embedding_and_head_that_cancel() -> None:
    """A look-up and an outer product of one table, built to be nearly opposite."""
    rows, width, t = 12, 16, 5
    index = torch.randint(rows, (3, t))
    b = torch.randn(3, t, width)
    table = OneHot(index, b, rows)
    one_hot = torch.nn.functional.one_hot(index, rows).float()
    for noise in (1.0, 1e-3, 1e-6):
        head = Outer(-b + noise * torch.randn_like(b), one_hot)
        assert_certified((head, table), (rows, width))


def test_cross_terms_of_a_weight_used_twice() -> None:
    one = Outer(torch.randn(3, 4, 6), torch.randn(3, 4, 7))
    two = Outer(torch.randn(3, 2, 6), torch.randn(3, 2, 7))
    assert_certified((one, two), (7, 6))
    settled = settle((one, two), (7, 6))
    true = true_squares((one, two), (7, 6))
    assert torch.allclose(settled.square.estimate, true, rtol=1e-5)


@pytest.mark.parametrize("t", [1, 3, 50])
def test_a_difference_of_nearly_equal_gradients(t: int) -> None:
    """`a' = 1.001 a` and `b' = 0.999 b`: a millionth of each gradient is left."""
    a, b = torch.randn(3, t, 40), torch.randn(3, t, 30)
    new, old = Outer(1.001 * a, 0.999 * b), Outer(a, b)
    change = difference(gradients_of(new, shape=(30, 40)), gradients_of(old, shape=(30, 40)))
    exact = torch.stack([new.record(i) - old.record(i) for i in range(3)])
    norms = exact.flatten(1).square().sum(1)
    squares = change.squares["w"]
    assert (squares.upper >= norms * (1 - 1e-9)).all()
    assert (squares.upper <= norms * 1.05).all()
    for rule in RULES:
        weights = rule.weights(squares.upper.sqrt()[:, None])[:, 0]
        for i in range(3):
            alone = torch.zeros(3, dtype=torch.float64)
            alone[i] = weights[i]
            size = change.weighted_sum({"w": alone})["w"].double().norm()
            assert size <= rule.bound(1) * (1 + 1e-5)


def test_differences_that_do_not_pair_are_written_out() -> None:
    new = gradients_of(Outer(torch.randn(3, 2, 4), torch.randn(3, 2, 5)), shape=(5, 4))
    old = gradients_of(Outer(torch.randn(3, 6, 4), torch.randn(3, 6, 5)), shape=(5, 4))
    change = difference(new, old)
    weights = {"w": torch.rand(3, dtype=torch.float64)}
    expected = new.weighted_sum(weights)["w"] - old.weighted_sum(weights)["w"]
    assert torch.allclose(change.weighted_sum(weights)["w"], expected, atol=1e-5)


def test_float64_factors_keep_float64() -> None:
    factor = Outer(torch.randn(2, 3, 4).double(), torch.randn(2, 3, 5).double())
    square = Gram((factor,), (5, 4)).square
    true = true_squares((factor,), (5, 4))
    assert ((square.estimate - true).abs() <= 1e-13 * true).all()
    assert (square.slack <= 1e-11 * true).all()
