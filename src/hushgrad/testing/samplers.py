"""Does a sampler draw what it says, and claim no more amplification than that?"""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
from jaxtyping import Bool

from hushgrad.accounting import ACCOUNTANTS, PLD, gaussian, poisson
from hushgrad.events import Participation, repeated
from hushgrad.rng import Rng
from hushgrad.sampling import Scheme
from hushgrad.testing.requiring import require
from hushgrad.types import Refused, Relation


def check_sampler(scheme: Scheme, *, num_records: int = 60, steps: int = 2000) -> None:
    """Check that a scheme draws what it states, and claims no more amplification than that.

    It counts the draws of `steps` steps, which takes a few seconds.

    Args:
        scheme: the sampling scheme.
        num_records: the size of the data set to draw from.
        steps: the number of steps to draw; with more, smaller deviations are found.

    Raises:
        AssertionError: if draws are not repeatable, positions are out of range or not ascending,
            records are drawn unevenly, or the event claims too much amplification.

    Example:
        >>> from hushgrad.sampling import Poisson
        >>> check_sampler(Poisson(0.2), steps=500)
    """
    rng, what = Rng.fixed(0), scheme.statement
    drawn = [scheme.draw(num_records, step=step, rng=rng) for step in range(steps)]
    table = np.zeros((steps, num_records), dtype=bool)
    for step, positions in enumerate(drawn):
        fix = "return each position at most once, in ascending order"
        inside = bool(((positions >= 0) & (positions < num_records)).all())
        holds = inside and bool((np.diff(positions) > 0).all())
        require(holds, f"{what}: positions below {num_records}", positions.tolist(), fix)
        table[step, positions] = True
    again = [scheme.draw(num_records, step=step, rng=rng) for step in (3, 0, 3)]
    same = all(np.array_equal(x, drawn[step]) for x, step in zip(again, (3, 0, 3), strict=True))
    fix = "draw from rng.derive(..., step) alone, and keep no state"
    require(same, f"{what}: the same batch whenever a step is drawn", "another", fix)
    sizes, size = table.sum(1), scheme.expected_batch(num_records)
    if scheme.sees_all:
        fix = "return every position, or answer False to sees_all"
        require(bool(table.all()), f"{what}: every record in each batch", "others", fix)
    elif size < num_records:
        other = scheme.draw(num_records, step=0, rng=Rng.fixed(1))
        fix = "draw from the rng that is given"
        differs = not all(np.array_equal(x, drawn[0]) for x in (*drawn[1:4], other))
        require(differs, f"{what}: other batches at other steps and keys", "the same", fix)
    length = scheme.epoch(num_records)
    if length is None:  # in an epoch, the last batch may be smaller
        error = 6 * float(sizes.std()) / math.sqrt(steps) + 1e-9 * size
        near = abs(float(sizes.mean()) - size) <= error
        fix = "return the mean size from expected_batch: sums are divided by it"
        require(near, f"{what}: batches of {size:g} on average", float(sizes.mean()), fix)
    else:
        whole = table[: steps // length * length].reshape(-1, length, num_records).sum(1)
        fix = "put each record into exactly one batch of an epoch"
        require(bool((whole == 1).all()), f"{what}: each record once in {length} steps", "not", fix)
    rate = table.mean()
    off = float(np.abs(table.mean(0) - rate).max())
    fix = "draw every record with the same probability: amplification assumes it"
    most = 6 * math.sqrt(rate * (1 - rate) / steps)
    require(off <= most, f"{what}: each record as often as any other", off, fix)
    _check_amplification(scheme, num_records, float(rate))
    if scheme.participation is not None:
        _check_participation(scheme, scheme.participation, table)


def _check_participation(
    scheme: Scheme, turns: Participation, table: Bool[np.ndarray, "steps records"]
) -> None:
    """Each record is drawn at its turns only, at the rate that is stated, and each turn counts."""
    what, steps = scheme.statement, len(table)
    groups = np.stack([table[k :: turns.cycle].any(0) for k in range(turns.cycle)])
    most = int(groups.sum(0).max())
    fix = "draw a record's first turn once, from rng.derive(...) without the step"
    require(most <= 1, f"{what}: a record at every {turns.cycle}th step only", most, fix)
    drawn = [table[k :: turns.cycle, group] for k, group in enumerate(groups)]
    seen = [float(draws.mean()) for draws in drawn if draws.size]  # a group may have no records
    off = max(abs(rate - turns.rate) for rate in seen)
    fix = "state the rate at which a record is drawn when its turn comes"
    error = 6 * math.sqrt(turns.rate * (1 - turns.rate) * turns.cycle / steps)
    require(off <= error, f"{what}: each turn at rate {turns.rate:g}", seen, fix)
    event = scheme.run_event(gaussian(1.0), num_records=table.shape[1], num_steps=2 * turns.cycle)
    least = repeated(2, poisson(0.97 * turns.rate, gaussian(1.0)))
    found, expected = (PLD.epsilon(run, delta=1e-5) for run in (event, least))
    fix = "count a turn for each cycle of steps"
    require(found >= expected, f"{what}: at least ε = {expected:.4g} for two turns", found, fix)


def _check_amplification(scheme: Scheme, num_records: int, rate: float) -> None:
    """Check one step against Poisson sampling at the same rate, which no scheme can beat."""
    what, step = scheme.statement, gaussian(1.0)
    event = scheme.run_event(step, num_records=num_records, num_steps=1)
    found = []
    for relation in scheme.relations:
        for accountant in (a for a in ACCOUNTANTS.values() if a.proves):
            with suppress(Refused, ValueError):
                found.append(accountant.epsilon(event, delta=1e-5, relation=relation))
    fix = "return an event that an accountant covers, under a relation that the scheme names"
    require(bool(found), f"{what}: an accountant for its event", event, fix)
    least = PLD.epsilon(poisson(0.97 * rate, step), delta=1e-5, relation=Relation.ADD_REMOVE)
    fix = f"claim no more than that a record is in a batch with probability {rate:.3g}"
    require(min(found) >= least, f"{what}: at least ε = {least:.4g} for a step", min(found), fix)
