"""A private evaluation: averages over held-out records that are private themselves."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from dp_accounting import DpEvent
from jaxtyping import Int64
from torch import Tensor, nn

from hushgrad.accounting import PLD, Accountant, Target, least_noise, repeated
from hushgrad.accounting.accountants import require_delta
from hushgrad.accounting.calibration import require_proof
from hushgrad.batches.records import count
from hushgrad.gradients import RecordValues, observe
from hushgrad.ledger import Budget, Entry, Spend
from hushgrad.noise import Noise, gaussian
from hushgrad.parallel.single import refuse_wrapped, require_one_process
from hushgrad.rng import Rng
from hushgrad.run.admission import needs_rng
from hushgrad.run.charging import refuse_reproducible
from hushgrad.run.query import BatchPass, answerable
from hushgrad.run.step import release_once
from hushgrad.sampling import Loader
from hushgrad.types import Batch, Bounded, Relation

_UNIT = 2**20  # a value is counted in whole units of 2⁻²⁰, so that sums are exact


@dataclass(frozen=True)
class Evaluation:
    """Noisy averages by name, and what they cost.

    An average may lie outside of 0 to 1, because of its noise; the end that it passed is then the
    best estimate.

    Args:
        values: the averages by name.
        standard_error: the standard deviation of the noise in each average.
        epsilon: ε of the release; infinite with a reproducible key.
        delta: δ of the release.

    Example:
        >>> Evaluation({"accuracy": 0.93}, standard_error=0.01, epsilon=1.0, delta=1e-5).values
        {'accuracy': 0.93}
    """

    values: dict[str, float]
    standard_error: float
    epsilon: float
    delta: float


@needs_rng
def evaluate(
    values: Mapping[str, RecordValues],
    data: Any,
    *,
    records: int,
    delta: float,
    rng: Rng,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    budget: Budget | None = None,
    relation: Relation = Relation.ADD_REMOVE,
    accountant: Accountant = PLD,
    modules: Sequence[nn.Module] = (),
    chunk: int = 256,
) -> Evaluation:
    """Average values of private held-out records, in one release with Gaussian noise.

    Put the model into eval mode first.

    Guarantees: the release is (ε, δ)-differentially private for the records of `data`. One record
    moves the sum of k values by at most √k, and by √k/2 where it is replaced: ½ is then subtracted
    from each value and added again after the release, once for each record, whose number is public.
    Values are rounded to multiples of 2⁻²⁰ and added as integers, so rounding adds nothing to these
    bounds.

    Assumes: a record's values depend on that record alone. This is tested on the first `chunk`
    records, and not proved.

    Args:
        values: functions by name; each maps a batch to one value for each record, which is clamped
            to 0 to 1. NaN counts as 0.
        data: the records, in any form that `train` accepts.
        records: the public number by which the sums are divided.
        delta: δ of the release.
        rng: the key of the noise: `hg.Rng.from_os()`.
        epsilon: ε, for which the least noise is chosen. Pass this or `noise_multiplier`.
        noise_multiplier: σ, noise ÷ the bound on one record.
        budget: the account that is charged before the release is made.
        relation: what makes two data sets neighbours.
        accountant: what computes ε.
        modules: the modules that the functions call.
        chunk: how many records are processed at once.

    Returns:
        The averages, the noise in them, and what they cost.

    Raises:
        ValueError: if an argument is out of range.
        Refused: if records influence each other's values, or `budget` cannot pay.

    Example:
        >>> data = torch.rand(1000, 1)
        >>> found = evaluate(
        ...     {"large": lambda x: (x[:, 0] > 0.5).float()},
        ...     data,
        ...     records=1000,
        ...     delta=1e-5,
        ...     epsilon=1.0,
        ...     rng=Rng.from_os(),
        ... )
        >>> round(found.epsilon, 2), found.standard_error < 0.01
        (1.0, True)
    """
    require_one_process()
    refuse_wrapped(modules)
    _require(values, records=records, chunk=chunk)
    require_delta(delta)
    require_proof(accountant)
    # Arguments are checked before the budget is charged.
    noise, spent = _noise(epsilon, noise_multiplier, delta, relation, accountant)
    loader = data if isinstance(data, Loader) else Loader(data)
    entry = None
    if budget is not None:
        refuse_reproducible(rng)
        entry = _opened(budget, Spend(noise.event, relation, spent, delta), values, loader, records)
    query = RecordValueSums(tuple(values.values()), loader, tuple(modules), chunk, relation)
    try:
        scale = noise.scale(query.bounded())
    except BaseException:
        if entry is not None:
            entry.settle(steps=0, event=None)  # nothing was released
        raise
    if entry is not None:
        entry.reserve(1)  # durably, before the release: a crash must not make it free
    # Two evaluations by one key must not share their noise.
    fresh = () if rng.reproducible else (secrets.token_bytes(16),)
    released = release_once(query, noise, rng=rng.derive("evaluation", *fresh))
    if entry is not None:
        entry.note(0, released.digest)
        entry.settle(steps=1, event=repeated(1, noise.event))
    averages = ((released.values["values"] + query.taken_off) / records).tolist()
    return Evaluation(
        values=dict(zip(values, averages, strict=True)),
        standard_error=scale / records,
        # With a public seed anyone can subtract the noise.
        epsilon=math.inf if rng.reproducible else spent,
        delta=delta,
    )


def _require(values: Mapping[str, RecordValues], *, records: int, chunk: int) -> None:
    if not values:
        raise ValueError("expected a function to average, got none; name one or more")
    if records < 1 or chunk < 1:
        raise ValueError(
            f"expected records >= 1 and chunk >= 1, got {records} and {chunk}; pass the public "
            "number of records"
        )


def _noise(
    epsilon: float | None,
    noise_multiplier: float | None,
    delta: float,
    relation: Relation,
    accountant: Accountant,
) -> tuple[Noise, float]:
    """Return the noise, and the ε that it costs."""
    if (epsilon is None) == (noise_multiplier is None):
        given = "neither" if epsilon is None else "both"
        raise ValueError(f"expected either epsilon or noise_multiplier, got {given}; give one")
    if epsilon is not None:
        target = Target(epsilon, delta, relation, accountant)
        sigma, spent = least_noise(lambda z: gaussian(z).event, target)
        return gaussian(sigma), spent
    assert noise_multiplier is not None
    noise = gaussian(noise_multiplier)
    if noise_multiplier == 0:
        return noise, math.inf
    return noise, accountant.epsilon(noise.event, delta=delta, relation=relation)


def _opened(
    budget: Budget, spend: Spend, values: Mapping[str, RecordValues], loader: Loader, records: int
) -> Entry:
    plan = {"evaluation": list(values), "records": records}
    fingerprint = loader.fingerprint(budget.salt)
    return budget.open(spend, label="evaluation", plan=plan, fingerprint=fingerprint)


@answerable
@dataclass(frozen=True)
class RecordValueSums:
    """The sum of each of several functions of a record, over all records of a loader.

    Values are clamped to 0 to 1. Under replace-one ½ is subtracted from each value; `taken_off` is
    the total of that in each sum, which is public, because all neighbours have equally many
    records.
    """

    functions: tuple[RecordValues, ...]
    loader: Loader
    modules: tuple[nn.Module, ...]
    chunk: int
    relation: Relation
    of_each_record: ClassVar[bool] = False

    def bounded(self, work: BatchPass | None = None) -> Bounded:
        """The sums in whole units, and √k for k functions, half of that where ½ is subtracted."""
        total, _ = self._sums
        l2 = _bound(len(self.functions), self.relation)
        return Bounded({"values": total.double() / _UNIT}, l2=l2)

    def event(self, noise_multiplier: float) -> DpEvent:
        """One Gaussian release."""
        return gaussian(noise_multiplier).event

    @property
    def taken_off(self) -> float:
        """What was subtracted from each sum in total."""
        return self._sums[1]

    @cached_property
    def _sums(self) -> tuple[Int64[Tensor, " k"], float]:
        total = torch.zeros(len(self.functions), dtype=torch.int64)
        middle, records = _UNIT // 2 if _centred(self.relation) else 0, 0
        # How far the random state advances would reveal the number of records.
        with torch.random.fork_rng():
            for place, batch in enumerate(_chunks(self.loader, self.chunk)):
                for k, function in enumerate(self.functions):
                    found = observe(function, batch, modules=self.modules, test=place == 0)
                    # Rounded to whole units: integer sums are exact in any order.
                    clamped = torch.nan_to_num(found, nan=0.0).clamp(0, 1)
                    total[k] += ((clamped * _UNIT).round().long() - middle).sum().cpu()
                records += count(batch)
        return total, records * middle / _UNIT


def _chunks(loader: Loader, chunk: int) -> Iterator[Batch]:
    start = 0
    while count(batch := loader.load(np.arange(start, start + chunk))):
        yield batch
        start += chunk


def _centred(relation: Relation) -> bool:
    """Return whether all neighbours have equally many records, none of them absent."""
    return relation is Relation.REPLACE_ONE


def _bound(k: int, relation: Relation) -> float:
    """Return √k for k values from 0 to 1, half of that if they are centred; never rounded down."""
    root = math.sqrt(k)
    whole = math.nextafter(root, math.inf) if math.isqrt(k) ** 2 != k else root
    return whole / 2 if _centred(relation) else whole
