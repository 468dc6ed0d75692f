"""Couplings too weak for a tolerance, or that few batches show, are seen in a record's bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from compare import check, private
from torch import Tensor, nn

from hushgrad import Refused
from hushgrad.gradients import auto, per_sample, traced
from hushgrad.gradients.probes import beside_variations, variations
from zoo.small import mlp

MEETING = "depends on other records"


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_branch_on_the_sign_of_a_sum_over_the_batch_is_refused(sign: float) -> None:
    """Where all records have one sign, only a loud record of the other turns it."""
    model = mlp(5, 7, 3)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum(1) * (2.0 if x.sum() > 0 else 1.0)

    for _ in range(4):  # the records that are tried are drawn anew
        with pytest.raises(Refused, match=MEETING):
            per_sample(loss, private(model), sign * torch.rand(16, 5), modules=(model,))


@pytest.mark.parametrize("strength", [1e-14, 0.0])
def test_a_coupling_too_weak_for_any_loud_record_is_refused(strength: float) -> None:
    """A record of 1e30 would still move the others, and one that is nan would, at no strength."""
    model = mlp(5, 7, 3)

    def loss(x: Tensor) -> Tensor:
        h = model[0](x)
        return model[2](model[1](h + strength * h.mean(0).detach())).square().sum(1)

    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(model), torch.randn(16, 5), modules=(model,))


def test_a_mask_dropped_where_no_record_needs_it_is_refused() -> None:
    """All records of the first batch are full; the first that is not would move all others."""
    model = mlp(5, 7, 3)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = batch
        if not bool(mask.all()):
            x = x * mask * (1 + 1e-6)
        return model(x).square().sum(1)

    batch = (torch.randn(16, 5), torch.ones(16, 5, dtype=torch.long))
    with pytest.raises(Refused, match="runs other operations beside other records"):
        per_sample(loss, private(model), batch, modules=(model,), form=traced)
    assert per_sample(loss, private(model), batch, modules=(model,)).form == "loop"


def test_where_others_move_only_the_last_bits_each_record_is_run_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where a record stands in a sorted batch moves its rounding, which no bound covers."""
    said = re.compile(r"if only by rounding|other last bits")
    model = mlp(5, 7, 3).double()

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum(1) + 1e-13 * (x > 0).double().sum()

    x = torch.randn(16, 5, dtype=torch.float64)
    with pytest.raises(Refused, match=said.pattern):
        per_sample(loss, private(model), x, modules=(model,), form=traced)
    assert check(loss, model, x, form=auto).form == "loop"
    assert said.search(caplog.text)


def test_varied_labels_are_labels() -> None:
    """-100 says that there is none; what lies between it and a class is neither."""
    labels = torch.tensor([[-100, 3], [7, 3], [3, -100], [7, 7]])
    for batch in (variations(labels, seed=1), beside_variations(labels)):
        assert set(batch.flatten().tolist()) <= {-100, 3, 7}


WEAK: dict[str, Callable[[Tensor], Tensor]] = {
    "a hundred thousandth of the largest": lambda h: h + 1e-5 * h.amax(0).detach(),
    "a hundred millionth of the mean": lambda h: h + 1e-8 * h.mean(0),
    "two hundredths in bfloat16": lambda h: (h.bfloat16() + 0.02 * h.bfloat16().amax(0)).float(),
}


@pytest.mark.parametrize("couple", WEAK.values(), ids=WEAK)
def test_a_weak_coupling_is_seen_beside_loud_records(couple: Callable[[Tensor], Tensor]) -> None:
    layer = nn.Linear(4, 3)
    batch = (torch.randn(64, 4), torch.randint(3, (64,)))

    def loss(b: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(couple(layer(b[0])), b[1], reduction="none")

    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), batch)
