"""Quantised layers: what can be trained is exact, what cannot is named."""

from __future__ import annotations

import warnings

import pytest
import torch
from compare import check, private
from torch import nn
from uses import loss_of

from hushgrad.gradients import per_sample
from hushgrad.types import Refused


def test_quantisation_aware_training_is_exact() -> None:
    """Rounding that only pretends is an operation like others; its observer reads the weight."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        layer = torch.ao.nn.qat.Linear(4, 3, qconfig=config)
    check(loss_of(layer), layer, torch.randn(8, 4))


def quantised(dynamic: bool) -> nn.Module:
    """A layer that is quantised between two that are not."""
    quantisation, model = torch.ao.quantization, nn.Sequential()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        middle = nn.Sequential(
            quantisation.QuantStub(), nn.Linear(4, 4), quantisation.DeQuantStub()
        )
        if dynamic:
            middle = quantisation.quantize_dynamic(middle[1:2], {nn.Linear})
        else:
            middle.qconfig = quantisation.get_default_qconfig("fbgemm")
            watched = quantisation.prepare(middle.eval())
            watched(torch.randn(20, 4))
            middle = quantisation.convert(watched)
    return model.extend([nn.Linear(4, 4), middle, nn.Linear(4, 2)])


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        (
            True,
            r"layer '1\.1' is a dynamically quantised Linear.*use the layer that it was made from",
        ),
        (False, r"0\.weight .*no path .*1\.0'? is a quantised Quantize.*freeze it"),
    ],
)
def test_a_quantised_layer_is_named(dynamic: bool, message: str) -> None:
    model = quantised(dynamic)
    with pytest.raises(Refused, match=message):
        per_sample(loss_of(model), private(model), torch.randn(8, 4), modules=(model,))


def test_what_follows_a_quantised_layer_can_be_trained() -> None:
    model = quantised(dynamic=False)
    model[0].requires_grad_(False)
    check(loss_of(model), model, torch.randn(8, 4))
