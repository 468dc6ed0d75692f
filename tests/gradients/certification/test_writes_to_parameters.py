"""A pass that writes to a parameter is refused, and an embedding that renormalises its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import check, private
from torch import Tensor, nn
from uses import squared

from hushgrad import Refused
from hushgrad.gradients import auto, dense, loop, per_sample, traced

FORMS = pytest.mark.parametrize("form", [auto, dense, loop], ids=["auto", "dense", "loop"])


class Holder(nn.Module):
    """A layer beside a frozen parameter, and a forward pass that writes one of them."""

    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(3, 5), write
        self.kept = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x.detach())
        return self.layer(x)


def _in_place(m: Any, x: Tensor) -> None:
    with torch.no_grad():
        m.layer.bias.add_(1e-7 * x.mean())


def _by_data(m: Any, x: Tensor) -> None:
    m.layer.bias.data.add_(1e-7 * x.mean())


def _by_new_data(m: Any, x: Tensor) -> None:
    m.layer.bias.data = m.layer.bias.data + 1e-7 * x.mean()


def _frozen_by_data(m: Any, x: Tensor) -> None:
    m.kept.data.add_(x.mean(0))


def _frozen_in_place(m: Any, x: Tensor) -> None:
    m.kept.copy_(x.mean(0))


WRITTEN: dict[str, tuple[Callable[[Any, Tensor], None], str]] = {
    "private, in place": (_in_place, "layer.bias"),
    "private, through data": (_by_data, "layer.bias"),
    "private, new data": (_by_new_data, "layer.bias"),
    "frozen, through data": (_frozen_by_data, "kept"),
    "frozen, in place": (_frozen_in_place, "kept"),
}


@FORMS
@pytest.mark.parametrize(("write", "name"), WRITTEN.values(), ids=WRITTEN)
def test_a_forward_pass_that_writes_a_parameter_is_refused(
    write: Callable[[Any, Tensor], None], name: str, form: Any
) -> None:
    """The steps are too small to show in the loss: what is written must be seen itself."""
    model = Holder(write)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(
        Refused, match=f"forward pass wrote {name}|{name} .*written|writes .*{name}"
    ):
        per_sample(squared(model), private(model), torch.randn(8, 3), form=form, modules=(model,))
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]), n


def test_writing_a_parameter_into_a_tensor_is_exact() -> None:
    """`h[:, 0] = token` and `out=`: refused, or exact in another form."""
    token = nn.Parameter(torch.randn(3))

    def loss(x: Tensor) -> Tensor:
        h = x.clone()
        h[:, 0] = token
        return h.square().sum((1, 2)) + (h[:, 0] * h[:, 1]).sum(1)

    with pytest.raises(Refused, match=r"__setitem__ writes the parameter token.*torch\.cat"):
        per_sample(loss, {"token": token}, torch.randn(8, 2, 3), form=traced)
    check(loss, {"token": token}, torch.randn(8, 2, 3), form=loop)


def test_an_out_argument_under_no_grad_changes_nothing() -> None:
    scale = nn.Parameter(torch.randn(3))

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            out = torch.empty_like(x)
            torch.mul(x, scale, out=out)
        return (out * (x * scale)).sum(1)

    check(loss, {"scale": scale}, torch.randn(8, 3), form=auto)


@FORMS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 0.1}, "max_norm"),
        ({"max_norm": 1e6}, "max_norm"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq|depends on other records|differs"),
    ],
    ids=["max_norm", "large max_norm", "scale_grad_by_freq"],
)
def test_an_embedding_that_couples_its_records_is_refused(
    options: dict[str, Any], message: str, form: Any
) -> None:
    table = nn.Embedding(10, 3, **options)
    before = table.weight.detach().clone()
    with pytest.raises(Refused, match=message):
        per_sample(
            squared(table), private(table), torch.randint(10, (8, 4)), form=form, modules=(table,)
        )
    assert torch.equal(table.weight, before)
