"""What starts to mix after certification is refused at the next test; a change is seen at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import private
from torch import Tensor, nn
from uses import squared

from hushgrad import Refused
from hushgrad.gradients import auto, dense, loop, per_sample

FORMS = pytest.mark.parametrize("form", [auto, dense, loop], ids=["auto", "dense", "loop"])


class Switch:
    """What a certificate does not know of: the attribute of an object that the loss reads."""

    mixing = False


@FORMS
@pytest.mark.parametrize(("clean", "caught"), [(1, 0), (2, 0), (3, 1), (5, 3), (6, 2)])
def test_a_model_that_starts_mixing_is_caught_at_the_next_test(
    clean: int, caught: int, form: Any
) -> None:
    """Call 1 certifies; the calls after it are numbered 1, 2, ... and 1, 2, 4, 8 are tested."""
    switch, layer = Switch(), nn.Linear(3, 5)

    def loss(x: Tensor) -> Tensor:
        h = layer(x)
        return (h - h.mean(0) if switch.mixing else h).square().sum(1)

    for _ in range(clean):
        per_sample(loss, private(layer), torch.randn(8, 3), form=form)
    switch.mixing = True
    for _ in range(caught):
        per_sample(loss, private(layer), torch.randn(8, 3), form=form)
    with pytest.raises(Refused, match="depends on other records"):
        per_sample(loss, private(layer), torch.randn(8, 3), form=form)


def test_a_nan_record_neither_stops_a_test_nor_counts() -> None:
    layer = nn.Linear(3, 5)
    for _ in range(5):
        batch = torch.randn(4, 3)
        batch[1] = torch.nan
        found = per_sample(squared(layer), private(layer), batch)
        assert found.sq_norms()["weight"].isfinite().tolist() == [True, False, True, True]
        weights = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
        sums = found.weighted_sum(dict.fromkeys(("weight", "bias"), weights))
        alone = per_sample(squared(layer), private(layer), batch[[0, 2, 3]])
        ones = torch.ones(3, dtype=torch.float64)
        exact = alone.weighted_sum(dict.fromkeys(("weight", "bias"), ones))
        torch.testing.assert_close(sums, exact)


MEETING = "depends on other records"


@pytest.mark.parametrize("flipped", [5, 40])
def test_what_starts_to_mix_is_seen_within_sixteen_steps(flipped: int) -> None:
    layer, seen = nn.Linear(3, 5), []

    class Mixing:
        on = False

    def loss(x: Tensor) -> Tensor:
        return layer(x - x.mean(0) if Mixing.on else x).square().sum(1)

    def steps() -> None:
        for step in range(1000):
            Mixing.on = step >= flipped
            per_sample(loss, private(layer), torch.randn(8, 3))
            seen.append(step)

    with pytest.raises(Refused, match=MEETING):
        steps()
    assert flipped <= len(seen) <= flipped + 16


class Keeps(nn.Module):
    """Writes through `.data`, from some pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(3, 5), nn.Parameter(torch.zeros(60, 50), False)
        self.register_buffer("mean", torch.zeros(3))
        self.memory, self.pair = torch.zeros(4, 3), [torch.zeros(3), None]
        self.write: Callable[[Keeps, Tensor], object] = lambda model, x: None

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x.detach())
        return self.layer(x).square().sum(1)


BANK = torch.zeros(3)
LATER: dict[str, tuple[Callable[[Keeps, Tensor], object], str]] = {
    "parameter": (lambda m, x: m.layer.weight.data.add_(x.mean()), "weight"),
    "one entry": (lambda m, x: m.frozen.data[3, 4].fill_(x.mean()), "frozen"),
    "moved": (lambda m, x: m.frozen.data.copy_(m.frozen.data.roll(8)), "frozen"),
    "another tensor": (lambda m, x: setattr(m.frozen, "data", m.frozen.data + x.mean()), "frozen"),
    "buffer": (lambda m, x: m.mean.data.copy_(x.mean(0)), "mean"),
    "through NumPy": (lambda m, x: m.mean.numpy().fill(float(x.mean())), "mean"),
    "attribute": (lambda m, x: m.memory.copy_(x[:4]), "memory"),
    "attribute through data": (lambda m, x: m.memory.data.copy_(x[:4]), "memory"),
    "list": (lambda m, x: m.pair[0].data.copy_(x[0]), "pair 0"),  # type: ignore[union-attr]
    "what the loss holds": (lambda m, x: BANK.data.copy_(x[0]), "that the loss refers to"),
}


@pytest.mark.parametrize(("write", "name"), LATER.values(), ids=LATER)
def test_a_write_between_two_tests_is_refused(
    write: Callable[[Keeps, Tensor], object], name: str
) -> None:
    model = Keeps()
    with torch.no_grad():
        model.frozen.normal_()

    def loss(x: Tensor) -> Tensor:
        return model(x) + 0 * BANK.sum()

    def step() -> None:
        per_sample(loss, private(model), torch.randn(8, 3), modules=(model,))

    for _ in range(6):
        step()
    model.write = write
    with pytest.raises(Refused, match=rf"wrote .*{name}"):
        step()


def test_what_is_kept_from_batch_to_batch_is_seen_at_certification() -> None:
    layer, kept = nn.Linear(3, 5), [torch.zeros(3)]

    def loss(x: Tensor) -> Tensor:
        before, kept[0] = kept[0], x.detach().abs().amax(0)
        return layer(x + 1e-6 * before).square().sum(1)

    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), torch.randn(16, 3))


def _scaled(layer: nn.Module, beta: float) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        y = layer(x)[:, 0]
        return (y - beta * y.mean().detach() if beta else y).square()

    return loss


def _default(layer: nn.Module, inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor, inner: Callable[[Tensor], Tensor] = inner) -> Tensor:
        return inner(layer(x)).square().sum(1)

    return loss


class Scored:
    """A loss that is an object."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.dim = layer, 1

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x).softmax(self.dim).square().sum(1)


def warmed(loss: Callable[[Tensor], Tensor], model: nn.Module) -> None:
    """Six steps: the next test is at the eighth."""
    for _ in range(6):
        per_sample(loss, private(model), torch.randn(16, 4), modules=(model,))


def test_a_number_that_was_zero_is_seen_to_change() -> None:
    layer = nn.Linear(4, 1)
    warmed(_scaled(layer, 0.0), layer)
    with pytest.raises(Refused, match=MEETING):
        per_sample(_scaled(layer, 1.0), private(layer), torch.randn(16, 4), modules=(layer,))


def test_another_function_as_a_default_is_seen() -> None:
    layer = nn.Linear(4, 3)
    warmed(_default(layer, lambda h: h - h.mean(1, True)), layer)
    mixing = _default(layer, lambda h: h - h.mean(0, True))
    with pytest.raises(Refused, match=MEETING):
        per_sample(mixing, private(layer), torch.randn(16, 4), modules=(layer,))


def test_a_changed_attribute_of_an_object_is_seen() -> None:
    layer = nn.Linear(4, 3)
    loss = Scored(layer)
    warmed(loss, layer)
    loss.dim = 0
    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), torch.randn(16, 4), modules=(layer,))


def test_a_changed_entry_of_a_dictionary_is_seen() -> None:
    layer, options = nn.Linear(4, 3), {"dim": 1}

    def loss(x: Tensor) -> Tensor:
        return layer(x).softmax(options["dim"]).square().sum(1)

    warmed(loss, layer)
    options["dim"] = 0
    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), torch.randn(16, 4), modules=(layer,))


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def _exchanged(model: nn.Sequential) -> None:
    model[1] = Centre()


def _hooked(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda m, x, y: y - y.mean(0))


def _hooked_before(model: nn.Sequential) -> None:
    model[0].register_forward_pre_hook(lambda m, x: (x[0] - x[0].mean(0),))


@pytest.mark.parametrize("change", [_exchanged, _hooked, _hooked_before])
def test_a_changed_part_of_the_model_is_seen(change: Callable[[nn.Sequential], None]) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Identity())

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum(1)

    warmed(loss, model)
    change(model)
    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(model), torch.randn(16, 4), modules=(model,))
