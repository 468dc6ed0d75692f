"""Neighbouring batches: the sum may not move further than the stated sensitivity."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hushgrad import Execution, Relation, clipped_sum
from hushgrad.clipping.groups import blocks, per_layer, per_parameter, whole
from hushgrad.clipping.rules import abadi, automatic, custom, discard, normalize, reparameterized
from hushgrad.gradients import Form, dense, loop, per_sample, traced
from hushgrad.types import Bounded
from zoo.small import Everything

RULES = [
    abadi(0.3),
    automatic(),
    normalize(),
    discard(20.0),
    reparameterized(0.2),
    custom(lambda norms: 5 / norms.clamp_min(1e-9), bound=1.0),
]
GROUPINGS = [whole, per_layer, per_parameter, blocks({"tied": "words*", "rest": "*"})]
FORMS = [traced, dense, loop]


torch.manual_seed(0)  # rounding depends on the model
MODEL = Everything()
PARAMS = dict(MODEL.named_parameters())


def loss(batch: dict[str, Tensor]) -> Tensor:
    logits = MODEL(batch["tokens"], batch["shift"]).transpose(1, 2)
    return F.cross_entropy(logits, batch["tokens"], reduction="none").sum(1)


def records(count: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(9, (count, 6), generator=generator),
        "shift": torch.randn(count, 6, 8, generator=generator),
    }


def changed(batch: dict[str, Tensor], how: str, at: int = 2) -> dict[str, Tensor]:
    """The neighbour of a batch."""
    keep = [i for i in range(len(batch["tokens"])) if i != at]
    if how == "remove":
        return {name: x[keep] for name, x in batch.items()}
    if how == "add":
        extra = records(1, seed=99)
        return {name: torch.cat([x[:at], extra[name], x[at:]]) for name, x in batch.items()}
    new = {name: x.clone() for name, x in batch.items()}
    value = {"replace": None, "nan": math.nan, "inf": math.inf, "1e30": 1e30, "1e-30": 1e-30}[how]
    if value is None:
        for name, x in records(1, seed=7).items():
            new[name][at] = x[0]
    else:
        new["shift"][at] = value
    return new


def distance(one: Bounded, other: Bounded) -> float:
    squares = [(one.sum[n].double() - other.sum[n].double()).square().sum() for n in one.sum]
    return math.sqrt(float(torch.stack(squares).sum()))


NEIGHBOURS = {
    "remove": Relation.ADD_REMOVE,
    "add": Relation.ADD_REMOVE,
    "replace": Relation.REPLACE_ONE,
    "nan": Relation.REPLACE_ONE,
    "inf": Relation.REPLACE_ONE,
    "1e30": Relation.REPLACE_ONE,
    "1e-30": Relation.REPLACE_ONE,
}


@pytest.mark.parametrize("form", FORMS, ids=repr)
@pytest.mark.parametrize("groups", GROUPINGS, ids=["whole", "layer", "parameter", "blocks"])
@pytest.mark.parametrize("clip", RULES, ids=lambda clip: clip.name)
def test_no_record_moves_the_sum_further_than_stated(clip, groups, form) -> None:
    batch = records(11)
    sums = {}
    for how in ("", *NEIGHBOURS):
        neighbour = changed(batch, how) if how else batch
        sums[how] = clipped_sum(
            loss,
            PARAMS,
            neighbour,
            clip=clip,
            groups=groups,
            modules=(MODEL,),
            execution=Execution(form=form, micro_batch=8 if how == "replace" else None),
        )
    for how, relation in NEIGHBOURS.items():
        moved = distance(sums[""], sums[how])
        assert math.isfinite(moved), how
        assert moved <= sums[""].sensitivity(relation), how


def test_the_bound_is_tight() -> None:
    """A test of sensitivity that passes for any bound would prove nothing."""
    batch = records(11)
    full = clipped_sum(loss, PARAMS, batch, clip=normalize(), modules=(MODEL,))
    less = clipped_sum(loss, PARAMS, changed(batch, "remove"), clip=normalize(), modules=(MODEL,))
    assert distance(full, less) > 0.99 * full.sensitivity(Relation.ADD_REMOVE)


@pytest.mark.parametrize("form", FORMS, ids=repr)
@pytest.mark.parametrize("size", [1, 3, 8, 9, 17, 40])
def test_a_record_keeps_its_bits_beside_other_records(size: int, form: Form) -> None:
    """Norm and contribution of one record, as others are removed, replaced and shifted."""
    own = records(1, seed=5)
    reference = None
    for seed in (1, 2):
        for place in sorted({0, size // 2, size - 1}):
            batch = records(size, seed)
            for name, x in own.items():
                batch[name][place] = x[0]
            gradients = per_sample(loss, PARAMS, batch, form=form, modules=(MODEL,))
            chosen = torch.zeros(size, dtype=torch.float64)
            chosen[place] = 1
            bits = {name: s[place] for name, s in gradients.sq_norms().items()}
            bits |= {
                f"{n}.g": g
                for n, g in gradients.weighted_sum(dict.fromkeys(PARAMS, chosen)).items()
            }
            reference = reference or bits
            for name, value in bits.items():
                assert torch.equal(value, reference[name]), (name, seed, place)
    alone = per_sample(loss, PARAMS, own, form=form, modules=(MODEL,)).sq_norms()
    for name, value in alone.items():
        assert torch.equal(value[0], reference[name]), name
