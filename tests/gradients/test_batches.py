"""Batches of any size, layout and structure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from compare import FORMS, agree, check, expected, private
from torch import Tensor, nn
from uses import loss_of, weigh

from hushgrad import Refused
from hushgrad.gradients import Form, constant, per_sample
from hushgrad.gradients.constants import unwrap_constants
from zoo.small import perceptron


@FORMS
def test_an_empty_batch_does_not_call_the_loss(form: Form) -> None:
    model = perceptron()

    def loss(x: Tensor) -> Tensor:
        raise AssertionError("called")

    params, batch = private(model), {"x": torch.randn(0, 3), "y": (torch.zeros(0).long(),)}
    gradients = per_sample(loss, params, batch, form=form, modules=(model,))
    assert gradients.batch == 0
    assert gradients.losses.shape == (0,)
    norms = gradients.sq_norms()
    assert {name: tuple(x.shape) for name, x in norms.items()} == dict.fromkeys(params, (0,))
    sums = gradients.weighted_sum(norms)
    assert sums.keys() == params.keys()
    for name, p in params.items():
        assert torch.equal(sums[name], torch.zeros_like(p))
    both = 0.5 * (gradients + gradients)
    assert both.sq_norms().keys() == params.keys()


@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_empty_batch_has_sums_in_a_wide_type(form: Form, dtype: torch.dtype) -> None:
    model = perceptron().to(dtype)
    gradients = per_sample(
        loss_of(model), private(model), torch.zeros(0, 3, dtype=dtype), form=form
    )
    sums = gradients.weighted_sum(gradients.sq_norms())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for x in sums.values()} == {wide}


@FORMS
def test_an_empty_batch_between_others_changes_nothing(form: Form) -> None:
    model = perceptron()
    for size in (5, 0, 3, 0):
        batch = torch.randn(size, 3)
        gradients = per_sample(loss_of(model), private(model), batch, form=form)
        if size:
            agree(gradients, expected(loss_of(model), private(model), batch), private(model))
        assert gradients.batch == size


@FORMS
def test_a_batch_of_one_is_exact(form: Form) -> None:
    model = perceptron()
    for _ in range(4):
        check(loss_of(model), model, torch.randn(1, 3), form=form)


STRIDED: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(5, 3, 6).mT,
    "records last in memory": lambda: torch.randn(6, 3, 5).permute(2, 0, 1),
    "every other record": lambda: torch.randn(10, 6, 3)[::2],
    "every other entry": lambda: torch.randn(5, 12, 6)[:, ::2, ::2],
    "one record expanded": lambda: torch.randn(1, 6, 3).expand(5, -1, -1),
    "one position expanded": lambda: torch.randn(5, 1, 3).expand(-1, 6, -1),
    "one number expanded": lambda: torch.tensor(0.7).expand(5, 6, 3),
    "with an offset": lambda: torch.randn(5 * 18 + 1)[1:].view(5, 6, 3),
    "overlapping windows": lambda: torch.randn(5, 8).unfold(1, 3, 1),
}


@FORMS
@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_inputs_that_are_not_contiguous_are_exact(make: Callable[[], Tensor], form: Form) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    check(loss_of(model), model, make(), form=form)


def test_pictures_with_channels_last_are_exact() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 2))
    model.to(memory_format=torch.channels_last)
    batch = torch.randn(5, 3, 5, 5).to(memory_format=torch.channels_last)
    check(loss_of(model), model, batch)


class Pair(NamedTuple):
    """A batch with names."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Sample:
    """A batch with fields, one of which is no tensor, and declared constant."""

    x: Tensor
    y: Tensor
    unit: str = constant("m")


class Bag(dict[str, Tensor]):
    """A dictionary of a library's own, read by attribute."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


STRUCTURES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda x, y: (x, y), lambda b: b),
    "list": (lambda x, y: [x, y], lambda b: b),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "nested": (
        lambda x, y: {"in": [x, {"more": (x, None)}], "out": (y, constant("name"))},
        lambda b: (b["in"][1]["more"][0], b["out"][0]),
    ),
    "namedtuple": (Pair, lambda b: (b.x, b.y)),
    "dataclass": (Sample, lambda b: (b.x, b.y) if b.unit == "m" else None),
    "own dictionary": (lambda x, y: Bag(x=x, y=y), lambda b: (b.x, b.y)),
}


@FORMS
@pytest.mark.parametrize(("wrap", "read"), STRUCTURES.values(), ids=STRUCTURES)
def test_every_structure_of_a_batch_is_exact(
    wrap: Callable[..., Any], read: Callable[[Any], Any], form: Form
) -> None:
    model = perceptron()

    def loss(batch: Any) -> Tensor:
        x, y = read(batch)
        return F.cross_entropy(model(x), y, reduction="none")

    x, y = torch.randn(5, 3), torch.randint(4, (5,))
    want = expected(lambda b: loss(unwrap_constants(wrap(*b))[0]), private(model), (x, y))
    for _ in range(2):
        gradients = per_sample(loss, private(model), wrap(x, y), form=form, modules=(model,))
        agree(gradients, want, private(model))


class Several(nn.Module):
    """Two inputs, and outputs of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, *, z: Tensor) -> dict[str, Any]:
        h = self.left(x).tanh() + self.right(z).mean(1)
        return {"mean": self.head(h), "states": (h, [h.exp()]), "count": len(h)}


@FORMS
def test_several_inputs_and_outputs_are_exact(form: Form) -> None:
    model = Several()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0], z=batch[1])
        return weigh(out["mean"]) + weigh(out["states"][0]) * weigh(out["states"][1][0])

    check(loss, model, (torch.randn(5, 3), torch.randn(5, 7, 2)), form=form)


@pytest.mark.parametrize("use", ["norms", "sums", "scaled", "added"])
def test_a_batch_written_before_its_gradients_are_used_is_refused(use: str) -> None:
    """A loader may reuse its buffer: norms of one batch would clip another."""
    layer, batch = nn.Linear(16, 16), torch.randn(8, 16)  # eight rows as they are, not copied
    found = per_sample(lambda x: layer(x).square().sum(1), private(layer), batch)
    if use != "norms":
        found.sq_norms()
    batch.mul_(1000)
    ones = dict.fromkeys(private(layer), torch.ones(8, dtype=torch.float64))
    uses = {
        "norms": found.sq_norms,
        "sums": lambda: found.weighted_sum(ones),
        "scaled": lambda: 2.0 * found,
        "added": lambda: found + found,
    }
    with pytest.raises(Refused, match="was written after its gradients were taken"):
        uses[use]()
