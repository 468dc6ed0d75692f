"""Correlated noise: its covariance over steps, its bits, replays and forks, and its refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import dp_accounting as dp
import numpy as np
import pytest
import torch
from numpy import ndarray
from scipy.linalg import toeplitz
from torch import Tensor

from hushgrad.noise import (
    Independent,
    NoiseBuffer,
    NoiseKind,
    Strategy,
    banded,
    banded_inverse,
    correlated,
    gaussian,
    grid,
    laplace,
    mixing,
    release,
    threads,
)
from hushgrad.rng import Rng
from hushgrad.sampling import (
    CyclicPoisson,
    FullBatch,
    Poisson,
    Shuffled,
    Stated,
    TruncatedPoisson,
    WithoutReplacement,
)
from hushgrad.types import Bounded, Refused, Relation, Released

BANDED, INVERSE = banded([0.8, 0.5, -0.3]), banded_inverse([1.0, -0.6, 0.2])
BOTH = pytest.mark.parametrize("strategy", [BANDED, INVERSE], ids=["banded", "inverse"])
STEPS, ENTRIES, SIGMA, L2 = 7, 40_000, 1.5, 0.4


def total(step: int = 0, entries: int = 30, shift: float = 0.0) -> Bounded:
    """A sum that differs from step to step, in two tensors."""
    x = torch.arange(entries) * 0.01 + step + shift
    return Bounded({"w": x, "b": torch.tensor([float(step)])}, L2)


def run(
    strategy: Strategy,
    totals: Sequence[Bounded],
    *,
    past: Sequence[bytes] = (),
    seed: int = 0,
    buffer: NoiseBuffer | None = None,
    sigma: float = SIGMA,
) -> list[Released]:
    """The releases of the steps after those of the tags in `past`."""
    noise, tags, found = correlated(strategy).at(sigma), list(past), []
    for sums in totals:
        step, rng = len(tags), Rng.fixed(seed)
        found.append(release(sums, noise, rng=rng, step=step, past=tags, buffer=buffer))
        tags.append(found[-1].digest)
    return found


def tags_of(releases: Sequence[Released]) -> list[bytes]:
    return [released.digest for released in releases]


def same(one: Released, other: Released) -> bool:
    return one.digest == other.digest and all(
        torch.equal(one.values[n].view(torch.int64), other.values[n].view(torch.int64))
        for n in one.values
    )


def matrix(column: ndarray) -> ndarray:
    return toeplitz(column, np.zeros(len(column)))


def zeros(count: int = STEPS) -> list[Bounded]:
    return [Bounded({"w": torch.zeros(ENTRIES)}, L2)] * count


def noise_of(releases: Sequence[Released]) -> ndarray:
    """One row for each step, of noise ÷ (σ·l2), where the sums were 0."""
    return np.stack([released.values["w"].numpy() for released in releases]) / (SIGMA * L2)


# --- what the noise is ---


@BOTH
def test_the_covariance_over_steps_is_that_of_the_matrix(strategy: Strategy) -> None:
    inverse = matrix(strategy.noising(STEPS))
    expected = inverse @ inverse.T
    noise = noise_of(run(strategy, zeros()))
    sizes = np.sqrt(np.diag(expected))
    off = np.abs(np.cov(noise) - expected) / np.outer(sizes, sizes)
    bound = 5 * math.sqrt(2 / ENTRIES)
    assert off.max() < bound
    for wrong in (0.95**2 * expected, np.diag(np.diag(expected)), np.eye(STEPS)):
        assert (np.abs(np.cov(noise) - wrong) / np.outer(sizes, sizes)).max() > bound
    # C·noise is white, in every entry and at every step.
    white = matrix(strategy.column(STEPS)) @ noise
    assert np.abs(np.cov(white) - np.eye(STEPS)).max() < bound
    assert np.abs(white.mean(1)).max() < 5 / math.sqrt(ENTRIES)
    assert abs(np.corrcoef(white[:, :-1].ravel(), white[:, 1:].ravel())[0, 1]) < 5 / 500


def test_one_band_is_white_noise() -> None:
    """With the draws of independent noise, but tags of its own."""
    noise = noise_of(run(banded([1.0]), zeros()))
    assert np.abs(np.cov(noise) - np.eye(STEPS)).max() < 5 * math.sqrt(2 / ENTRIES)


@BOTH
def test_a_release_lies_on_the_grid_of_its_own_draw(strategy: Strategy) -> None:
    """Whoever knows all earlier noise is left with the noise of this step's draw."""
    step = grid(SIGMA * L2 * strategy.noising(1)[0])
    for released in run(strategy, [total(k) for k in range(4)]):
        for x in released.values.values():
            assert x.dtype == torch.float64
            assert torch.equal(x / step, (x / step).round())


def test_no_noise_is_not_private() -> None:
    for released in run(BANDED, [total(k) for k in range(3)], sigma=0.0):
        assert released.event == dp.NonPrivateDpEvent()
    assert torch.equal(released.values["w"], total(2).sum["w"].double())


@BOTH
def test_a_release_by_itself_is_no_event(strategy: Strategy) -> None:
    """What adds up the events of steps must not find a cheap one."""
    (released,) = run(strategy, [total()])
    assert released.event == dp.NonPrivateDpEvent()


# --- bits ---


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def large(count: int = 4) -> list[Bounded]:
    """Sums in several vectors and pieces, of odd lengths."""
    sizes = {"a": 3, "b": threads.PIECE + 77, "c": 1, "d": 40_001}
    return [
        Bounded({n: torch.full((size,), 0.1 * k) for n, size in sizes.items()}, 1.0)
        for k in range(count)
    ]


@BOTH
@pytest.mark.usefixtures("threads_restored")
def test_neither_threads_nor_machine_code_show(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    totals = large()
    expected = run(strategy, totals)
    torch.set_num_threads(3)
    for one, other in zip(run(strategy, totals), expected, strict=True):
        assert same(one, other)
    monkeypatch.setattr(threads, "CHUNK", 5000)
    monkeypatch.setattr(threads, "PIECE", 15_000)
    monkeypatch.setattr(mixing, "compiled_add_weighted", lambda: None)
    for one, other in zip(run(strategy, totals), expected, strict=True):
        assert same(one, other)


def test_machine_code_is_used_for_large_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(mixing, "compiled_add_weighted", lambda: asked.append(True))
    monkeypatch.setattr(mixing, "is_loaded", lambda: False)
    run(BANDED, [total(0), total(1)])
    assert not asked
    run(BANDED, large(1))
    assert asked


# --- replays and forks ---


@BOTH
def test_a_replay_has_the_same_bits(strategy: Strategy) -> None:
    totals = [total(k) for k in range(STEPS)]
    once = run(strategy, totals)
    for start in range(STEPS):
        again = run(strategy, totals[start:], past=tags_of(once)[:start])
        assert all(map(same, again, once[start:]))


@BOTH
def test_the_buffer_does_not_show(strategy: Strategy) -> None:
    totals, buffer = [total(k) for k in range(STEPS)], NoiseBuffer()
    once = run(strategy, totals, buffer=buffer)
    assert all(map(same, once, run(strategy, totals)))
    # Taken up again by a run that stands elsewhere, by another key, and in the middle.
    for start, seed in [(2, 0), (0, 1), (STEPS - 1, 0), (3, 0)]:
        past = tags_of(run(strategy, totals[:start], seed=seed))
        again = run(strategy, totals[start:], past=past, seed=seed, buffer=buffer)
        assert all(map(same, again, run(strategy, totals, seed=seed)[start:]))


def test_the_buffer_saves_the_replay_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, draw_key = [], mixing.draw_key
    monkeypatch.setattr(
        mixing, "draw_key", lambda rng, step, tag: steps.append(step) or draw_key(rng, step, tag)
    )
    buffer, totals = NoiseBuffer(), [total(k) for k in range(4)]
    once = run(BANDED, totals, buffer=buffer)
    assert steps == [0, 1, 2, 3]
    steps.clear()
    run(BANDED, totals[3:], past=tags_of(once)[:3])
    assert steps == [0, 1, 2, 3]
    steps.clear()
    run(INVERSE, totals[3:], past=tags_of(run(INVERSE, totals[:3])))
    assert steps[-3:] == [1, 2, 3]


def test_the_buffer_shows_nothing_of_what_it_holds() -> None:
    buffer = NoiseBuffer()
    run(BANDED, [total(k) for k in range(5)], buffer=buffer)
    assert repr(buffer) == "NoiseBuffer(2 steps)"


@BOTH
def test_another_sum_gets_a_fresh_draw_and_the_same_part_of_past_ones(strategy: Strategy) -> None:
    once = run(strategy, zeros(5))
    other = Bounded({"w": torch.zeros(ENTRIES)}, L2)
    other.sum["w"][0] = 1e-3
    (fork,) = run(strategy, [other], past=tags_of(once)[:4])
    assert fork.digest != once[4].digest
    weights = strategy.noising(5)
    gap = (fork.values["w"][1:] - once[4].values["w"][1:]).numpy() / (SIGMA * L2)
    # Two independent draws of this step; of what was drawn before nothing is left in it.
    expected = math.sqrt(2) * weights[0]
    assert gap.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * ENTRIES))
    assert gap.std() != pytest.approx(expected * 1.1, rel=0.05)
    for before in noise_of(once[:4]):
        assert abs(np.corrcoef(gap, before[1:])[0, 1]) < 5 / math.sqrt(ENTRIES)


@BOTH
def test_branches_of_a_fork_share_no_draw_even_where_their_sums_agree(strategy: Strategy) -> None:
    """Else the difference of two equal steps would show past sums without any noise."""
    once = run(strategy, zeros(5))
    other = Bounded({"w": torch.zeros(ENTRIES)}, L2)
    other.sum["w"][0] = 1e-3
    branch = run(strategy, [other, *zeros(3)], past=tags_of(once)[:1])
    assert not set(tags_of(branch)) & set(tags_of(once))
    c = matrix(strategy.column(5))
    white, again = c @ noise_of(once), c @ noise_of([once[0], *branch])
    for step in range(1, 5):
        correlation = np.corrcoef(white[step], again[step])[0, 1]
        assert abs(correlation) < 5 / math.sqrt(ENTRIES)
    assert np.corrcoef(white[0], again[0])[0, 1] == pytest.approx(1)


def test_independent_noise_does_not_look_back() -> None:
    one = release(total(), gaussian(1.0), rng=Rng.fixed(0), step=3, past=[bytes(16)])
    assert same(one, release(total(), gaussian(1.0), rng=Rng.fixed(0), step=3))


# --- refusals of a release ---


@BOTH
@pytest.mark.parametrize(
    "change", ["key", "bound", "multiplier", "dtype", "shape", "name", "steps"]
)
def test_a_past_that_is_not_this_runs_is_refused(strategy: Strategy, change: str) -> None:
    totals = [total(k) for k in range(4)]
    tags = tags_of(run(strategy, totals))
    sums, seed, sigma = total(4), 0, SIGMA
    changed: dict[str, Tensor] = dict(sums.sum)
    match change:
        case "key":
            seed = 1
        case "bound":
            sums = Bounded(sums.sum, 2 * L2)
        case "multiplier":
            sigma = 2 * SIGMA
        case "dtype":
            changed["b"] = changed["b"].double()
        case "shape":
            changed["w"] = changed["w"][None]
        case "name":
            changed = {n.upper(): x for n, x in changed.items()}
        case "steps":
            tags = [tags[0], *tags[:3]]
    sums = Bounded(changed, sums.l2)
    with pytest.raises(Refused, match=r"step \d to be one of this run, with the same key"):
        run(strategy, [sums], past=tags, seed=seed, sigma=sigma)


def test_a_past_of_another_matrix_is_refused() -> None:
    tags = tags_of(run(BANDED, [total(k) for k in range(4)]))
    with pytest.raises(Refused, match="one of this run"):
        run(banded([0.8, 0.5]), [total(4)], past=tags)


@pytest.mark.parametrize(("strategy", "needed"), [(BANDED, 4), (INVERSE, 2)])
def test_a_past_of_missing_releases_is_refused(strategy: Strategy, needed: int) -> None:
    tags, rng = tags_of(run(strategy, [total(k) for k in range(4)])), Rng.fixed(0)
    noise = correlated(strategy).at(SIGMA)
    assert noise.memory(4) == needed
    expected = release(total(4), noise, rng=rng, step=4, past=tags)
    assert same(release(total(4), noise, rng=rng, step=4, past=tags[-needed:]), expected)
    for past in (tags[1 - needed :], [], [*tags, tags[0]]):
        with pytest.raises(Refused, match=f"tags of the last {needed} releases or more at step 4"):
            release(total(4), noise, rng=rng, step=4, past=past)


# --- kinds ---


def test_kinds_of_independent_noise() -> None:
    for make in (gaussian, laplace):
        kind = Independent(make)
        assert isinstance(kind, NoiseKind)
        assert repr(kind.at(0.7)) == repr(make(0.7))
        assert kind.fitted(Poisson(0.1), num_steps=3) is kind
        assert kind.memory(9) == 0 == kind.at(0.7).memory(9)
        expected = Poisson(0.1).run_event(make(0.7).event, num_records=9, num_steps=3)
        kwargs = {"sampling": Poisson(0.1), "num_records": 9, "num_steps": 3}
        assert kind.run_event(0.7, **kwargs) == expected
    assert repr(Independent(laplace)) == "Independent(laplace)"
    assert Independent() == Independent(gaussian)
    twice = Independent().run_event(1.0, runs=2, **kwargs)
    (inner,) = {twice.event.event}
    assert inner.noise_multiplier == pytest.approx(1 / math.sqrt(2))


def event_of(sampling, strategy: Strategy, steps: int = 10, runs: int = 1) -> dp.DpEvent:
    kind = correlated(strategy)
    assert isinstance(kind, NoiseKind)
    return kind.run_event(2.0, sampling=sampling, num_records=100, num_steps=steps, runs=runs)


def test_the_event_of_sampled_batches_is_a_column_for_each_turn() -> None:
    event = event_of(CyclicPoisson(0.1, cycle=4), banded([0.6, 0.8, 0.5]))
    assert event.count == 3
    assert event.event.sampling_probability == pytest.approx(0.4)
    assert event.event.event.noise_multiplier == pytest.approx(2 / math.sqrt(1.25))
    forked = event_of(CyclicPoisson(0.1, cycle=4), banded([0.6, 0.8, 0.5]), runs=2)
    assert forked.event.event.noise_multiplier == pytest.approx(2 / math.sqrt(2.5))
    short = event_of(CyclicPoisson(0.1, cycle=4), banded([0.6, 0.8, 0.5]), steps=1)
    assert short.event.event.noise_multiplier == pytest.approx(2 / 0.6)


@pytest.mark.parametrize("strategy", [BANDED, INVERSE], ids=["banded", "inverse"])
@pytest.mark.parametrize("sampling", [FullBatch(), CyclicPoisson(0.25, cycle=4)], ids=str)
def test_the_event_of_whole_groups_is_one_release(sampling, strategy: Strategy) -> None:
    event = event_of(sampling, strategy)
    moved = strategy.sensitivity(10, cycle=sampling.participation.cycle)
    assert event == dp.GaussianDpEvent(2.0 / moved)


def test_a_run_of_no_noise_or_no_steps() -> None:
    kind = correlated(BANDED)
    none = kind.run_event(0.0, sampling=FullBatch(), num_records=9, num_steps=9)
    assert none == dp.NonPrivateDpEvent()
    assert event_of(FullBatch(), BANDED, steps=0) == dp.NoOpDpEvent()


def test_fitting_chooses_the_bands_that_the_sampling_allows() -> None:
    cyclic = CyclicPoisson(0.1, cycle=4)
    assert correlated().fitted(cyclic, num_steps=40).mixing.bands == 4
    fitted = correlated(bands=2).fitted(cyclic, num_steps=40)
    assert fitted.mixing.bands == 2
    assert fitted.fitted(cyclic, num_steps=80) == fitted
    assert correlated().fitted(cyclic, num_steps=3).mixing.bands == 3
    with pytest.raises(ValueError, match=r"one that is to be fitted.*fitted\(sampling"):
        correlated(bands=2).at(1.0)


REFUSED = {
    "poisson": (
        correlated(BANDED),
        Poisson(0.1),
        {},
        r"bands as the sampling has groups, 1, got 3",
    ),
    "few groups": (correlated(BANDED), CyclicPoisson(0.1, 2), {}, "groups, 2, got 3"),
    "few groups, to be fitted": (correlated(bands=3), CyclicPoisson(0.1, 2), {}, "groups, 2, got"),
    "inverse": (correlated(INVERSE), CyclicPoisson(0.1, 4), {}, "every record of a group"),
    "truncated": (correlated(BANDED), TruncatedPoisson(0.1, 9), {}, "each record by itself"),
    "fixed size": (correlated(BANDED), WithoutReplacement(9), {}, "each record by itself"),
    "shuffled": (correlated(BANDED), Shuffled(9), {}, r"got shuffled.*use CyclicPoisson"),
    "stated": (correlated(BANDED), Stated([], FullBatch()), {}, "each record by itself"),
    "adaptive": (correlated(BANDED), FullBatch(), {"adaptive": True}, "one clipping norm"),
    "releases": (correlated(BANDED), FullBatch(), {"releases": 2}, "one release at each step"),
    "relation": (
        correlated(BANDED),
        CyclicPoisson(0.1, 4),
        {"relation": Relation.REPLACE_ONE},
        "add-remove or zero-out.*got replace-one",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_event_does_not_cover_is_refused(name: str) -> None:
    kind, sampling, other, says = REFUSED[name]
    with pytest.raises(Refused, match=says):
        kind.check(sampling, **{"relation": Relation.ADD_REMOVE} | other)
    Independent().check(sampling, **{"relation": Relation.ADD_REMOVE} | other)
    if not other:
        with pytest.raises(Refused, match=says):
            kind.run_event(1.0, sampling=sampling, num_records=100, num_steps=9)


@pytest.mark.parametrize("relation", list(Relation))
def test_what_the_event_covers_passes(relation: Relation) -> None:
    for strategy in (BANDED, INVERSE):
        correlated(strategy).check(FullBatch(), relation=relation)
        correlated(strategy).check(CyclicPoisson(0.25, 4), relation=relation)
    if relation is not Relation.REPLACE_ONE:
        correlated(BANDED).check(CyclicPoisson(0.1, 3), relation=relation)


@pytest.mark.parametrize("make", [banded, banded_inverse])
@pytest.mark.parametrize("second", [-1.5, 1.5])
def test_noise_that_grows_without_end_is_refused(make, second: float) -> None:
    """A step's own draw would be lost in the last bits of what the others left."""
    kind = correlated(make([1.0, second]))
    kwargs = {"sampling": FullBatch(), "num_records": 9}
    assert kind.run_event(1.0, num_steps=20, **kwargs)
    for steps in (40, 4000):
        with pytest.raises(Refused, match=r"stay below 65536 times.*use bands that get smaller"):
            kind.run_event(1.0, num_steps=steps, **kwargs)


def test_bands_and_a_strategy_exclude_each_other() -> None:
    assert correlated(BANDED, bands=3) == correlated(BANDED)
    with pytest.raises(ValueError, match="a strategy or the number of its bands, got both"):
        correlated(BANDED, bands=2)
    with pytest.raises(ValueError, match="a strategy or the number of its bands, got both"):
        correlated(BANDED, inverse=True)
    with pytest.raises(ValueError, match="bands >= 1"):
        correlated(bands=0)
