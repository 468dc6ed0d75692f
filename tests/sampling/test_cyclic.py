"""Cyclic Poisson sampling: groups that are fixed, alike and independent, and what a run costs."""

from __future__ import annotations

import dp_accounting as dp
import numpy as np
import pytest
from scipy import stats

from hushgrad.accounting import PLD
from hushgrad.rng import Rng
from hushgrad.sampling import CyclicPoisson, FullBatch, Poisson, Sampling, Stated
from hushgrad.sampling.scheme import Scheme
from hushgrad.types import Refused

GAUSS = dp.GaussianDpEvent(1.3)
CYCLIC = CyclicPoisson(0.05, cycle=4)


def table_of(scheme: Scheme, *, records: int, steps: int, seed: int = 3) -> np.ndarray:
    rng, table = Rng.fixed(seed), np.zeros((steps, records), dtype=bool)
    for step in range(steps):
        table[step, scheme.draw(records, step=step, rng=rng)] = True
    return table


def test_a_record_is_drawn_at_the_turns_of_its_group_only() -> None:
    table = table_of(CYCLIC, records=300, steps=800)
    groups = CYCLIC.groups(300, rng=Rng.fixed(3))
    for group in range(4):
        assert not table[np.arange(800) % 4 != group][:, groups == group].any()
        turns = table[group::4][:, groups == group]
        assert stats.binomtest(int(turns.sum()), turns.size, 0.2).pvalue > 1e-3
        assert stats.binomtest(int(turns.sum()), turns.size, 0.22).pvalue < 1e-3


def test_groups_are_equally_likely_and_independent() -> None:
    groups = np.stack([CYCLIC.groups(2000, rng=Rng.fixed(seed)) for seed in range(30)])
    counts = np.bincount(groups.ravel(), minlength=4)
    assert stats.chisquare(counts).pvalue > 1e-3
    pairs = np.bincount((4 * groups[:, :-1] + groups[:, 1:]).ravel(), minlength=16)
    assert stats.chisquare(pairs).pvalue > 1e-3
    across = np.bincount((4 * groups[:-1] + groups[1:]).ravel(), minlength=16)
    assert stats.chisquare(across).pvalue > 1e-3


def test_records_are_drawn_independently_given_their_groups() -> None:
    table = table_of(CyclicPoisson(0.1, cycle=2), records=40, steps=4000)
    groups = CyclicPoisson(0.1, cycle=2).groups(40, rng=Rng.fixed(3))
    sizes = table[::2][:, groups == 0].sum(1)
    variance = (groups == 0).sum() * 0.2 * 0.8
    assert sizes.var() == pytest.approx(variance, rel=6 * np.sqrt(2 / 2000))


def test_one_more_record_moves_no_other() -> None:
    """Groups and draws of the records before it stay, as add/remove needs it."""
    rng = Rng.fixed(1)
    assert (CYCLIC.groups(501, rng=rng)[:500] == CYCLIC.groups(500, rng=rng)).all()
    for step in range(8):
        more, fewer = (CYCLIC.draw(n, step=step, rng=rng) for n in (501, 500))
        assert (more[more < 500] == fewer).all()


def test_a_run_is_an_event_for_each_turn() -> None:
    assert isinstance(CYCLIC, Sampling)
    for steps, turns in [(1, 1), (4, 1), (5, 2), (100, 25)]:
        event = CYCLIC.run_event(GAUSS, num_records=1000, num_steps=steps)
        expected = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.2, GAUSS), turns)
        assert event == expected
    assert CYCLIC.run_event(GAUSS, num_records=1000, num_steps=0) == dp.NoOpDpEvent()


def test_groups_that_are_taken_whole_have_no_amplification() -> None:
    for cycle in (1, 3, 7, 49, 93):
        whole = CyclicPoisson(1 / cycle, cycle)
        assert whole.group_rate == 1
        assert whole.sees_all == (cycle == 1)
        event = whole.run_event(GAUSS, num_records=1000, num_steps=2 * cycle)
        assert event == dp.SelfComposedDpEvent(GAUSS, 2)
        table = table_of(whole, records=50, steps=2 * cycle)
        assert (table.sum(0) == 2).all()


def test_groups_cost_more_than_sampling_by_itself_with_independent_noise() -> None:
    """Which is what correlated noise has to make good."""

    def epsilon(scheme: Scheme) -> float:
        event = scheme.run_event(GAUSS, num_records=1000, num_steps=200)
        return PLD.epsilon(event, delta=1e-5)

    costs = [epsilon(CyclicPoisson(0.02, cycle=cycle)) for cycle in (1, 4, 16)]
    assert costs[0] == epsilon(Poisson(0.02))
    assert costs == sorted(costs)
    assert costs[2] > 1.5 * costs[0]


def test_what_it_says_of_itself() -> None:
    assert CYCLIC.statement == "cyclic Poisson sampling, 4 groups, q = 0.2 of a group"
    assert CYCLIC.expected_batch(1000) == 50
    assert CYCLIC.resized(20, num_records=1000) == CyclicPoisson(0.02, cycle=4)
    assert CYCLIC.span(100, length=70) == 100 == CYCLIC.span(60, length=100)
    assert CYCLIC.epoch(1000) is None
    assert FullBatch().participation == CyclicPoisson(1.0, cycle=1).participation
    assert Poisson(0.3).participation == CyclicPoisson(0.3, cycle=1).participation


@pytest.mark.parametrize(("rate", "cycle"), [(0.3, 4), (1.0, 2), (0.0, 2), (0.1, 0)])
def test_groups_that_are_too_small_are_refused(rate: float, cycle: int) -> None:
    with pytest.raises(ValueError, match=r"rate \* cycle <= 1|rate <= 1|whole cycle >= 1"):
        CyclicPoisson(rate, cycle)


def test_an_empty_group_has_empty_batches() -> None:
    rng, found = Rng.fixed(0), CyclicPoisson(0.1, cycle=10)
    empty = set(range(10)) - set(found.groups(3, rng=rng).tolist())
    assert empty
    for step in empty:
        assert len(found.draw(3, step=step, rng=rng)) == 0


def test_a_loader_of_ones_own_cannot_keep_turns() -> None:
    """Each pass over it would begin with the first group again, in the middle of a cycle."""
    with pytest.raises(Refused, match=r"each pass over a loader can begin anew, got cyclic"):
        Stated([], CYCLIC)
