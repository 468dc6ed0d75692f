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

    `standard_error` is that of the noise, the same for each. An average may lie outside 0 to 1;
    it is then closest to the end that it passed.
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
    """Average each of `values` over private held-out data, as one release with Gaussian noise.

    A function of `values` maps a batch to one value for each record, which is clamped to 0 to 1,
    nan to 0; put the model into eval mode first. Sums are divided by the public `records`, whatever
    the data's length. The noise is `noise_multiplier`, or the least that costs `epsilon`. The
    release is charged to `budget` before it is made. Pass the `modules` that the functions call.

    Assumes: a record's values depend on that record alone. It is tested on the first `chunk`
    records, cut by position as all others are, and not proved.

    Guarantees: one record moves the sum of k values by at most √k, also where it is replaced: ½ is
    taken off each value then, so that the bound on one record is √k/2, and added again to what was
    released, for as many records as there are, which all neighbours have. `noise_multiplier` is
    noise ÷ the bound on one record. Values are rounded to multiples of 2⁻²⁰ and added as whole
    numbers, so no rounding adds to that.
    """
    require_one_process()
    refuse_wrapped(modules)
    _require(values, records=records, chunk=chunk)
    require_delta(delta)
    require_proof(accountant)
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
        entry.reserve(1)
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
    """The noise, and the ε that it costs."""
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

    What a function returns is clamped to 0 to 1. Under replace-one ½ is taken off each value, and
    `taken_off` is what that comes to in each sum: all neighbours have as many records.
    """

    functions: tuple[RecordValues, ...]
    loader: Loader
    modules: tuple[nn.Module, ...]
    chunk: int
    relation: Relation
    of_each_record: ClassVar[bool] = False

    def bounded(self, work: BatchPass | None = None) -> Bounded:
        """The sums, in whole units, and √k for k functions, or half of it where ½ is taken off."""
        total, _ = self._sums
        l2 = _bound(len(self.functions), self.relation)
        return Bounded({"values": total.double() / _UNIT}, l2=l2)

    def event(self, noise_multiplier: float) -> DpEvent:
        """One Gaussian release."""
        return gaussian(noise_multiplier).event

    @property
    def taken_off(self) -> float:
        """What was taken off each sum."""
        return self._sums[1]

    @cached_property
    def _sums(self) -> tuple[Int64[Tensor, " k"], float]:
        total = torch.zeros(len(self.functions), dtype=torch.int64)
        middle, records = _UNIT // 2 if _centred(self.relation) else 0, 0
        # How far the random state moves would tell the number of records.
        with torch.random.fork_rng():
            for place, batch in enumerate(_chunks(self.loader, self.chunk)):
                for k, function in enumerate(self.functions):
                    found = observe(function, batch, modules=self.modules, test=place == 0)
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
    """Whether the number of records is the same for all neighbours, and none of them is absent."""
    return relation is Relation.REPLACE_ONE


def _bound(k: int, relation: Relation) -> float:
    """√k for k values from 0 to 1, and half of it for as many from -½ to ½; not rounded down."""
    root = math.sqrt(k)
    whole = math.nextafter(root, math.inf) if math.isqrt(k) ** 2 != k else root
    return whole / 2 if _centred(relation) else whole
