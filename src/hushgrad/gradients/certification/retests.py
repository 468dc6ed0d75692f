"""Tests after certification: what was proved at first is looked at again, at other batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hushgrad.batches import records
from hushgrad.gradients.certification.certify import Certificate, compare_replay, probe_at
from hushgrad.gradients.certification.generators import refuse_own_generators
from hushgrad.gradients.certification.independence import (
    SOME_SEEDS,
    Passes,
    check_briefly,
    check_independence,
)
from hushgrad.gradients.certification.near_misses import POINTS, refusal_of, retry_near_misses
from hushgrad.gradients.certification.oracle import consult
from hushgrad.gradients.objective import Objective, references_of
from hushgrad.gradients.probes import distinct_records
from hushgrad.types import Batch, Refused


def extend(certificate: Certificate, objective: Objective, batch: Batch, rows: int) -> None:
    """Test a pass of more rows than any before it, by one such pass and a few single ones."""
    # This batch's own records: what was certified on others is looked at on these.
    few = distinct_records(batch, records.count(batch))
    _retest(certificate, objective, few, rows, POINTS)
    certificate.largest = rows
    certificate.sizes.add(rows)


LONGEST_GAP = 16
"""So many steps may lie between two tests."""


def retest(certificate: Certificate, objective: Objective, batch: Batch, rows: int) -> None:
    """Test again where it is time to, or where a pass of so many rows was not seen before.

    At steps 1, 2, 4, 8 ... a few of this batch's records, at the parameters as they are now and in
    general position, on both ways; in between their losses only.
    """
    step = certificate.steps + 1
    if step & (step - 1) == 0:
        # Two records tell whether they meet, at half the price of four.
        few = distinct_records(batch, records.count(batch), most=2)
        _retest(certificate, objective, few, rows, [None, *POINTS[1:]])
    # Kernels are chosen by size, so each is looked at when it first comes.
    elif rows not in certificate.sizes:
        _look_briefly(certificate, objective, batch, rows)
    elif step % LONGEST_GAP == 0:
        _look_briefly(certificate, objective, batch, 2 * records.MULTIPLE)
    certificate.sizes.add(rows)


def _look_briefly(certificate: Certificate, objective: Objective, batch: Batch, rows: int) -> None:
    """Do a few records still not meet, in a pass of so many rows? Forward passes only."""
    size = records.count(batch)
    # Not the whole batch: the cost of a look must not grow with it.
    few = records.take(batch, [i % size for i in range(records.MULTIPLE)])
    watched = objective.guard_pass(references_of(objective.loss))
    with torch.random.fork_rng(), refuse_own_generators(objective), watched:
        precision = certificate.evidence.precision
        _refuse_moved_bits(
            certificate, check_briefly(objective, few, rows, precision, certificate.steps)
        )


def _refuse_moved_bits(certificate: Certificate, moved: str | None) -> None:
    if moved and not certificate.form.alone:
        raise Refused(moved)


def _retest(
    certificate: Certificate,
    objective: Objective,
    few: Batch,
    rows: int,
    points: Sequence[int | None],
) -> None:
    def at(point: int | None) -> None:
        _retest_at(certificate, objective, few, rows, point)

    retry_near_misses(points, at)


def _retest_at(
    certificate: Certificate, objective: Objective, few: Batch, rows: int, point: int | None
) -> None:
    with probe_at(objective, point):
        oracle = consult(objective, few)
        # All of these records were nan. They count for nothing, and prove nothing.
        if oracle.count == 0:
            return
        # Other seeds each time: over a run all strata of the draws are met.
        seeds = range(certificate.steps, certificate.steps + SOME_SEEDS)
        passes = Passes(objective, oracle)
        _refuse_moved_bits(
            certificate, check_independence(passes, [rows], certificate.evidence, seeds)
        )
        if certificate.form.replays:
            wrong = compare_replay(objective, oracle, certificate.sites, rows, certificate.evidence)
            if wrong:
                raise refusal_of(wrong, "in a larger batch ")
