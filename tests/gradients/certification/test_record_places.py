"""A record keeps its bits wherever it stands, or stands where it keeps them, or runs by itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hushgrad import Refused, difference
from hushgrad.gradients import (
    Certificate,
    Form,
    auto,
    certificate_for,
    compiled,
    dense,
    loop,
    per_sample,
    recomputed,
    traced,
)
from hushgrad.gradients.factors import slots
from hushgrad.numerics import same_bits

LAST_BIT = 2.0**-23


class Rounding(torch.autograd.Function):
    """Passes its input on; on the way back each record's gradient is rounded by its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Callable[[int], Tensor]) -> Tensor:
        ctx.up = up
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * (1 + LAST_BIT * ctx.up(len(g)).to(g.dtype)[:, None]), None


class Placed(nn.Module):
    def __init__(self, up: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.up = nn.Linear(64, 32), nn.Linear(32, 16), up

    def forward(self, x: Tensor) -> Tensor:
        hidden = Rounding.apply(torch.relu(self.first(x)), self.up)
        return self.last(hidden).square().sum(1)


def by_place(size: int) -> Tensor:
    return torch.arange(size) // 4 % 3 == 0


def by_size(size: int) -> Tensor:
    return torch.full((size,), size % 16 == 8)


def at_the_end(size: int) -> Tensor:
    """As kernels do, where the last slice of a batch is shorter than the others."""
    return torch.arange(size) >= size // 16 * 16


def test_a_model_whose_last_bits_move_goes_on_record_by_record() -> None:
    model = Placed(by_place)
    params = dict(model.named_parameters())
    gradients = per_sample(model, params, torch.randn(48, 64), form=auto, modules=(model,))
    assert gradients.form == "loop"
    with pytest.raises(Refused, match="other last bits in another part of the batch"):
        per_sample(model, params, torch.randn(48, 64), form=traced, modules=(model,))


@pytest.mark.parametrize("up", [by_size, at_the_end])
def test_a_larger_multiple_keeps_what_a_smaller_one_moves(up: Any) -> None:
    model = Placed(up)
    certificate = certificate_for(
        model, dict(model.named_parameters()), torch.randn(40, 64), form=traced, modules=(model,)
    )
    assert certificate.multiple == 16


@pytest.mark.parametrize("form", [traced, dense])
def test_a_model_that_keeps_its_bits_needs_no_more_room(form: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    certificate = certificate_for(
        lambda x: model(x).square().sum(1),
        dict(model.named_parameters()),
        torch.randn(40, 3, 8, 8),
        form=form,
        modules=(model,),
    )
    assert certificate.form is form
    assert certificate.multiple <= 16


def every_second(size: int) -> Tensor:
    """As products of narrow matrices do, whose rows begin at every second boundary in memory."""
    return torch.arange(size) % 2 == 1


def one_of_four(size: int) -> Tensor:
    return torch.arange(size) % 4 == 3


@pytest.mark.parametrize(("up", "period"), [(every_second, 2), (one_of_four, 4)])
def test_the_period_of_a_model_is_found(up: Any, period: int) -> None:
    model = Placed(up)
    certificate = certificate_for(
        model, dict(model.named_parameters()), torch.randn(40, 64), modules=(model,)
    )
    assert (certificate.form, certificate.multiple) == (traced, 8)
    assert certificate.period == period


@pytest.mark.parametrize("form", [traced, recomputed, compiled], ids=str)
def test_whoever_leaves_moves_no_other_record(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same draws for those who stay; without slots, the same model does move them."""
    model, x = Placed(every_second), torch.randn(21, 64)
    params, residues = dict(model.named_parameters()), torch.randint(2, (21,))
    drawn = dict[int, Tensor]()
    monkeypatch.setattr(
        importlib.import_module(Certificate.__module__),
        "draw_slots",
        lambda n, multiple, period: slots.arrange(drawn[n], multiple, period),
    )

    def taken(kept: list[int], *, placed: bool) -> list[Tensor]:
        drawn[len(kept)] = residues[kept] if placed else torch.arange(len(kept)) % 2
        found = per_sample(model, params, x[kept], form=form, modules=(model,))
        return list(found.sq_norms().values())

    everyone = list(range(21))
    for leaving in (0, 7, 20):
        kept = [i for i in everyone if i != leaving]
        for placed in (True, False) if leaving == 0 else (True,):
            before, after = (taken(some, placed=placed) for some in (everyone, kept))
            same = [same_bits(b[kept], a) for b, a in zip(before, after, strict=True)]
            assert all(same) == placed


@pytest.mark.parametrize("form", [traced, recomputed, compiled, dense, loop], ids=str)
def test_sums_and_norms_are_those_of_the_records_wherever_they_stand(form: Form) -> None:
    model, x = nn.Linear(5, 5), torch.randn(13, 5)  # rounded by place, in products by MKL
    params, weights = dict(model.named_parameters()), torch.rand(13).double()

    def loss(x: Tensor) -> Tensor:
        return torch.tanh(model(x)).square().sum(1)

    found = per_sample(loss, params, x, form=form, modules=(model,))
    exact = per_sample(loss, params, x, form=loop, modules=(model,))
    torch.testing.assert_close(found.losses, exact.losses)
    for name in params:
        torch.testing.assert_close(
            found.sq_norms()[name], exact.sq_norms()[name], rtol=0.02, atol=0
        )
    sums = (g.weighted_sum(dict.fromkeys(params, weights)) for g in (found, exact))
    one, other = sums
    for name in params:
        torch.testing.assert_close(one[name], other[name], check_dtype=False)


def test_gradients_at_two_points_pair_up_wherever_the_records_stand() -> None:
    model, x = Placed(every_second), torch.randn(13, 64)
    params = dict(model.named_parameters())
    new, old = (per_sample(model, params, x, form=traced, modules=(model,)) for _ in range(2))
    apart, whole = difference(new, old).sq_norms(), new.sq_norms()
    assert all(bool((apart[name] <= 1e-8 * whole[name]).all()) for name in params)


@given(
    residues=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    multiple=st.sampled_from([8, 16, 32]),
    data=st.data(),
)
def test_leaving_shifts_others_by_whole_periods(
    residues: list[int], multiple: int, data: st.DataObject
) -> None:
    drawn, leaving = torch.tensor(residues), data.draw(st.integers(0, len(residues) - 1))
    placed = slots.arrange(drawn, multiple, 4)
    assert placed.rows % multiple == 0
    assert len(set(placed.places.tolist())) == placed.records == len(residues)
    assert int(placed.places.max()) < placed.rows
    kept = [i for i in range(len(residues)) if i != leaving]
    if kept:
        moved = slots.arrange(drawn[kept], multiple, 4).places - placed.places[kept]
        assert set(moved.tolist()) <= {0, -4}


def test_draws_are_alike_for_all_records() -> None:
    places = torch.stack([slots.draw_slots(5, 8, 4).places % 4 for _ in range(4000)])
    counts = torch.stack([torch.bincount(column, minlength=4) for column in places.T])
    assert bool(((counts - 1000).abs() < 5 * 1000**0.5).all())


def test_padding_is_wide_enough_for_the_kernels_of_the_model() -> None:
    """The end of a tensor is computed by other code: 8 records of 3 features are nothing else."""
    weight, batch = nn.Parameter(torch.ones(3)), torch.randn(9, 3)
    values = torch.randn(4096, 3)
    by_eights = torch.cat([F.softplus(part) for part in values.split(8)])
    certificate = certificate_for(
        lambda x: (F.softplus(x) * weight).sum(1), {"weight": weight}, batch
    )
    if torch.equal(by_eights, F.softplus(values)):
        pytest.skip("on this processor the kernel ends as it begins")
    assert certificate.multiple > 8
    plain = certificate_for(lambda x: (x * weight).sum(1), {"weight": weight}, batch)
    assert plain.multiple == 8
