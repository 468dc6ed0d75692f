"""The privacy loss of whole runs, measured on what is really drawn and released.

An entry of the sum is a world of its own, with one record whose gradient is 1 whenever it is drawn,
at its worst. An adversary sees all releases of a run, knows the record's group, and compares how
likely they are with the record and without it. δ(ε) is measured over all worlds and must be that of
the event that is accounted: not above it, and not far below.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from dp_accounting import DpEvent
from numpy import ndarray
from scipy.linalg import toeplitz
from scipy.special import logsumexp

from hushgrad.accounting import PLD
from hushgrad.noise import Strategy, banded, banded_inverse, correlated, least_error, release
from hushgrad.rng import Rng
from hushgrad.sampling import CyclicPoisson, FullBatch
from hushgrad.sampling.scheme import Scheme
from hushgrad.types import Bounded

WORLDS = 200_000
EPSILONS = (0.0, 0.5, 1.0, 2.0)


def matrix(strategy: Strategy, steps: int) -> ndarray:
    return toeplitz(strategy.column(steps), np.zeros(steps))


def drawn(scheme: Scheme, *, steps: int, rng: Rng) -> ndarray:
    """1 where the record of a world is drawn: a row for each step."""
    table = np.zeros((steps, WORLDS))
    for step in range(steps):
        table[step, scheme.draw(WORLDS, step=step, rng=rng)] = 1.0
    return table


def transcript(
    strategy: Strategy,
    sums: ndarray,
    sigma: float,
    *,
    seed: int,
    past: Sequence[bytes] = (),
    branch: float = 0.0,
) -> tuple[ndarray, list[bytes]]:
    """What the adversary sees: the releases of all worlds, and the run's tags.

    The steps are those after `past`. `branch` is another entry, by which sums of a branch differ.
    """
    noise, tags, values = correlated(strategy).at(sigma), list(past), []
    for step in range(len(past), len(sums)):
        total = {"w": torch.from_numpy(sums[step]), "other": torch.full((1,), branch)}
        out = release(Bounded(total, 1.0), noise, rng=Rng.fixed(seed), step=step, past=tags)
        tags.append(out.digest)
        values.append(out.values["w"].numpy())
    return np.stack(values), tags


def losses(
    seen: ndarray, means: ndarray, chances: ndarray, groups: ndarray, sigma: float
) -> ndarray:
    """log P/Q of each world, P with the record of this group, Q without.

    `means[g]` has the possible means of what is seen, of chances `chances`.
    """
    found = np.empty(seen.shape[1])
    for group, possible in enumerate(means):
        chosen = groups == group
        fits = possible @ seen[:, chosen] - (possible**2).sum(1, keepdims=True) / 2
        with np.errstate(divide="ignore"):
            weights = np.log(chances)[:, None]
        found[chosen] = logsumexp(fits / sigma**2 + weights, axis=0)
    return found


def possible_means(strategy: Strategy, scheme: Scheme, steps: int) -> tuple[ndarray, ndarray]:
    """C·x for every choice of the turns at which a record is drawn, by its group; and chances."""
    cycle, rate = scheme.participation.cycle, scheme.participation.rate
    turns = -(-steps // cycle)
    choices = np.array(list(itertools.product((0, 1), repeat=turns)), dtype=float)
    chances = np.prod(np.where(choices == 1, rate, 1 - rate), axis=1)
    c = matrix(strategy, steps)
    means = []
    for group in range(cycle):
        x = np.zeros((len(choices), steps))
        at = range(group, steps, cycle)
        x[:, list(at)] = choices[:, : len(at)]
        means.append(x @ c.T)
    return np.array(means), chances


def delta(losses: ndarray, epsilon: float) -> tuple[float, float]:
    """E[(1 − e^(ε − L))₊] over worlds, and its standard error."""
    each = np.maximum(-np.expm1(epsilon - losses), 0.0)
    return float(each.mean()), float(each.std() / math.sqrt(len(each)))


def measured(
    strategy: Strategy, scheme: Scheme, steps: int, sigma: float, *, applied: float | None = None
) -> dict[str, list[tuple[float, float]]]:
    """δ and its error at every ε, with the record and without, for the worst group.

    The adversary reckons with σ; `applied` is the noise that is really added.
    """
    applied = sigma if applied is None else applied
    key = Rng.fixed(5)
    cycle = scheme.participation.cycle
    groups = scheme.groups(WORLDS, rng=key) if cycle > 1 else np.zeros(WORLDS, int)
    c = matrix(strategy, steps)
    means, chances = possible_means(strategy, scheme, steps)
    joined = drawn(scheme, steps=steps, rng=key)
    found: dict[str, list[tuple[float, float]]] = {}
    for name, sums, sign in [("removed", joined, 1), ("added", 0 * joined, -1)]:
        seen, _ = transcript(strategy, sums, applied, seed=sign + 1)
        each = sign * losses(c @ seen, means, chances, groups, applied)
        by_group = [[delta(each[groups == g], e) for g in range(cycle)] for e in EPSILONS]
        found[name] = [max(group) for group in by_group]
    return found


def accounted(
    strategy: Strategy, scheme: Scheme, steps: int, sigma: float, runs: int = 1
) -> DpEvent:
    return correlated(strategy).run_event(
        sigma, sampling=scheme, num_records=WORLDS, num_steps=steps, runs=runs
    )


def holds(found: dict[str, list[tuple[float, float]]], event: DpEvent) -> bool:
    """Whether no δ that was measured is above the one that is accounted for."""
    stated = [PLD.delta(event, epsilon=e) for e in EPSILONS]
    return all(
        d <= most + 4.5 * error
        for column in found.values()
        for (d, error), most in zip(column, stated, strict=True)
    )


def is_tight(found: dict[str, list[tuple[float, float]]], event: DpEvent) -> bool:
    """Whether the larger of the two directions comes near it everywhere."""
    stated = [PLD.delta(event, epsilon=e) for e in EPSILONS]
    larger = [max(pair) for pair in zip(*found.values(), strict=True)]
    return all(
        d >= 0.97 * most - 4.5 * error for (d, error), most in zip(larger, stated, strict=True)
    )


SAMPLED = {
    "two bands, two groups": (banded([0.8, 0.6]), CyclicPoisson(0.2, cycle=2), 6),
    "signs": (banded([0.8, -0.6]), CyclicPoisson(0.2, cycle=2), 4),
    "optimal": (least_error(6, bands=3, cycle=3), CyclicPoisson(0.25, cycle=3), 6),
    "fewer bands than groups": (banded([0.8, 0.6]), CyclicPoisson(0.15, cycle=3), 6),
    "independent": (banded([1.0]), CyclicPoisson(0.2, cycle=2), 6),
    "last column cut off": (banded([0.7, 0.6, 0.4]), CyclicPoisson(0.25, cycle=3), 7),
}
WHOLE = {
    "full batches, banded": (banded([0.8, 0.6]), FullBatch(), 4),
    "full batches, inverse": (banded_inverse([1.0, -0.5]), FullBatch(), 4),
    "groups, banded": (banded([0.8, 0.6]), CyclicPoisson(1 / 3, cycle=3), 6),
    "groups, inverse": (least_error(6, bands=2, cycle=3, inverse=True), CyclicPoisson(1 / 3, 3), 6),
}
CASES = SAMPLED | WHOLE
SIGMA = 1.3


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_a_run_is_what_is_accounted(name: str) -> None:
    strategy, scheme, steps = CASES[name]
    sigma = SIGMA
    if name in WHOLE:
        sigma *= strategy.sensitivity(steps, cycle=scheme.participation.cycle)
    event = accounted(strategy, scheme, steps, sigma)
    found = measured(strategy, scheme, steps, sigma)
    assert holds(found, event)
    if name != "last column cut off":  # one more turn for a column of which less is left
        assert is_tight(found, event)


@pytest.mark.parametrize("name", ["two bands, two groups", "optimal", "groups, inverse"])
def test_a_norm_that_is_a_fifth_too_small_is_found_out(name: str) -> None:
    """As is noise of 0.8 σ: the two are the same error."""
    strategy, scheme, steps = CASES[name]
    event = accounted(strategy, scheme, steps, SIGMA)
    assert not holds(measured(strategy, scheme, steps, SIGMA, applied=0.8 * SIGMA), event)
    assert not is_tight(measured(strategy, scheme, steps, SIGMA, applied=1.25 * SIGMA), event)


def test_more_bands_than_groups_would_break_the_amplified_event() -> None:
    """Which is why they are refused: columns of two turns overlap."""
    strategy, scheme, steps = banded([0.7, 0.5, 0.5]), CyclicPoisson(0.4, cycle=1), 6
    event = scheme.run_event(
        correlated(banded([1.0])).run_event(
            SIGMA / strategy.column_norm(steps), sampling=FullBatch(), num_records=9, num_steps=1
        ),
        num_records=9,
        num_steps=steps,
    )
    assert not holds(measured(strategy, scheme, steps, SIGMA), event)


def forked(
    strategy: Strategy, scheme: Scheme, steps: int, sigma: float, at: int
) -> dict[str, list[tuple[float, float]]]:
    """As `measured`, of a run and a second branch that leaves it at step `at`."""
    key, cycle = Rng.fixed(5), scheme.participation.cycle
    groups, c = scheme.groups(WORLDS, rng=key), matrix(strategy, steps)
    means, chances = possible_means(strategy, scheme, steps)
    both = np.concatenate([means, means[:, :, at:]], axis=2)
    joined = drawn(scheme, steps=steps, rng=key)
    found = {}
    for name, sums, sign in [("removed", joined, 1), ("added", 0 * joined, -1)]:
        first, tags = transcript(strategy, sums, sigma, seed=sign + 1)
        second, _ = transcript(strategy, sums, sigma, seed=sign + 1, past=tags[:at], branch=1.0)
        again = (c @ np.concatenate([first[:at], second]))[at:]
        seen = np.concatenate([c @ first, again])
        each = sign * losses(seen, both, chances, groups, sigma)
        by_group = [[delta(each[groups == g], e) for g in range(cycle)] for e in EPSILONS]
        found[name] = [max(group) for group in by_group]
    return found


def test_a_fork_is_one_more_run_on_the_same_batches() -> None:
    """Not two runs, each with a sampling of its own, which would be cheaper."""
    strategy, scheme, steps = banded([0.8, 0.6]), CyclicPoisson(0.15, cycle=2), 6
    twice = accounted(strategy, scheme, steps, SIGMA, runs=2)
    from_the_start = forked(strategy, scheme, steps, SIGMA, at=0)
    assert holds(from_the_start, twice)
    assert is_tight(from_the_start, twice)
    later = forked(strategy, scheme, steps, SIGMA, at=3)
    assert holds(later, twice)
    assert not holds(later, accounted(strategy, scheme, steps, SIGMA))
    two_runs = scheme.run_event(
        accounted(strategy, FullBatch(), 1, SIGMA * strategy.coefficients[0]),
        num_records=WORLDS,
        num_steps=2 * steps,
    )
    assert not holds(from_the_start, two_runs)
