"""Mixing in some random draws is refused; draws for each record are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compare import private
from torch import Tensor, nn

from hushgrad import Refused
from hushgrad.gradients import per_sample
from hushgrad.gradients.certification.deterministic import WithoutRandomness

MEETING = "depends on other records"


class Sometimes(nn.Module):
    """Centres the batch in some of its passes."""

    def __init__(self, draw: Callable[[], Tensor]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 1), draw

    def forward(self, x: Tensor) -> Tensor:
        if self.draw():
            x = x - x.mean(0)
        return self.layer(x)[:, 0]


DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand, low": lambda: torch.rand(()) < 0.3,
    "rand, high": lambda: torch.rand(()) > 0.7,
    "randn": lambda: torch.randn(()) > 1.0,
    "bernoulli": lambda: torch.bernoulli(torch.tensor(0.2)) == 1,
    "randint": lambda: torch.randint(0, 10, ()) == 9,
    "uniform_": lambda: torch.empty(()).uniform_(-1, 1) < -0.5,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_mixing_in_some_random_draws_is_refused(draw: Callable[[], Tensor]) -> None:
    model = Sometimes(draw)
    with pytest.raises(Refused, match=MEETING):
        per_sample(lambda x: (model(x) - 1).square(), private(model), torch.randn(16, 4))


def test_noise_scaled_by_the_batch_is_refused() -> None:
    layer = nn.Linear(4, 1)

    def loss(x: Tensor) -> Tensor:
        return layer(x + torch.randn_like(x) * x.abs().amax(0))[:, 0].square()

    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), torch.randn(16, 4))


@pytest.mark.parametrize("quantile", [0.01, 0.5, 0.99])
def test_draws_are_the_quantile_asked_for(quantile: float) -> None:
    with WithoutRandomness(quantile) as neutral:
        assert not neutral.drew
        assert torch.rand(3).tolist() == pytest.approx([quantile] * 3)
        assert torch.randint(5, 105, (2,)).tolist() == [int(5 + 100 * quantile)] * 2
        assert neutral.drew


def test_time_steps_drawn_for_each_record_are_allowed() -> None:
    """As diffusion models draw them."""
    layer = nn.Linear(4, 4)

    def loss(x: Tensor) -> Tensor:
        t = torch.randint(0, 100, (len(x),))
        return (layer(x) * (t[:, None] / 100)).square().sum(1)

    assert per_sample(loss, private(layer), torch.randn(16, 4), modules=(layer,)).form == "traced"
