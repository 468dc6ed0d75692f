"""What is drawn has the stated distribution, and would be caught if it had a nearby one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from numpy import ndarray
from scipy import stats

from hushgrad.rng import Rng
from hushgrad.sampling import FullBatch, Poisson, Shuffled, TruncatedPoisson, WithoutReplacement
from hushgrad.sampling.draws import independent_draws
from hushgrad.sampling.scheme import Scheme

ACCEPT = 1e-3  # a right draw fails one of these tests once in a thousand keys; the key is fixed
REJECT = 1e-6
RATES = [0.03, 0.2, 0.5, 0.7, 0.97]


def membership(scheme: Scheme, *, records: int, steps: int, seed: int = 11) -> ndarray:
    """One row for each step and one column for each record: 1 where it was drawn."""
    rng, table = Rng.fixed(seed), np.zeros((steps, records), dtype=np.int64)
    for step in range(steps):
        table[step, scheme.draw(records, step=step, rng=rng)] = 1
    return table


def frequencies_fit(table: ndarray, rate: float) -> float:
    """The chi-square p-value that every record was drawn at `rate`, each by itself."""
    steps, records = table.shape
    excess = (table.sum(0) - steps * rate) ** 2 / (steps * rate * (1 - rate))
    return float(stats.chi2.sf(excess.sum(), records))


def histogram_fits(values: ndarray, support: Iterable[int], pmf: ndarray) -> float:
    """The chi-square p-value of whole numbers against their probabilities, rare ones pooled."""
    expected = pmf * len(values)
    observed = np.array([(values == value).sum() for value in support])
    common = expected >= 5
    observed = np.append(observed[common], len(values) - observed[common].sum())
    expected = np.append(expected[common], len(values) - expected[common].sum())
    kept = expected > 1e-9 * len(values)
    assert observed[~kept].sum() == 0
    excess = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    return float(stats.chi2.sf(excess, kept.sum() - 1))


@pytest.mark.parametrize("rate", RATES)
def test_poisson_draws_every_record_at_its_rate(rate: float) -> None:
    table = membership(Poisson(rate), records=60, steps=3000)
    assert frequencies_fit(table, rate) > ACCEPT
    for wrong in (0.8 * rate, 1.25 * rate):
        if wrong < 1:
            assert frequencies_fit(table, wrong) < REJECT


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_another_rate_is_rejected(factor: float) -> None:
    table = membership(Poisson(factor * 0.2), records=60, steps=3000)
    assert frequencies_fit(table, 0.2) < REJECT


@pytest.mark.parametrize("rate", RATES)
def test_poisson_draws_records_independently(rate: float) -> None:
    """All pairs at once: for independent columns, steps times the squared correlation is χ²(1)."""
    table = membership(Poisson(rate), records=25, steps=3000)
    correlation = np.corrcoef(table.T)[np.triu_indices(25, k=1)]
    excess = len(table) * (correlation**2).sum()
    assert ACCEPT < stats.chi2.sf(excess, len(correlation)) < 1 - ACCEPT


def test_dependent_records_are_rejected() -> None:
    """The same test on sets of a fixed size, whose records push each other out."""
    table = membership(WithoutReplacement(5), records=25, steps=3000)
    correlation = np.corrcoef(table.T)[np.triu_indices(25, k=1)]
    assert stats.chi2.sf(len(table) * (correlation**2).sum(), len(correlation)) < REJECT


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_poisson_batch_sizes_are_binomial(rate: float) -> None:
    records = 200
    sizes = membership(Poisson(rate), records=records, steps=3000).sum(1)
    support = np.arange(records + 1)
    assert histogram_fits(sizes, support, stats.binom.pmf(support, records, rate)) > ACCEPT
    for wrong in (0.8 * rate, min(1.25 * rate, 0.95)):
        pmf = stats.binom.pmf(support, records, wrong)
        assert histogram_fits(sizes, support, pmf) < REJECT


@pytest.mark.parametrize("rate", [0.004, 0.4])
def test_the_next_record_drawn_is_geometrically_far(rate: float) -> None:
    """Also past the length at which a distance is given up and drawn anew."""
    positions = independent_draws(4_000_000 if rate < 0.1 else 40_000, rate=rate, rng=Rng.fixed(2))
    gaps = np.diff(positions)
    support = np.arange(1, gaps.max() + 1)
    assert gaps.max() > 5 / rate
    assert histogram_fits(gaps, support, stats.geom.pmf(support, rate)) > ACCEPT
    assert histogram_fits(gaps, support, stats.geom.pmf(support, 1.1 * rate)) < REJECT


def test_truncated_sizes_are_binomial_up_to_the_largest() -> None:
    records, rate, most = 200, 0.1, 22
    scheme = TruncatedPoisson(rate, most)
    sizes = membership(scheme, records=records, steps=4000).sum(1)
    support = np.arange(most + 1)
    pmf = stats.binom.pmf(support, records, rate)
    pmf[most] += stats.binom.sf(most, records, rate)
    assert histogram_fits(sizes, support, pmf) > ACCEPT
    assert sizes.max() == most
    # Drawing again until a batch is small enough is another distribution, and not accounted for.
    redrawn = stats.binom.pmf(support, records, rate) / stats.binom.cdf(most, records, rate)
    assert histogram_fits(sizes, support, redrawn) < REJECT
    spread = sizes.std() / np.sqrt(len(sizes))
    assert abs(sizes.mean() - scheme.expected_batch(records)) < 4 * spread
    assert abs(sizes.mean() - records * rate) > 4 * spread


def test_truncation_keeps_any_record_as_likely_as_another() -> None:
    """Cutting a batch off at its end would favour the first records."""
    records, scheme = 40, TruncatedPoisson(0.5, 12)
    table = membership(scheme, records=records, steps=3000)
    truncated = table[table.sum(1) == 12]
    assert len(truncated) > 2900
    assert subsets_fit(truncated, 12) > ACCEPT
    plain = membership(Poisson(0.5), records=records, steps=3000)
    cut_off = plain * (plain.cumsum(1) <= 12)
    assert subsets_fit(cut_off[cut_off.sum(1) == 12], 12) < REJECT


def subsets_fit(table: ndarray, size: int) -> float:
    """The p-value of equal frequencies in uniform sets, whose counts add up to steps · size."""
    steps, records = table.shape
    rate = size / records
    variance = steps * rate * (1 - rate) * records / (records - 1)
    excess = ((table.sum(0) - steps * rate) ** 2 / variance).sum()
    return float(stats.chi2.sf(excess, records - 1))


@pytest.mark.parametrize("size", [1, 3, 5, 6])
def test_every_subset_is_equally_likely(size: int) -> None:
    """All sets of `size` out of 6, below and above one half."""
    table = membership(WithoutReplacement(size), records=6, steps=4000)
    assert (table.sum(1) == size).all()
    names, counts = np.unique(table @ 2 ** np.arange(6), return_counts=True)
    sets = int(stats.binom.pmf(size, 6, 0.5) * 64 + 0.5)
    assert len(names) == sets
    assert sets == 1 or stats.chisquare(counts).pvalue > ACCEPT
    lopsided = np.linspace(0.8, 1.2, sets)
    assert sets == 1 or stats.chisquare(counts, lopsided / lopsided.sum() * 4000).pvalue < REJECT


def test_larger_subsets_have_equal_frequencies() -> None:
    table = membership(WithoutReplacement(37), records=100, steps=2000)
    assert subsets_fit(table, 37) > ACCEPT
    assert subsets_fit(table[:, :80], 37) < REJECT


@pytest.mark.parametrize(("records", "batch"), [(24, 6), (25, 6), (5, 5), (7, 1)])
def test_shuffled_epochs_hold_every_record_once(records: int, batch: int) -> None:
    scheme = Shuffled(batch)
    length = scheme.epoch(records)
    table = membership(scheme, records=records, steps=3 * length)
    for epoch in range(3):
        assert (table[epoch * length : (epoch + 1) * length].sum(0) == 1).all()
    full = table.sum(1).reshape(3, length)
    assert (full[:, : records // batch] == batch).all()
    assert (full.sum(1) == records).all()


def test_shuffled_orders_are_uniform() -> None:
    """Each record is in each batch of an epoch equally often, and not with the same others."""
    table = membership(Shuffled(4), records=12, steps=3 * 2000)
    for place in range(3):
        assert subsets_fit(table[place::3], 4) > ACCEPT
    names, counts = np.unique(table[::3] @ 2 ** np.arange(12), return_counts=True)
    assert len(names) > 450  # of 495 sets; 8.7 of them are due to be missing in 2000 draws
    assert counts.max() < 20


def test_full_batches_hold_every_record() -> None:
    assert membership(FullBatch(), records=9, steps=4).all()
    assert membership(Poisson(1.0), records=9, steps=4).all()


@pytest.mark.parametrize("rate", [1e-4, 0.03, 0.5, 0.6, 0.999])
def test_the_first_records_do_not_depend_on_how_many_follow(rate: float) -> None:
    rng = Rng.fixed(4)
    longer = Poisson(rate).draw(50_000, step=1, rng=rng)
    for records in (1, 17, 20_000, 49_999):
        shorter = Poisson(rate).draw(records, step=1, rng=rng)
        assert (shorter == longer[longer < records]).all()
