"""Are per-sample gradients those of one record at a time, and their norms upper bounds?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hushgrad.batches import records
from hushgrad.gradients import AnyGradients, Form, auto, per_sample
from hushgrad.gradients.reference import COARSE, FINE, WithoutRandomness, one_record
from hushgrad.testing.requiring import require
from hushgrad.types import Batch, Loss, Params, Refused


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
            require(holds, "no norms and zero sums of no records", found, "handle an empty batch")


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
        require(off <= max(1e-5, rough), f"{at}: norm estimates within 1e-5", off, fix)
        above = 1 + (g.sq_norms()[name].sqrt() - norm) / scale
        holds = bool(((above >= 1 - max(1e-6, rough)) & (above <= 1.01 + rough)).all())
        fix = "return the norm plus its own rounding error, and no more"
        require(holds, f"{at}: norms 1 to 1.01 of one-record runs", above.tolist(), fix)


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
                require(float(error) <= max(1e-5, rough), expected, float(error), fix)
