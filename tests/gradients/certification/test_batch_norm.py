"""BatchNorm is refused where it mixes records, and its replacement does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import check, private
from torch import Tensor, nn
from uses import squared

from hushgrad import Refused, replace_batchnorm
from hushgrad.gradients import auto, dense, loop, per_sample

FORMS = pytest.mark.parametrize("form", [auto, dense, loop], ids=["auto", "dense", "loop"])


@FORMS
@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (nn.BatchNorm1d(4), "layer '1' is a BatchNorm1d"),
        (nn.BatchNorm1d(4, affine=False, track_running_stats=False), "layer '1' is a BatchNorm1d"),
        (nn.SyncBatchNorm(4), "layer '1' is a SyncBatchNorm"),
    ],
    ids=["affine", "bare", "sync"],
)
def test_batch_norm_in_training_mode_is_refused(norm: nn.Module, name: str, form: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), norm)
    message = f"{name} in training mode.*normalises each record by the others.*replace_batchnorm"
    with pytest.raises(Refused, match=message):
        per_sample(squared(model), private(model), torch.randn(8, 3), form=form, modules=(model,))


@FORMS
@pytest.mark.parametrize("modules", [True, False])
def test_batch_norm_without_statistics_is_refused_in_eval_mode_too(
    modules: bool, form: Any
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises(Refused, match=r"BatchNorm|batch_norm"):
        per_sample(
            squared(model),
            private(model),
            torch.randn(8, 3),
            form=form,
            modules=(model,) if modules else (),
        )


@FORMS
def test_functional_batch_norm_is_refused(form: Any) -> None:
    layer, scale = nn.Linear(3, 4), nn.Parameter(torch.ones(4))
    params = {**private(layer), "scale": scale}

    def loss(x: Tensor) -> Tensor:
        return F.batch_norm(layer(x), None, None, scale, training=True).square().sum(1)

    with pytest.raises(Refused, match=r"BatchNorm|batch_norm"):
        per_sample(loss, params, torch.randn(8, 3), form=form)


def test_batch_norm_in_eval_mode_is_exact() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model(torch.randn(50, 3))
    model[1].eval()
    check(squared(model), model, torch.randn(9, 3))


def test_replacing_batch_norm_mends_it() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Sequential(nn.BatchNorm2d(6))
    )
    with torch.no_grad():
        for norm in (model[1], model[3][0]):
            norm.weight.normal_()
            norm.bias.normal_()
    before = {k: v.clone() for k, v in model.state_dict().items() if k.endswith(("weight", "bias"))}
    assert replace_batchnorm(model) is model
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    check(squared(model), model, torch.randn(5, 1, 6, 6))


def test_replacing_keeps_what_was_frozen_and_the_mode() -> None:
    norm = nn.BatchNorm1d(16).eval()
    norm.weight.requires_grad_(False)
    new = replace_batchnorm(norm, max_groups=4)
    assert isinstance(new, nn.GroupNorm)
    assert (new.num_groups, new.training, new.weight.requires_grad) == (2, False, False)
    assert new.bias.requires_grad
