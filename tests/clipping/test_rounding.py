"""The error of computed sums, on records that are made to round badly: it is bounded by proof."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
import torch
from torch import Tensor, nn

from hushgrad import Execution, Rng, clipped_sum
from hushgrad.algorithms import FedAvg
from hushgrad.clipping.aggregate import PIECE_ERROR, SUM_SLACK, aggregate
from hushgrad.clipping.groups import per_layer
from hushgrad.clipping.pieces import LARGEST_PIECE, Pieces, pieces_for
from hushgrad.clipping.rules import abadi, automatic, normalize
from hushgrad.glm.gradients import clipped_linear_sum as linear_sum
from hushgrad.glm.losses import logistic
from hushgrad.glm.rows import RowSource as LinearRows
from hushgrad.glm.rows import scaled_rows
from hushgrad.gradients import Gradients, difference, recomputed
from hushgrad.gradients.factors.held import Gradient, Stacked
from hushgrad.gradients.factors.kinds import Dense, Factor, OneHot, Outer, Rows
from hushgrad.gradients.factors.slots import in_turn
from hushgrad.gradients.factors.sums import (
    DOUBLE,
    Total,
    rows_per_product,
    sum_of_products,
    sum_of_rows,
)
from hushgrad.gradients.objective import Objective
from hushgrad.run.query import BatchPass, ClippedSum, Summand
from hushgrad.types import Refused

WIDTH = 16


def alike(records: int, *shape: int) -> Tensor:
    """Records that all point the same way: the sum and its rounding are as large as can be.

    Of a third float32 rounds every partial sum of one binade the same way.
    """
    return torch.full((records, *shape), 1 / 3)


def lost(records: int, *shape: int) -> Tensor:
    """One large record before many small ones, each below half a digit of what stands there."""
    x = torch.full((records, *shape), 2.0**-12)
    x[0] = 1.0
    return x


def varied(records: int, *shape: int) -> Tensor:
    return torch.rand(records, *shape, generator=torch.Generator().manual_seed(3))


def opposed(records: int, positions: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows of a record that cancel, to a hundredth and to a thousandth of their lengths."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(records, 1, width, generator=generator).expand(-1, positions, -1).clone()
    b = torch.randn(records, 1, width, generator=generator).expand(-1, positions, -1).clone()
    b[:, 1::2] *= -1
    sizes = torch.tensor([3e-2, 1e-3]).repeat(records)[:records, None, None]
    return a, b + sizes * torch.randn(records, positions, width, generator=generator)


def held(*factors: Factor | Rows) -> Gradients:
    """Per-sample gradients of one parameter."""
    shape = factors[0].whole() if isinstance(factors[0], Rows) else factors[0]
    size = shape.record(0).shape
    return Gradients(
        {"w": {(i,): factor for i, factor in enumerate(factors)}},
        {"w": nn.Parameter(torch.zeros(size))},
        torch.zeros(factors[0].batch),
        in_turn(factors[0].batch),
    )


def exact(gradients: Gradients, weights: Tensor) -> Tensor:
    """The sum of the gradients as they are held, in float64."""
    return _exact(gradients.held_gradients["w"], weights, gradients._params["w"].shape)


def _exact(gradient: Gradient, weights: Tensor, shape: torch.Size) -> Tensor:
    if isinstance(gradient, Stacked):
        parts = [(k, block) for k, block in gradient._blocks.items()]
        rows = shape[0] // len(parts)
        return torch.cat([_exact(g, weights, torch.Size([rows, *shape[1:]])) for _, g in parts])
    total = torch.zeros(shape, dtype=torch.float64)
    for factor in gradient.held:
        if isinstance(factor, Outer):
            b = factor.b.double() * weights[:, None, None]
            total += b.flatten(0, 1).mT @ factor.a.double().flatten(0, 1)
        elif isinstance(factor, Dense):
            total += torch.tensordot(weights, factor.values.double(), 1)
        else:
            b = (factor.b.double() * weights[:, None, None]).flatten(0, 1)
            total.index_add_(0, factor.index.flatten(), b)
    return total


FAMILIES = {"alike": alike, "lost": lost, "varied": varied}


def made(kind: str, family: str, records: int) -> Gradients:
    draw = FAMILIES[family]
    if kind == "dense":
        return held(Dense(draw(records, WIDTH, WIDTH)))
    if kind == "outer":
        return held(Outer(draw(records, 1, WIDTH), draw(records, 1, WIDTH)))
    positions = 64 if kind == "long" else 4
    a, b = draw(records, positions, 2 * WIDTH), draw(records, positions, 2 * WIDTH)
    if kind == "cancelling":
        a, b = opposed(records, positions, 2 * WIDTH)
    index = torch.arange(positions).remainder(3).expand(records, -1)
    if kind == "look-up":
        return held(OneHot(index, b, 2 * WIDTH))
    if kind == "tied":
        return held(Outer(a, b), OneHot(index, b, 2 * WIDTH))
    if kind == "rows":
        half = Outer(a, b[:, :, :WIDTH])
        return held(
            Rows(half, range(WIDTH), 2 * WIDTH),
            Rows(half, range(WIDTH, 2 * WIDTH), 2 * WIDTH),
        )
    return held(Outer(a, b))


KINDS = ["dense", "outer", "long", "cancelling", "look-up", "tied", "rows"]


@pytest.mark.parametrize("records", [64, 1024, 8192])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_is_as_exact_as_it_was_asked_to_be(kind: str, family: str, records: int) -> None:
    if kind in ("long", "cancelling"):
        records = min(records, 2048)
    gradients = made(kind, family, records)
    norms = gradients.sq_norms()["w"].sqrt()
    for clip in (normalize(), abadi(0.7), automatic(clip_norm=3.0)):
        weights = clip.weights(norms[:, None])[:, 0]
        bounded = aggregate(gradients, {"w": weights}, bound=clip.bound(1))
        off = float((bounded.sum["w"].double() - exact(gradients, weights)).norm())
        assert off <= PIECE_ERROR * clip.bound(1), clip


@pytest.mark.parametrize(("kind", "records"), [("dense", 2**20), ("outer", 2**20), ("long", 2**14)])
@pytest.mark.slow
def test_the_largest_sums_are_exact_too(kind: str, records: int) -> None:
    gradients = made(kind, "alike", records)
    weights = 1 / gradients.sq_norms()["w"].sqrt()
    bounded = aggregate(gradients, {"w": weights}, bound=1.0)
    off = float((bounded.sum["w"].double() - exact(gradients, weights)).norm())
    assert off <= PIECE_ERROR


@pytest.mark.parametrize("kind", ["outer", "long"])
def test_plain_float32_would_break_the_bound(kind: str) -> None:
    """The constructed records have teeth: without the limit they move a sum by far more."""
    gradients = made(kind, "alike", 8192 if kind == "outer" else 2048)
    weights = 1 / gradients.sq_norms()["w"].sqrt()
    plain = gradients.weighted_sum({"w": weights})["w"].double()
    assert float((plain - exact(gradients, weights)).norm()) > 2 * SUM_SLACK


def test_records_that_are_written_out_are_added_in_float64() -> None:
    """Each added to a float32 total would round what all others have added."""
    a, b = opposed(1024, 4, WIDTH)
    gradients = held(Outer(a, b))
    assert len(gradients.held_gradients["w"].measured.fragile) > 500
    weights = 1 / gradients.sq_norms()["w"].sqrt()
    total = gradients.weighted_sum({"w": weights}, within=PIECE_ERROR)["w"]
    assert total.dtype == torch.float64


def test_a_difference_is_as_exact_as_a_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.rand(1024, 8, WIDTH, generator=generator) for _ in range(2))
    step = 1e-3 * torch.rand(1024, 8, WIDTH, generator=generator)
    change = difference(held(Outer(a + step, b + step)), held(Outer(a, b)))
    weights = 1 / change.sq_norms()["w"].sqrt()
    bounded = aggregate(change, {"w": weights}, bound=1.0)
    off = float((bounded.sum["w"].double() - exact(change, weights)).norm())
    assert off <= PIECE_ERROR


@pytest.mark.parametrize(("size", "clip_norm"), [(2.0**99, 1e-7), (1e30, 1e-30), (1e-5, 1e25)])
@pytest.mark.parametrize("kind", [Outer, Dense])
def test_a_share_keeps_its_bound_at_the_ends_of_the_scale(
    kind: type, size: float, clip_norm: float
) -> None:
    """A weight that is subnormal would be rounded by a large part of itself."""
    x = torch.rand(8, 1, WIDTH, generator=torch.Generator().manual_seed(2))
    x /= x.norm(dim=(1, 2), keepdim=True)
    gradients = held(Outer(x * size, x) if kind is Outer else Dense(x * size))
    for record in range(8):
        clip = normalize(clip_norm)
        weights = clip.weights(gradients.sq_norms()["w"].sqrt()[:, None])[:, 0]
        alone = torch.zeros_like(weights).index_copy_(0, torch.tensor([record]), weights[[record]])
        share = aggregate(gradients, {"w": alone}, bound=clip_norm).sum["w"].double().norm()
        assert 0.98 * clip_norm <= share <= clip_norm * (1 + 1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_linear_models_are_exact_in_any_number(sparse: bool) -> None:
    """They work in float64, where records that round alike still add up."""
    records = 2**17
    x = alike(records, 4).double().numpy()
    rows = scaled_rows(scipy.sparse.csr_array(x) if sparse else x, feature_norm=1.0)
    theta, labels = torch.zeros(1, 4, dtype=torch.float64), torch.ones(records)
    clip = normalize(0.3)

    def total(some: LinearRows) -> Tensor:
        bounded = linear_sum(some, labels[: some.count], theta, loss=logistic(), clip=clip)
        return bounded.sum["coef"]

    moved = total(rows) - total(rows.take(np.arange(1, records)))
    assert abs(float(moved.norm()) - 0.3) <= 0.3 * 1e-3 * SUM_SLACK


def test_federated_clients_are_summed_as_exactly() -> None:
    clients = 3000
    layer = nn.Linear(WIDTH, 1, bias=False)
    algorithm = FedAvg(local_rate=0.1)
    x = alike(clients, 1, WIDTH)

    def total(x: Tensor) -> Tensor:
        objective = Objective(lambda x: layer(x)[:, 0], dict(layer.named_parameters()), ())
        query = ClippedSum(lambda own: [Summand(own, normalize())], vectors=algorithm.updates)
        bounded = query.bounded(BatchPass(objective, x))
        return bounded.sum["weight"].double()

    assert abs(float((total(x) - total(x[1:])).norm()) - 1) <= SUM_SLACK


# --- how many rows --------------------------------------------------------------------------------


def test_the_rows_of_a_product_keep_the_error_and_are_as_many_as_can_be() -> None:
    unit = 2.0**-24
    for totals in (
        [Total(300.0, 2048)],
        [Total(1000.0, 1024), Total(2.0, 64), Total(500.0, 8192)],
        [Total(9e4, 512), Total(1.0, 512), Total(30.0, 512)],
        [Total(0.0, 512), Total(700.0, 512)],
        [Total(150.0, 256), Total(150.0, 256, cheap=True), Total(130.0, 256)],
    ):
        rows = rows_per_product(totals, within=PIECE_ERROR)
        pairs = zip(rows, totals, strict=True)
        off = [(r + math.ceil(t.terms / r) + 3) * unit * t.length if r else 0.0 for r, t in pairs]
        assert math.hypot(*off) <= PIECE_ERROR
        finer = rows_per_product(totals, within=PIECE_ERROR / 4)
        assert all(f == DOUBLE or f <= r for f, r in zip(finer, rows, strict=True))
    assert rows_per_product([Total(9e4, 512)], within=PIECE_ERROR) == [DOUBLE]
    assert rows_per_product([Total(1.0, 512, cheap=True)], within=PIECE_ERROR) == [512]
    assert rows_per_product([], within=PIECE_ERROR) == []


def test_what_is_cheap_in_float64_leaves_its_room_to_the_others() -> None:
    both = [Total(200.0, 256), Total(150.0, 256)]
    shared, _ = rows_per_product(both, within=PIECE_ERROR)
    alone, other = rows_per_product([both[0], Total(150.0, 256, cheap=True)], within=PIECE_ERROR)
    assert other == DOUBLE
    assert alone > shared


@pytest.mark.parametrize("rows", [DOUBLE, 16, 100, 4096])
@pytest.mark.parametrize(("terms", "p", "d"), [(700, 3, 5), (700, 130, 200), (300, 5000, 300)])
def test_products_of_any_length_add_up_to_the_same(rows: int, terms: int, p: int, d: int) -> None:
    generator = torch.Generator().manual_seed(0)
    b, a = (torch.randn(terms, n, generator=generator).double() for n in (p, d))
    b, a = (b, a) if rows == DOUBLE else (b.float(), a.float())
    torch.testing.assert_close(
        sum_of_products(b, a, rows=rows).double(), b.double().mT @ a.double(), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("rows", [DOUBLE, 16, 100, 4096])
@pytest.mark.parametrize("width", [1, 700])
def test_rows_of_any_number_add_up_to_the_same(rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(700, generator=generator).double()
    values = torch.randn(700, width, generator=generator)
    torch.testing.assert_close(
        sum_of_rows(w, values, rows=rows).double(), w @ values.double(), rtol=0, atol=1e-3
    )


# --- pieces ---------------------------------------------------------------------------------------


def test_pieces_hold_every_record_once_and_depend_on_public_numbers() -> None:
    rng = Rng.fixed(0)
    assert pieces_for(LARGEST_PIECE, rng) is None
    pieces = pieces_for(10 * LARGEST_PIECE, rng)
    assert pieces is not None and pieces.count == 10
    for records in (0, 1, 20_000):
        dealt = pieces.places(records)
        assert len(dealt) == 10
        assert sorted(i for places in dealt for i in places.tolist()) == list(range(records))
        assert all((places[1:] > places[:-1]).all() for places in dealt)
    sizes = [len(places) for places in pieces.places(100_000)]
    assert min(sizes) > 9_500 and max(sizes) < 10_500
    Pieces(2**14, rng).require_few_sums(1024)
    for count, micro_batch in ((2**14 + 1, 1024), (2**10, 1)):
        with pytest.raises(Refused, match=r"added up from fewer sums.*larger micro_batch"):
            Pieces(count, rng).require_few_sums(micro_batch)


class Draws(Pieces):
    """The pieces that two neighbouring batches share: record `without` is left out of them."""

    def places(self, records: int) -> list:  # type: ignore[type-arg]
        full = Pieces(self.count, self.rng).places(records + 1)
        moved = [places[places != WITHOUT] for places in full]
        return [places - (places > WITHOUT) for places in moved]


WITHOUT = 0


@pytest.mark.parametrize(
    ("records", "form"),
    [(8192, None), (3000, recomputed), pytest.param(2**17, None, marks=pytest.mark.slow)],
)
def test_one_record_moves_a_large_dealt_batch_by_its_share_alone(records: int, form) -> None:
    """Under the same draws every other record stays in its piece, and moves up there."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    params = dict(layer.named_parameters())
    x = alike(records, WIDTH) + 1e-3 * varied(records, WIDTH)
    count = math.ceil(records / LARGEST_PIECE)
    rng = Rng.fixed(1)

    def total(x: Tensor, pieces: Pieces | None) -> Tensor:
        execution = Execution() if form is None else Execution(form=form)
        work = BatchPass(
            Objective(lambda x: layer(x).sum(1), params, ()),
            x,
            groups=per_layer,
            execution=execution,
            expected=normalize(),
            pieces=pieces,
        )
        query = ClippedSum(lambda here: [Summand(here, normalize())])
        return query.bounded(work).sum["weight"].double()

    full = total(x, Pieces(count, rng))
    for pieces in (Draws(count, rng), None):
        moved = float((full - total(x[1:], pieces)).norm())
        assert abs(moved - 1) <= (SUM_SLACK if pieces else count * SUM_SLACK)


def test_a_sum_without_a_key_is_exact_for_any_batch() -> None:
    """`clipped_sum` has no key to deal by: it is one piece, in float64 where it must be."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    params = dict(layer.named_parameters())
    x = alike(2**15, WIDTH)

    def total(x: Tensor) -> Tensor:
        bounded = clipped_sum(lambda x: layer(x).sum(1), params, x, clip=normalize())
        return bounded.sum["weight"].double()

    assert abs(float((total(x) - total(x[1:])).norm()) - 1) <= SUM_SLACK
