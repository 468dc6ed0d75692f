"""Couplings of records that hide: in rare draws, on the way back, at some sizes, in later steps."""

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
from hushgrad.gradients import per_sample, traced
from hushgrad.gradients.certification.deterministic import STRATA, Seed, WithoutRandomness
from hushgrad.gradients.observed import observe
from hushgrad.gradients.probes import irregular, replaced

MEETING = "depends on other records"

# --- draws --------------------------------------------------------------------------------------


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
def test_mixing_at_rare_draws(draw: Callable[[], Any]) -> None:
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
def test_a_generator_of_the_model(uses: bool) -> None:
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
            drawn.append(neutral.calling(draw)(None))
            assert torch.equal(neutral.calling(draw)(None), drawn[-1])
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
            assert neutral.calling(draw)(None).tolist() == pytest.approx([quantile] * 2, abs=1e-7)
    assert neutral.drew


# --- the way back -------------------------------------------------------------------------------


def clipped(g: Tensor, limit: float) -> Tensor:
    return g * (limit / g.norm()).clamp(max=1)


HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "clips at what few records reach": lambda g: clipped(g, 3.0),
    "clips at what loud records reach": lambda g: clipped(g, 1e4),
    "turns the sign": lambda g: g * g.sum().sign(),
    "drops the batch if one is nan": lambda g: torch.where(g.isnan().any(), 0 * g, g),
    "averages a little": lambda g: g + 1e-9 * g.mean(0),
    "first and last": lambda g: torch.cat([g[:1] + 1e-2 * g[-1:], g[1:]]),
    "halves of an even batch": lambda g: (
        g if len(g) % 2 else 0.5 * g + 0.5 * g.roll(len(g) // 2, 0)
    ),
    "at a rare draw": lambda g: clipped(g, 0.1) if torch.rand(()) < 0.005 else g,
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("bounded", [True, False], ids=["cross entropy", "squares"])
def test_a_hook_that_mixes_gradients(hook: Callable[[Tensor], Tensor], bounded: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        h = model[:2](batch[0])
        if h.requires_grad:
            h.register_hook(hook)
        out = model[2](h)
        if bounded:
            return nn.functional.cross_entropy(out, batch[1], reduction="none")
        return out.square().sum(1)

    batch = (torch.randn(16, 6), torch.randint(3, (16,)))
    with pytest.raises(Refused, match=rf"{MEETING}|differs from its one-record run"):
        per_sample(loss, private(model), batch, form=traced)


def test_a_function_that_clips_the_batch_on_the_way_back() -> None:
    layer = nn.Linear(3, 5)

    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return clipped(gradients[0], 100.0)

    def loss(x: Tensor) -> Tensor:
        return Clip.apply(layer(x)).square().sum(1)

    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), torch.randn(8, 3), form=traced)
    assert per_sample(loss, private(layer), torch.randn(8, 3)).form == "loop"


# --- sizes and places ---------------------------------------------------------------------------


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
def test_mixing_by_place(mix: Callable[[Tensor], Tensor], size: int) -> None:
    layer = nn.Linear(3, 5)
    with pytest.raises(Refused, match=MEETING):
        per_sample(lambda x: layer(mix(x)).square().sum(1), private(layer), torch.randn(size, 3))


def test_mixing_at_a_size_between_those_that_were_tested() -> None:
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
        kinds = [replaced(size, variant) for variant in range(3)]
        assert torch.equal(kinds[0], ~kinds[1])
        assert not kinds[0][0] and kinds[0][-1]
        for shift in range(1, size):
            moved = places.roll(shift) != places
            assert bool(moved.any()), (size, shift)
            assert any(bool((k.roll(shift) & ~k).any()) for k in kinds), (size, shift)


def test_a_watched_value_that_depends_on_a_record_half_of_the_batch_away() -> None:
    x = torch.randn(32, 3)
    with pytest.raises(Refused, match="depends on its own record alone"):
        observe(lambda b: (b + b.roll(len(b) // 2, 0)).sum(1), x, test=True)


# --- later steps --------------------------------------------------------------------------------


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
def test_a_write_between_two_tests(write: Callable[[Keeps, Tensor], object], name: str) -> None:
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
