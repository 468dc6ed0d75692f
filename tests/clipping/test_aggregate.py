"""The bounded sum, how a batch is cut, and how many records fit into memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hushgrad import Bounded, Execution, Relation, Rng, clipped_sum
from hushgrad.clipping.aggregate import SUM_SLACK, aggregate
from hushgrad.clipping.groups import per_layer
from hushgrad.clipping.pieces import Pieces
from hushgrad.clipping.rules import abadi
from hushgrad.gradients import Form, dense, loop, per_sample, traced
from hushgrad.run.execution import fitting_micro_batch
from hushgrad.types import Loss


@pytest.mark.parametrize(
    ("relation", "times"),
    [(Relation.ADD_REMOVE, 1), (Relation.REPLACE_ONE, 2), (Relation.ZERO_OUT, 1)],
)
def test_sensitivity_follows_the_relation(relation: Relation, times: int) -> None:
    assert Bounded({}, l2=0.7).sensitivity(relation) == times * 0.7


def test_micro_batches_add_up_under_one_bound() -> None:
    one, other = Bounded({"w": torch.ones(2)}, 0.5), Bounded({"w": torch.full((2,), 3.0)}, 0.5)
    both = one + other
    assert both.l2 == 0.5
    assert both.sum["w"].tolist() == [4.0, 4.0]
    assert one.sum["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "other",
    [Bounded({"w": torch.ones(2)}, 0.6), Bounded({"v": torch.ones(2)}, 0.5), Bounded({}, 0.5)],
    ids=["bound", "name", "nothing"],
)
def test_sums_that_do_not_match_are_not_added(other: Bounded) -> None:
    with pytest.raises(ValueError, match=r"one bound and the same parameters.*same rule and group"):
        Bounded({"w": torch.ones(2)}, 0.5) + other


def test_the_bound_carries_the_slack_of_the_sum() -> None:
    layer = nn.Linear(3, 2)
    params, batch = dict(layer.named_parameters()), torch.randn(5, 3)
    gradients = per_sample(lambda x: layer(x).sum(1), params, batch)
    weights = {name: torch.arange(5.0, dtype=torch.float64) for name in params}
    bounded = aggregate(gradients, weights, bound=2.0)
    assert SUM_SLACK == 4e-3
    assert bounded.l2 == 2.0 * (1 + 4e-3)
    expected = (torch.arange(5.0)[:, None] * batch).sum(0).expand(2, 3)
    torch.testing.assert_close(bounded.sum["weight"], expected)
    assert bounded.sum["bias"].tolist() == [10.0, 10.0]


@pytest.mark.parametrize(
    ("clip_norm", "l2"), [(0.3, 0.3), ([3.0, 4.0], 5.0)], ids=["number", "vector"]
)
def test_a_clipped_sum_carries_its_rules_bound(clip_norm: float | list[float], l2: float) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    bounded = clipped_sum(
        lambda x: model(x).square().sum(1),
        dict(model.named_parameters()),
        torch.randn(8, 3),
        clip=abadi(clip_norm),
        groups=per_layer,
    )
    assert bounded.l2 == pytest.approx(l2 * (1 + SUM_SLACK), rel=1e-12)


# --- execution ---


@pytest.mark.parametrize("bad", [0, -1, -8])
def test_a_bad_micro_batch_is_named(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"expected micro_batch >= 1, got {bad}; leave it out"):
        Execution(micro_batch=bad)


@pytest.mark.parametrize(
    ("size", "micro_batch", "sizes"),
    [
        (7, None, [7]),
        (7, 3, [3, 3, 1]),
        (6, 3, [3, 3]),
        (2, 8, [2]),
        (5, 1, [1] * 5),
        (0, None, [0]),
        (0, 4, [0]),
    ],
)
def test_parts_cover_the_batch_in_order(
    size: int, micro_batch: int | None, sizes: list[int]
) -> None:
    batch = {"x": torch.arange(size * 2).reshape(size, 2), "y": torch.arange(size)}
    found = list(Execution(micro_batch=micro_batch).parts(batch))
    parts = [part for part, _ in found]
    assert sum(share for _, share in found) == pytest.approx(1)
    assert [len(part["y"]) for part in parts] == sizes
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["y"] for part in parts]), batch["y"])


def test_a_large_batch_is_cut_by_its_pieces_first() -> None:
    pieces = Pieces(3, Rng.fixed(0))
    batch = torch.arange(3000.0)[:, None]
    parts = list(Execution(micro_batch=400).parts(batch, pieces=pieces))
    shares = [share for _, share in parts]
    assert sum(shares) == pytest.approx(3)
    assert [len(part) for part, _ in parts].count(400) == 6
    places = torch.cat([part for part, _ in parts]).flatten()
    assert torch.equal(places.sort().values, batch.flatten())
    assert not torch.equal(places, batch.flatten())
    assert [len(part) for part, _ in Execution().parts(torch.zeros(2500, 1))] == [1280, 1220]


def test_sums_of_micro_batches_are_added_in_float64() -> None:
    """In float32 a hundredth of a record would vanish beside ten million."""
    large, small = Bounded({"w": torch.tensor([2.0**24])}, 1.0), Bounded({"w": torch.ones(1)}, 1.0)
    assert (large + small).sum["w"].item() == 2.0**24 + 1


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_an_empty_batch_gives_zeros_under_the_same_bound(micro_batch: int | None) -> None:
    layer = nn.Linear(3, 2)

    def loss(batch: Tensor) -> Tensor:
        raise AssertionError("the loss is not called on an empty batch")

    bounded = clipped_sum(
        loss,
        dict(layer.named_parameters()),
        torch.zeros(0, 3),
        clip=abadi(0.5),
        execution=Execution(micro_batch=micro_batch),
    )
    assert bounded.l2 == 0.5 * (1 + SUM_SLACK)
    assert {name: tuple(x.shape) for name, x in bounded.sum.items()} == {
        "weight": (2, 3),
        "bias": (2,),
    }
    assert all(not x.any() for x in bounded.sum.values())


class Ticking(nn.Linear):
    """Counts its passes."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x)


@pytest.mark.parametrize("form", [traced, dense, loop], ids=str)
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_a_buffer_that_counts_passes_does_not_count_records(
    form: Form, micro_batch: int | None
) -> None:
    model = Ticking()
    for step, size in enumerate((3, 20, 9, 1)):
        clipped_sum(
            lambda x: model(x).square().sum(1),
            dict(model.named_parameters()),
            torch.randn(size, 3),
            modules=(model,),
            execution=Execution(form, micro_batch),
        )
        assert int(model.passes) == step + 1


def test_empty_gradients_add_up_as_others_do() -> None:
    layer = nn.Linear(3, 2)
    params = dict(layer.named_parameters())
    empty = per_sample(lambda x: layer(x).sum(1), params, torch.zeros(0, 3))
    both = 0.5 * empty + empty
    assert all(len(x) == 0 for x in both.sq_norms().values())
    none = dict.fromkeys(params, torch.zeros(0, dtype=torch.float64))
    assert all(not x.any() for x in both.weighted_sum(none).values())


# --- memory ---


def _mlp() -> tuple[Loss, dict[str, nn.Parameter], Tensor]:
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 16))
    return (lambda x: model(x).square().sum(1)), dict(model.named_parameters()), torch.randn(32, 64)


# What one record keeps, in floats: the input, the two activations and their output gradients as
# factors of the two weights (64 + 128, 128 + 16), the biases' gradients (128 + 16), and what tanh
# and the square keep for the way back (128 + 16; tanh's is the second layer's input).
_FLOATS = (64 + 128) + (128 + 16) + (128 + 16) + 16


def test_memory_is_counted_as_by_hand() -> None:
    loss, params, batch = _mlp()
    memory = 4 * _FLOATS * 1024
    found = fitting_micro_batch(loss, params, batch, memory=memory)
    assert 512 <= found <= 2048


def test_a_second_measurement_says_the_same() -> None:
    """Re-tests of a certificate are not part of what a pass keeps."""
    loss, params, batch = _mlp()
    found = {fitting_micro_batch(loss, params, batch, memory=2**20) for _ in range(6)}
    assert max(found) <= 1.1 * min(found)


def test_more_memory_never_fits_fewer_records() -> None:
    loss, params, batch = _mlp()
    fits = [fitting_micro_batch(loss, params, batch, memory=2**k) for k in (16, 17, 19, 22)]
    assert fits == sorted(fits)
    assert len(set(fits)) == len(fits)
    assert all(fit % 8 == 0 and fit >= 8 for fit in fits)


def test_too_little_memory_is_named() -> None:
    loss, params, batch = _mlp()
    with pytest.raises(ValueError, match=r"memory for 8 records, about \d+ bytes, got 100; raise"):
        fitting_micro_batch(loss, params, batch, memory=100)
    with pytest.raises(ValueError, match="at least one record to measure"):
        fitting_micro_batch(loss, params, batch[:0], memory=2**20)


def test_measuring_leaves_the_model_as_it_was() -> None:
    loss, params, batch = _mlp()
    before, state = {n: p.detach().clone() for n, p in params.items()}, torch.get_rng_state()
    fitting_micro_batch(loss, params, batch, memory=2**20)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in params.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_form_is_a_choice_of_execution() -> None:
    loss, params, batch = _mlp()
    whole, slow = (
        clipped_sum(loss, params, batch[:5], execution=execution)
        for execution in (Execution(), Execution(form=loop, micro_batch=2))
    )
    for name in params:
        torch.testing.assert_close(whole.sum[name].double(), slow.sum[name], rtol=2e-3, atol=1e-5)
