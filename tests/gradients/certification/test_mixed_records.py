"""A loss that mixes the records of a batch is refused, whatever its form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import private
from torch import Tensor, nn
from uses import squared, untouched

from hushgrad import Refused
from hushgrad.gradients import auto, dense, loop, per_sample, traced

FORMS = pytest.mark.parametrize("form", [auto, dense, loop], ids=["auto", "dense", "loop"])


def _contrastive(h: Tensor) -> Tensor:
    h = F.normalize(h, dim=1)
    return F.cross_entropy(h @ h.mT, torch.arange(len(h)), reduction="none")


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": lambda h: (h - h.mean(0)).square().sum(1),
    "a little": lambda h: h.square().sum(1) + 0.01 * h.mean(),
    "normalised": lambda h: h.square().sum(1) / h.square().sum(),
    "by a detached sum": lambda h: h.square().sum(1) / h.detach().square().sum(),
    "by the batch size": lambda h: h.square().sum(1) / len(h),
    "contrastive": _contrastive,
    "softmax over the batch": lambda h: -F.log_softmax(h, 0).sum(1),
    "softmax over a swapped dimension": lambda h: h.mT.softmax(1).mT.square().sum(1),
    "largest": lambda h: h.square().sum(1) + h.max(),
    "neighbour": lambda h: (h * h.roll(1, 0)).sum(1),
    "running sum": lambda h: h.cumsum(0).square().sum(1),
    "rank": lambda h: h.square().sum(1) * (1 + h[:, 0].argsort().argsort()),
    "place": lambda h: h.square().sum(1) * torch.arange(1, 1 + len(h)),
}


@pytest.mark.parametrize("size", [1, 2, 8, 9])
@pytest.mark.parametrize("name", MIXING)
def test_mixed_records_are_refused(name: str, size: int) -> None:
    layer = nn.Linear(3, 5)
    with pytest.raises(Refused, match=r"depends on other records: in a batch it is not what"):
        per_sample(lambda x: MIXING[name](layer(x)), private(layer), torch.randn(size, 3))
    assert untouched(layer)


@FORMS
def test_mixed_records_are_refused_in_every_form(form: Any) -> None:
    layer = nn.Linear(3, 5)
    with pytest.raises(Refused, match="compute each record's loss from that record alone"):
        per_sample(lambda x: _contrastive(layer(x)), private(layer), torch.randn(8, 3), form=form)


def test_mixing_in_the_gradient_only_is_never_silently_wrong() -> None:
    """The value does not depend on the others, the straight-through gradient does."""
    layer = nn.Linear(3, 5)

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] + gradients[0].mean(0)

    def loss(x: Tensor) -> Tensor:
        return Through.apply(layer(x)).square().sum(1)

    with pytest.raises(Refused, match=r"weight|bias"):
        per_sample(loss, private(layer), torch.randn(8, 3), form=traced)


class Capacity(nn.Module):
    """Drops what exceeds its capacity, as a mixture of experts may."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.layer, self.capacity = nn.Linear(3, 5), capacity

    def forward(self, x: Tensor) -> Tensor:
        kept = (torch.arange(len(x)) < self.capacity).unsqueeze(1)
        return self.layer(x) * kept


@FORMS
def test_a_capacity_shows_at_the_largest_batch_only(form: Any) -> None:
    model = Capacity(30)
    loss, params = squared(model), private(model)
    per_sample(loss, params, torch.randn(8, 3), form=form, modules=(model,))
    per_sample(loss, params, torch.randn(24, 3), form=form, modules=(model,))
    with pytest.raises(Refused, match=r"depends on other records.*in a batch it .*a limit over"):
        per_sample(loss, params, torch.randn(40, 3), form=form, modules=(model,))
