"""Probes differ from one another wherever they are made."""

from __future__ import annotations

import torch
from torch import nn

from hushgrad.gradients.certification.deterministic import WithoutRandomness, perturb_randomly
from hushgrad.gradients.probes import distinct, distinct_records, variations


def test_probes_are_the_same_inside_a_mode_that_replaces_draws() -> None:
    """All at their median, none of them would differ from the records that they vary."""
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    params = dict(model.named_parameters())
    found = []
    for inside in (False, True):
        with WithoutRandomness() if inside else torch.enable_grad(), perturb_randomly(params):
            found.append([variations(x, seed=2), *(p.detach().clone() for p in params.values())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not (found[0][0] == x).any()
    assert not torch.equal(found[0][1], model.weight)


def test_records_that_are_all_alike_are_varied_inside_such_a_mode() -> None:
    with WithoutRandomness():
        few = distinct_records(torch.ones(5, 3), 5)
    assert len(distinct(few)) == 4
