"""Mixing that depends on a record's place or on the size of the batch is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compare import private
from torch import Tensor, nn

from hushgrad import Refused
from hushgrad.gradients import per_sample
from hushgrad.gradients.observed import observe
from hushgrad.gradients.probes import irregular, replaced_places

MEETING = "depends on other records"


def halves(x: Tensor) -> Tensor:
    n = len(x) // 2
    return torch.cat([x[:n] + 0.1 * x[n : 2 * n], x[n:]])


def pairs(x: Tensor) -> Tensor:
    if len(x) % 2:
        return x
    two = x.unflatten(0, (-1, 2))
    return (two + 0.1 * two.flip(1)).flatten(0, 1)


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "half of an even batch away": lambda x: (
        x if len(x) % 2 else 0.5 * x + 0.5 * x.roll(len(x) // 2, 0)
    ),
    "weakly": lambda x: x if len(x) % 2 else x + 1e-9 * x.roll(len(x) // 2, 0),
    "two away": lambda x: x + 0.1 * x.roll(2, 0) if len(x) % 2 == 0 else x,
    "four away": lambda x: x + 0.1 * x.roll(4, 0) if len(x) % 4 == 0 else x,
    "the order reversed": lambda x: x + 0.1 * x.flip(0) if len(x) % 2 == 0 else x,
    "halves": halves,
    "pairs": pairs,
    "the first sees the last": lambda x: torch.cat([x[:1] + 1e-3 * x[-1:], x[1:]]),
    "the last sees the first, weakly": lambda x: torch.cat([x[:-1], x[-1:] + 1e-8 * x[:1]]),
    "beyond twelve": lambda x: x - x.mean(0) if len(x) > 12 and len(x) % 2 == 0 else x,
}


@pytest.mark.parametrize("size", [8, 16, 24])
@pytest.mark.parametrize("mix", PLACES.values(), ids=PLACES)
def test_mixing_by_place_is_refused(mix: Callable[[Tensor], Tensor], size: int) -> None:
    layer = nn.Linear(3, 5)
    with pytest.raises(Refused, match=MEETING):
        per_sample(lambda x: layer(mix(x)).square().sum(1), private(layer), torch.randn(size, 3))


def test_mixing_at_a_size_between_those_tested_is_refused() -> None:
    layer = nn.Linear(3, 5)

    def step(size: int) -> None:
        per_sample(
            lambda x: layer(x - x.mean(0) if len(x) == 48 else x).square().sum(1),
            private(layer),
            torch.randn(size, 3),
        )

    for size in (64, 64, 64, 40, 56):
        step(size)
    with pytest.raises(Refused, match=MEETING):
        step(48)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_probes_have_no_period(count: int) -> None:
    for size in (8, 11, 13, 16, 24, 40, 64, 128, 256):
        places = irregular(count, size)
        assert set(places.tolist()) == set(range(count))
        assert places[0] != places[-1]
        kinds = [replaced_places(size, variant) for variant in range(3)]
        assert torch.equal(kinds[0], ~kinds[1])
        assert not kinds[0][0] and kinds[0][-1]
        for shift in range(1, size):
            moved = places.roll(shift) != places
            assert bool(moved.any()), (size, shift)
            assert any(bool((k.roll(shift) & ~k).any()) for k in kinds), (size, shift)


def test_a_watched_value_that_depends_on_a_record_far_away_is_refused() -> None:
    x = torch.randn(32, 3)
    with pytest.raises(Refused, match="depends on its own record alone"):
        observe(lambda b: (b + b.roll(len(b) // 2, 0)).sum(1), x, test=True)
