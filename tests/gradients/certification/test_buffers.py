"""Buffers: those that records write are refused, counters are allowed."""

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


class Writes(nn.Module):
    """A linear layer whose forward pass writes a buffer."""

    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(3, 5), write
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x.detach())
        return self.layer(x)


def _replace(m: Any, x: Tensor) -> None:
    m.seen = 0.9 * m.seen + x.mean(0)


def _through_data(m: Any, x: Tensor) -> None:
    m.seen.data.add_(x.mean(0))


def _new_data(m: Any, x: Tensor) -> None:
    m.seen.data = x.mean(0)


def _count_some(m: Any, x: Tensor) -> None:
    m.count += (x[:, 0] > 0).sum()


WRITES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "in place": (lambda m, x: m.seen.add_(x.mean(0)), "seen"),
    "moving average": (lambda m, x: m.seen.lerp_(x.mean(0), 0.01), "seen"),
    "replaced": (_replace, "seen"),
    "through data": (_through_data, "seen"),
    "new data": (_new_data, "seen"),
    "one entry": (lambda m, x: m.seen[:1].copy_(x[0, :1]), "seen"),
    "a count of some records": (_count_some, "count"),
    "a count of the records": (lambda m, x: m.count.add_(len(x)), "count"),
    "a new buffer": (lambda m, x: m.register_buffer("late", x.mean(0)), "late"),
}


@FORMS
@pytest.mark.parametrize(("write", "name"), WRITES.values(), ids=WRITES)
def test_a_buffer_that_holds_records_is_refused(
    write: Callable[[Any, Tensor], None], name: str, form: Any
) -> None:
    model = Writes(write)
    # Four records, two of a sign: no test of all of them can take the count for a constant.
    batch = torch.randn(4, 3).abs() * torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    message = f"forward pass wrote {name}.*leaves without noise.*track_running_stats=False"
    with pytest.raises(Refused, match=message):
        per_sample(squared(model), private(model), batch, form=form, modules=(model,))
    assert model.seen.tolist() == [0.0, 0.0, 0.0]
    assert int(model.count) == 0


def test_a_buffer_that_holds_records_which_are_all_alike_is_refused() -> None:
    model = Writes(WRITES["in place"][0])
    with pytest.raises(Refused, match="forward pass wrote seen"):
        per_sample(squared(model), private(model), torch.ones(8, 3), modules=(model,))


def test_a_buffer_that_is_written_later_is_refused() -> None:
    wait = {"calls": 0}

    def write(m: Any, x: Tensor) -> None:
        if wait["calls"] >= 4:
            m.seen.add_(x.mean(0))

    model = Writes(write)
    for _ in range(4):
        per_sample(squared(model), private(model), torch.randn(8, 3), modules=(model,))
    wait["calls"] = 4
    with pytest.raises(Refused, match="forward pass wrote seen"):
        per_sample(squared(model), private(model), torch.randn(8, 3), modules=(model,))


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_instance_norm_that_tracks_statistics_is_refused(name: str) -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True))
    with pytest.raises(Refused, match=r"forward pass wrote 1.running_.*track_running_stats=False"):
        per_sample(squared(model), private(model), torch.randn(8, 2, 9), modules=(model,))
    fresh = {"running_mean": torch.zeros(4), "running_var": torch.ones(4)}
    assert torch.equal(getattr(model[1], name), fresh[name])


def test_instance_norm_without_statistics_is_exact() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True))
    check(lambda x: model(x).sigmoid().flatten(1).square().sum(1), model, torch.randn(8, 2, 9))


def _tick(m: Any, x: Tensor) -> None:
    m.count += 1


def _tick_anew(m: Any, x: Tensor) -> None:
    m.count = m.count + 1


FREE: dict[str, Callable[[], nn.Module]] = {
    "a counter in place": lambda: Writes(_tick),
    "a counter replaced": lambda: Writes(_tick_anew),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 5)),
}


@FORMS
@pytest.mark.parametrize("make", FREE.values(), ids=FREE)
def test_a_buffer_without_records_is_allowed_at_every_step(
    make: Callable[[], nn.Module], form: Any
) -> None:
    model = make()
    for _ in range(5):  # steps 1, 2 and 4 are tested again
        per_sample(squared(model), private(model), torch.randn(8, 3), form=form, modules=(model,))
    per_sample(squared(model), private(model), torch.randn(17, 3), form=form, modules=(model,))


def test_a_counter_counts_passes_and_not_tests() -> None:
    model = Writes(_tick)
    for _ in range(3):
        per_sample(squared(model), private(model), torch.randn(8, 3), modules=(model,))
    assert int(model.count) == 3


def test_two_modules_may_have_buffers_and_parameters_of_one_name() -> None:
    one, other = Writes(lambda m, x: None), Writes(lambda m, x: None)
    other.layer = nn.Linear(5, 5)
    one.seen.fill_(1.0)
    other.seen.fill_(2.0)
    params = {f"one.{n}": p for n, p in one.named_parameters()}
    params |= {f"other.{n}": p for n, p in other.named_parameters()}
    for _ in range(3):
        per_sample(
            squared(lambda x: other(one(x))), params, torch.randn(8, 3), modules=(one, other)
        )
    assert one.seen.tolist() == [1.0] * 3
    assert other.seen.tolist() == [2.0] * 3


@pytest.mark.parametrize("writer", [0, 1])
def test_each_of_two_modules_with_one_name_is_watched(writer: int) -> None:
    modules = [Writes(lambda m, x: None), Writes(lambda m, x: None)]
    modules[1].layer = nn.Linear(5, 5)
    modules[writer].write = lambda m, x: m.seen.add_(x.sum())
    params = {f"{i}.{n}": p for i, m in enumerate(modules) for n, p in m.named_parameters()}
    with pytest.raises(Refused, match=r"forward pass wrote .*seen"):
        per_sample(
            squared(lambda x: modules[1](modules[0](x))), params, torch.randn(8, 3), modules=modules
        )


class Observing(nn.Module):
    """Buffers that ordinary records leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("outliers", torch.zeros(()))
        self.register_buffer("largest", torch.tensor(100.0))

    def forward(self, x: Tensor) -> Tensor:
        self.outliers.add_((x.abs() > 50).sum())
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return self.layer(x)


@pytest.mark.parametrize("form", [traced, loop], ids=str)
def test_what_rare_records_write_to_a_buffer_is_undone(form: Any) -> None:
    model = Observing()

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum(1)

    for _ in range(4):
        per_sample(loss, private(model), torch.randn(16, 4), modules=(model,), form=form)
    batch = torch.randn(16, 4)
    batch[-1] = 1234.0
    per_sample(loss, private(model), batch, modules=(model,), form=form)
    assert (model.outliers.item(), model.largest.item()) == (0.0, 100.0)
