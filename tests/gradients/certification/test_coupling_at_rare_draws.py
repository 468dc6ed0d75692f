"""Mixing that only rare random draws show is refused; generators go on as if nothing was tested."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compare import private
from torch import Tensor, nn

from hushgrad import Refused
from hushgrad.gradients import per_sample
from hushgrad.gradients.certification.deterministic import STRATA, Seed, WithoutRandomness

MEETING = "depends on other records"


def centred_if(draw: Callable[[], Any]) -> tuple[nn.Linear, Callable[[Tensor], Tensor]]:
    """A loss that centres the batch at some draws."""
    layer = nn.Linear(4, 1)

    def loss(x: Tensor) -> Tensor:
        return (layer(x - x.mean(0) if draw() else x)[:, 0] - 1).square()

    return layer, loss


OWN = torch.Generator().manual_seed(3)
DRAWS: dict[str, Callable[[], Any]] = {
    "rare, low": lambda: torch.rand(()) < 0.005,
    "rare, high": lambda: torch.rand(()) > 0.995,
    "rarer": lambda: torch.rand(()) < 1e-6,
    "a twentieth in the middle": lambda: 0.4 < torch.rand(()) < 0.45,
    "two draws compared": lambda: torch.rand(()) < torch.rand(()),
    "three draws in order": lambda: torch.rand(()) < torch.rand(()) < torch.rand(()),
    "both of two are rare": lambda: max(torch.rand(()), torch.rand(())) < 0.003,
    "one option of five": lambda: torch.randint(5, ()) == 2,
    "the largest of five": lambda: torch.rand(5).argmax() == 3,
    "the first of an order": lambda: torch.randperm(5)[0] == 2,
    "one of five classes": lambda: torch.multinomial(torch.ones(5), 1) == 4,
    "half precision": lambda: torch.rand((), dtype=torch.bfloat16) > 0.99,
    "normal": lambda: torch.randn(()) > 3.5,
    "exponential": lambda: torch.empty(()).exponential_() > 6,
    "bernoulli": lambda: torch.bernoulli(torch.tensor(0.001)) == 1,
    "a generator of its own": lambda: torch.rand((), generator=OWN) < 0.005,
    "an order by its own": lambda: torch.randperm(5, generator=OWN)[0] == 1,
    "Python, rare": lambda: random.random() < 0.005,
    "Python, an option": lambda: random.choice("abcde") == "c",
    "NumPy, rare": lambda: np.random.rand() > 0.995,
    "NumPy, an option": lambda: np.random.randint(5) == 3,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_mixing_at_rare_draws_is_refused(draw: Callable[[], Any]) -> None:
    layer, loss = centred_if(draw)
    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), torch.randn(16, 4))


HELD: dict[str, Any] = {
    "Random": random.Random(4).random,
    "Generator": np.random.default_rng(5).random,
    "RandomState": np.random.RandomState(3).rand,
}


@pytest.mark.parametrize("name", HELD)
def test_a_generator_that_cannot_be_set_is_refused(name: str) -> None:
    draw = HELD[name]
    layer, loss = centred_if(lambda: draw() < 0)
    with pytest.raises(Refused, match=rf"draws from a {name} of its own.*draw with torch"):
        per_sample(loss, private(layer), torch.randn(16, 4))


class Holds(nn.Module):
    """Has a generator, and draws from it or not."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.layer, self.rng, self.uses = nn.Linear(4, 2), random.Random(0), uses

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + self.rng.random() if self.uses else 2)


@pytest.mark.parametrize("uses", [True, False])
def test_a_generator_of_the_model_is_refused_where_it_is_used(uses: bool) -> None:
    model = Holds(uses)
    args = (lambda x: model(x).square().sum(1), private(model), torch.randn(16, 4))
    if not uses:
        per_sample(*args, modules=(model,))
        return
    with pytest.raises(Refused, match="draws from a Random of its own"):
        per_sample(*args, modules=(model,))


def test_draws_that_couple_nothing_are_allowed_and_generators_go_on() -> None:
    """One draw for all records is theirs in common, and moves none by another."""
    layer = nn.Linear(4, 2)

    def loss(x: Tensor) -> Tensor:
        noise = torch.randn_like(x) + torch.rand((), generator=OWN)
        scale = random.random() + np.random.rand() + random.gauss(0, 1) + np.random.randn()
        return (layer(x + noise) * scale).square().sum(1)

    x = torch.randn(16, 4)
    numpy_, own = np.random.get_state(), OWN.get_state()
    assert per_sample(loss, private(layer), x).form == "traced"
    after = np.random.get_state()[1].tolist(), OWN.get_state()
    # Certification moved none of them, the step's own pass did. (Not asked of Python's, which
    # the checks of types draw from while the tests run.)
    np.random.set_state(numpy_)
    OWN.set_state(own)
    np.random.rand(), np.random.randn(), torch.rand((), generator=OWN)
    assert np.random.get_state()[1].tolist() == after[0]
    assert torch.equal(OWN.get_state(), after[1])


def test_seeds_meet_every_share_of_what_one_number_can_be() -> None:
    def draw(_: Any) -> Tensor:
        return torch.cat([torch.rand(1), torch.rand(1), torch.rand(3)])

    drawn = []
    for seed in range(STRATA):
        with WithoutRandomness(Seed(seed)) as neutral:
            drawn.append(neutral.choosing_draws(draw)(None))
            assert torch.equal(neutral.choosing_draws(draw)(None), drawn[-1])
    first, second, *vectors = torch.stack(drawn).T
    shares = torch.arange(STRATA) / STRATA + 0.5 / STRATA
    assert torch.allclose(first.sort().values, shares)
    assert torch.allclose(second.sort().values, shares)
    assert not torch.equal(first, second)
    assert all(len(column.unique()) == STRATA for column in vectors)


@pytest.mark.parametrize("quantile", [2**-24, 0.5, 1 - 2**-24])
def test_a_forced_generator_comes_to_an_end(quantile: float) -> None:
    """Some draws are made by trying again until one fits."""

    def draw(_: Any) -> Tensor:
        found = torch.tensor([random.random(), np.random.rand()], dtype=torch.float64)
        for n in range(1, 40):
            assert 0 <= random.randrange(n) < n
            assert 0 <= np.random.randint(n) < n
            assert abs(random.gauss(0, 1)) < 9 and abs(np.random.randn()) < 9
        return found

    with WithoutRandomness(quantile) as neutral:
        for _ in range(2):
            found = neutral.choosing_draws(draw)(None).tolist()
            assert found == pytest.approx([quantile] * 2, abs=1e-7)
    assert neutral.drew
