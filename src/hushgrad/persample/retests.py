"""Tests after certification: what was proved at first is looked at again, at other batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hushgrad.persample import records
from hushgrad.persample.certify import (
    POINTS,
    Certificate,
    clear_of_flips,
    comparable,
    refusal,
    replayed,
)
from hushgrad.persample.generators import own_generators_unused
from hushgrad.persample.independence import (
    SOME_SEEDS,
    Passes,
    check_briefly,
    check_independence,
)
from hushgrad.persample.oracle import consult
from hushgrad.persample.probes import distinct_records
from hushgrad.persample.subject import Subject, held_by
from hushgrad.persample.watch import guarded
from hushgrad.types import Batch, Refused


def extend(
    certificate: Certificate, subject: Subject, batch: Batch, size: int, capacity: int = 0
) -> None:
    """Test a larger batch than any before it, at the cost of one pass and a few single ones."""
    padded = certificate.padded(max(size, capacity))
    _retest(certificate, subject, distinct_records(batch, size), padded, POINTS)
    certificate.largest = padded
    certificate.sizes.add(padded)


LONGEST_GAP = 16
"""So many steps may lie between two tests."""


def retest(certificate: Certificate, subject: Subject, batch: Batch, size: int) -> None:
    """Test again where it is time to, or where a batch of this padded size was not seen before.

    At steps 1, 2, 4, 8 ... a few of this batch's records, at the parameters as they are now and in
    general position, on both ways; in between their losses only.
    """
    step, padded = certificate.steps + 1, certificate.padded(size)
    if step & (step - 1) == 0:
        few = distinct_records(batch, size, most=2)
        _retest(certificate, subject, few, padded, [None, *POINTS[1:]])
    elif padded not in certificate.sizes:
        _look(certificate, subject, batch, size, padded)
    elif step % LONGEST_GAP == 0:
        _look(certificate, subject, batch, size, 2 * records.MULTIPLE)
    certificate.sizes.add(padded)


def _look(certificate: Certificate, subject: Subject, batch: Batch, size: int, padded: int) -> None:
    """Do a few records still not meet, in a batch of this many? Forward passes only."""
    few = records.take(batch, [i % size for i in range(records.MULTIPLE)])
    watched = guarded(subject.params, subject.modules, subject.free_buffers, held_by(subject.loss))
    with torch.random.fork_rng(), own_generators_unused(subject), watched:
        precision = certificate.evidence.precision
        _refuse_moved(
            certificate, check_briefly(subject, few, padded, precision, certificate.steps)
        )


def _refuse_moved(certificate: Certificate, moved: str | None) -> None:
    if moved and not certificate.form.alone:
        raise Refused(moved)


def _retest(
    certificate: Certificate,
    subject: Subject,
    few: Batch,
    padded: int,
    points: Sequence[int | None],
) -> None:
    def at(point: int | None) -> None:
        _retest_at(certificate, subject, few, padded, point)

    clear_of_flips(points, at)


def _retest_at(
    certificate: Certificate, subject: Subject, few: Batch, padded: int, point: int | None
) -> None:
    with comparable(subject, point):
        oracle = consult(subject, few)
        if oracle.count == 0:
            return
        seeds = range(certificate.steps, certificate.steps + SOME_SEEDS)
        passes = Passes(subject, oracle)
        _refuse_moved(
            certificate, check_independence(passes, [padded], certificate.evidence, seeds)
        )
        if certificate.form.replays:
            wrong = replayed(subject, oracle, certificate.sites, padded, certificate.evidence)
            if wrong:
                raise refusal(wrong, "in a larger batch ")
