"""Contract suites: tests that your own clipping rule, form of gradients or sampler must pass.

Each suite returns nothing if the contract holds. Otherwise it raises `AssertionError`, which says
what was expected, what came, and how to mend it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor, nn

from hushgrad.accounting import ACCOUNTANTS, PLD, gaussian, poisson
from hushgrad.batches import records
from hushgrad.clipping.rules import Clip
from hushgrad.events import Participation, repeated
from hushgrad.gradients import AnyGradients, Form, auto, per_sample
from hushgrad.gradients.reference import COARSE, FINE, WithoutRandomness, one_record
from hushgrad.rng import Rng
from hushgrad.sampling import Scheme
from hushgrad.types import Batch, Loss, Params, Refused, Relation


def check_clip_rule(clip: Clip, groups: int = 1) -> None:
    """Check that a clipping rule keeps its bound, and treats each record on its own.

    The library clamps the weights of every rule to the bound that the rule states. This suite tells
    whether your rule would need the clamp.

    Args:
        clip: the rule, such as `clipping.custom(...)`.
        groups: the number of groups of parameters to try it with.

    Raises:
        AssertionError: if a weight exceeds the bound, is not finite, is not repeatable, or
            depends on other records in the batch.

    Example:
        >>> from hushgrad import clipping
        >>> check_clip_rule(clipping.automatic(), groups=3)
    """
    clip_norms = torch.tensor(clip.clip_norms(groups), dtype=torch.float64)
    bound, norms = clip.bound(groups), _norms(groups)
    for one in norms:
        weights, again = (clip.weigh(one.clone(), clip_norms) for _ in range(2))
        at = f"{clip.name} at norms {one.tolist()}"
        shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights)
        fix = "return one weight for each group of the one record that is given"
        _require(shape == (groups,), f"{at}: a tensor of shape ({groups},)", shape, fix)
        fix = "give a norm of zero, a tiny and a huge one a weight of their own (torch.where)"
        _require(bool(weights.isfinite().all()), f"{at}: finite weights", weights.tolist(), fix)
        length = float((weights * one).square().sum().sqrt())
        fix = "shorten the weights, or state a larger bound"
        _require(length <= bound * (1 + 1e-9), f"{at}: a norm up to {bound:.6g}", length, fix)
        fix = "draw no random numbers and keep no state in a rule"
        same = torch.equal(weights, again)
        _require(same, f"{at}: {weights.tolist()} again", again.tolist(), fix)
    together, last = clip.weights(norms), torch.tensor(groups - 1)
    for i, one in enumerate(norms):
        alone, turned = clip.weights(one[None])[0], clip.weights(norms[i:].flip(0))[-1]
        came = torch.stack([alone, together[i], turned])
        fix = "compute them from that record's norms only, by elementwise operations"
        expected = f"{clip.name}: the same weights for a record alone and in a batch"
        _require(bool((came == alone).all()), expected, came.tolist(), fix)
    for bad in (torch.nan, torch.inf):
        came = clip.weights(torch.stack([norms[0], norms[1].index_fill(0, last, bad)]))
        holds = torch.equal(came[0], together[0]) and not came[1].any()
        expected = f"{clip.name}: weight 0 at a norm of {bad}, the other record unmoved"
        _require(holds, expected, came.tolist(), "leave Clip.weights as it is")


def _norms(groups: int) -> Tensor:
    """Return norms of all magnitudes: equal in all groups, in one group only, and random."""
    sizes = torch.tensor([0, 1e-30, 1e-12, 1e-3, 0.5, 1, 2, 1e3, 1e12, 1e30]).double()[:, None]
    one_only = torch.eye(groups, dtype=torch.float64)[0]
    random = torch.randn(40, groups, generator=torch.Generator().manual_seed(0)).double()
    rows = [sizes.expand(-1, groups), sizes * one_only, sizes * one_only.flip(0)]
    return torch.cat([*rows, random.exp(), (20 * random).clamp(-60, 60).exp()])


def check_per_sample(
    loss: Loss,
    params: Params,
    batch: Batch,
    *,
    form: Form | Sequence[Form] = auto,
    modules: Sequence[nn.Module] = (),
) -> None:
    """Check per-sample gradients against gradients computed for one record at a time.

    Random operations (dropout) are replaced by their means during the check.

    Args:
        loss: takes a batch and returns one loss for each record.
        params: the private parameters, by name.
        batch: a few records with finite values.
        form: the forms to try, in order.
        modules: the modules that the loss uses, whose buffers are restored.

    Raises:
        AssertionError: if norms or weighted sums differ, if a NaN record of weight 0 changes a
            sum, or if an empty batch fails.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> params = dict(model.named_parameters())
        >>> check_per_sample(lambda x: model(x).squeeze(1).square(), params, torch.randn(4, 3))
    """

    def certify(loss: Loss, batch: Batch) -> AnyGradients:
        try:
            return per_sample(loss, params, batch, form=form, modules=modules)
        except Refused as refusal:
            raise AssertionError(f"expected {form} to be certified, got: {refusal}") from refusal

    with WithoutRandomness() as neutral:
        g = certify(loss, batch)
        exact = _one_by_one(loss, params, batch)
        rough = FINE.get(neutral.narrowest, COARSE).rounding
        for what, combined, times in (("g", g, 1.0), ("0.5 * g + g", 0.5 * g + g, 1.5)):
            _check_norms(combined, {k: times * x for k, x in exact.items()}, rough, what)
            _check_sums(combined, {k: times * x for k, x in exact.items()}, rough, what)
        # A factor makes the first record's loss NaN, for every type of record.
        factor = torch.ones(records.count(batch), device=next(iter(params.values())).device)
        factor[0] = torch.nan
        tainted = certify(lambda x: loss(x[0]) * x[1], (batch, factor))
        _check_sums(tainted, exact, rough, "a nan record of weight 0", skip=1)
        empty = certify(loss, records.cut(batch, 0, 0))
        for none in (empty, 0.5 * empty + empty):
            sums = none.weighted_sum(dict.fromkeys(params, factor[:0].double()))
            found = [*none.sq_norms().values(), *(x[x != 0] for x in sums.values())]
            holds = len(found) == 2 * len(params) and not torch.cat(found).numel()
            _require(holds, "no norms and zero sums of no records", found, "handle an empty batch")


def _one_by_one(loss: Loss, params: Params, batch: Batch) -> dict[str, Tensor]:
    """Return each record's gradient, flattened, in float64."""
    found: dict[str, list[Tensor]] = {name: [] for name in params}
    for i in range(records.count(batch)):
        alone = records.cut(batch, i, i + 1)
        for name, x in one_record(loss, params, alone, records.MULTIPLE)[1].items():
            found[name].append(torch.zeros_like(params[name]) if x is None else x)
    return {name: torch.stack(x).detach().double().flatten(1) for name, x in found.items()}


def _scales(exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the scale of errors: a parameter's norm, or 1 % of all parameters' if larger."""
    total = torch.cat([*exact.values()], 1).norm(dim=1)
    return {name: torch.maximum(x.norm(dim=1), 0.01 * total) + 1e-30 for name, x in exact.items()}


def _check_norms(g: AnyGradients, exact: dict[str, Tensor], rough: float, what: str) -> None:
    for name, scale in _scales(exact).items():
        norm, at, estimate = exact[name].norm(dim=1), f"{what}, {name}", g.squares[name].estimate
        off = float(((estimate.clamp_min(0).sqrt() - norm).abs() / scale).max())
        fix = "add up every use of the parameter"
        _require(off <= max(1e-5, rough), f"{at}: norm estimates within 1e-5", off, fix)
        above = 1 + (g.sq_norms()[name].sqrt() - norm) / scale
        holds = bool(((above >= 1 - max(1e-6, rough)) & (above <= 1.01 + rough)).all())
        fix = "return the norm plus its own rounding error, and no more"
        _require(holds, f"{at}: norms 1 to 1.01 of one-record runs", above.tolist(), fix)


def _check_sums(
    g: AnyGradients, exact: dict[str, Tensor], rough: float, what: str, skip: int = 0
) -> None:
    for name, scale in _scales(exact).items():
        draws = torch.linspace(-1, 2, len(scale), dtype=torch.float64, device=scale.device)
        draws[:skip] = 0
        for weights in (draws, draws.square(), draws + draws.square(), 0 * draws):
            size = float((weights.abs() * scale).sum()) + 1e-30
            expected = f"{what}, {name}: the weighted sum of one-record gradients within 1e-5"
            fix = "sum what was measured, and mask records of weight 0, as 0 * nan is nan"
            # The smaller error forces a sum in float64.
            for within in (math.inf, 1e-6 * size):
                came = g.weighted_sum(dict.fromkeys(exact, weights), within=within)[name]
                error = (came.double().flatten() - weights @ exact[name]).norm() / size
                _require(float(error) <= max(1e-5, rough), expected, float(error), fix)


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
        _require(holds, f"{what}: positions below {num_records}", positions.tolist(), fix)
        table[step, positions] = True
    again = [scheme.draw(num_records, step=step, rng=rng) for step in (3, 0, 3)]
    same = all(np.array_equal(x, drawn[step]) for x, step in zip(again, (3, 0, 3), strict=True))
    fix = "draw from rng.derive(..., step) alone, and keep no state"
    _require(same, f"{what}: the same batch whenever a step is drawn", "another", fix)
    sizes, size = table.sum(1), scheme.expected_batch(num_records)
    if scheme.sees_all:
        fix = "return every position, or answer False to sees_all"
        _require(bool(table.all()), f"{what}: every record in each batch", "others", fix)
    elif size < num_records:
        other = scheme.draw(num_records, step=0, rng=Rng.fixed(1))
        fix = "draw from the rng that is given"
        differs = not all(np.array_equal(x, drawn[0]) for x in (*drawn[1:4], other))
        _require(differs, f"{what}: other batches at other steps and keys", "the same", fix)
    length = scheme.epoch(num_records)
    if length is None:  # in an epoch, the last batch may be smaller
        error = 6 * float(sizes.std()) / math.sqrt(steps) + 1e-9 * size
        near = abs(float(sizes.mean()) - size) <= error
        fix = "return the mean size from expected_batch: sums are divided by it"
        _require(near, f"{what}: batches of {size:g} on average", float(sizes.mean()), fix)
    else:
        whole = table[: steps // length * length].reshape(-1, length, num_records).sum(1)
        fix = "put each record into exactly one batch of an epoch"
        _require(
            bool((whole == 1).all()), f"{what}: each record once in {length} steps", "not", fix
        )
    rate = table.mean()
    off = float(np.abs(table.mean(0) - rate).max())
    fix = "draw every record with the same probability: amplification assumes it"
    most = 6 * math.sqrt(rate * (1 - rate) / steps)
    _require(off <= most, f"{what}: each record as often as any other", off, fix)
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
    _require(most <= 1, f"{what}: a record at every {turns.cycle}th step only", most, fix)
    seen = [float(table[k :: turns.cycle, group].mean()) for k, group in enumerate(groups)]
    off = max(
        abs(rate - turns.rate) for rate, group in zip(seen, groups, strict=True) if any(group)
    )
    fix = "state the rate at which a record is drawn when its turn comes"
    error = 6 * math.sqrt(turns.rate * (1 - turns.rate) * turns.cycle / steps)
    _require(off <= error, f"{what}: each turn at rate {turns.rate:g}", seen, fix)
    event = scheme.run_event(gaussian(1.0), num_records=table.shape[1], num_steps=2 * turns.cycle)
    least = repeated(2, poisson(0.97 * turns.rate, gaussian(1.0)))
    found, expected = (PLD.epsilon(run, delta=1e-5) for run in (event, least))
    fix = "count a turn for each cycle of steps"
    _require(found >= expected, f"{what}: at least ε = {expected:.4g} for two turns", found, fix)


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
    _require(bool(found), f"{what}: an accountant for its event", event, fix)
    least = PLD.epsilon(poisson(0.97 * rate, step), delta=1e-5, relation=Relation.ADD_REMOVE)
    fix = f"claim no more than that a record is in a batch with probability {rate:.3g}"
    _require(min(found) >= least, f"{what}: at least ε = {least:.4g} for a step", min(found), fix)


def _require(holds: bool, expected: str, came: object, fix: str) -> None:
    if not holds:
        raise AssertionError(f"expected {expected}, got {came}; {fix}")
