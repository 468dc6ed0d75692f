"""BatchNorm's replacement: records stay apart, and what a subclass adds stays there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad import Refused, replace_batchnorm
from hushgrad.batchnorm import GroupNormThen
from hushgrad.gradients import per_sample


def spread(outputs: Tensor) -> float:
    """By how much records differ, relative to the size of an entry: the least over channels."""
    rows = outputs.flatten(2) if outputs.dim() > 2 else outputs[..., None]
    return float(rows.std(0).amax(-1).min() / rows.abs().mean())


SHAPES: dict[type[nn.Module], list[tuple[int, ...]]] = {
    nn.BatchNorm1d: [(), (5,)],
    nn.BatchNorm2d: [(1, 1), (3, 3)],
    nn.BatchNorm3d: [(2, 2, 2)],
}


@pytest.mark.parametrize("channels", [4, 5, 8, 10, 13, 16, 32, 37, 64, 96, 256])
@pytest.mark.parametrize("kind", SHAPES)
def test_records_stay_apart(kind: Any, channels: int) -> None:
    new = replace_batchnorm(kind(channels))
    for positions in SHAPES[kind]:
        found = new(torch.randn(200, channels, *positions)).detach()
        assert spread(found) > 0.3
        # Not their signs alone, which groups of two channels would leave.
        assert len(found.abs().mul(1e3).round().unique()) > 100


@pytest.mark.parametrize("channels", range(4, 130))
def test_the_size_of_groups(channels: int) -> None:
    new = replace_batchnorm(nn.BatchNorm2d(channels))
    assert channels % new.num_groups == 0
    assert channels // new.num_groups >= min(8, channels)
    assert new.num_groups <= 32


def test_the_groups_may_be_chosen() -> None:
    assert replace_batchnorm(nn.BatchNorm2d(64), max_groups=4).num_groups == 4
    assert replace_batchnorm(nn.BatchNorm2d(64), least_group=2).num_groups == 32
    assert replace_batchnorm(nn.BatchNorm2d(6), least_group=100).num_groups == 1
    with pytest.raises(ValueError, match="max_groups and least_group >= 1"):
        replace_batchnorm(nn.BatchNorm2d(6), least_group=0)


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_too_few_channels_to_tell_records_apart_are_refused(channels: int) -> None:
    model = nn.Sequential(nn.Linear(5, channels), nn.Sequential(nn.BatchNorm1d(channels)))
    with pytest.raises(Refused, match=rf"layer '1\.0' is a BatchNorm1d of {channels} channels"):
        replace_batchnorm(model)
    assert replace_batchnorm(nn.BatchNorm2d(channels)).num_groups == 1


# --- subclasses ---------------------------------------------------------------------------------


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: normalises by a call of its own, then drops and activates."""

    def __init__(self, channels: int, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act()

    def forward(self, x: Tensor) -> Tensor:
        batch = self.training or not self.track_running_stats
        statistics = (None, None) if batch else (self.running_mean, self.running_var)
        x = F.batch_norm(x, *statistics, self.weight, self.bias, training=batch, eps=self.eps)
        return self.act(self.drop(x))


class NormReLU(nn.BatchNorm1d):
    """Which activates without a layer for it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class ActNorm(NormAct):
    """Which activates first."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, self.act(x))


class InTrainingOnly(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (1.0 if self.training else 0.0)


class Renamed(nn.BatchNorm2d):
    """Which changes nothing."""


class Taught(nn.BatchNorm2d):
    """With a parameter of its own, which it adds."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.extra = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra


@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU, nn.PReLU])
def test_what_a_subclass_adds_is_kept(act: Any) -> None:
    model = nn.Sequential(nn.Conv2d(1, 16, 3), NormAct(16, act), nn.Flatten(), nn.Linear(256, 2))
    with torch.no_grad():
        model[1].weight.normal_()
        model[1].bias.normal_()
    keys = {k for k in model.state_dict() if "running" not in k and "batches" not in k}
    layer, x = model[1], torch.randn(7, 16, 4, 4)
    expected = layer.act(F.group_norm(x, 2, layer.weight, layer.bias))
    assert replace_batchnorm(model) is model
    assert set(model.state_dict()) == keys
    assert isinstance(model[1], GroupNormThen)
    assert model[1].act is layer.act
    torch.testing.assert_close(model[1](x), expected)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    batch = (torch.randn(6, 1, 6, 6), torch.arange(6) % 2)
    per_sample(loss, dict(model.named_parameters()), batch, modules=(model,))


@pytest.mark.parametrize("kind", [NormReLU, ActNorm, InTrainingOnly, Taught])
def test_what_cannot_be_kept_is_refused_by_name(kind: Any) -> None:
    model = nn.Sequential(nn.Conv2d(1, 16, 3), kind(16))
    with pytest.raises(Refused, match=f"layer '1' is a {kind.__name__}, whose forward does more"):
        replace_batchnorm(model)
    assert type(model[1]) is kind


def test_a_subclass_that_changes_nothing_is_replaced() -> None:
    assert type(replace_batchnorm(Renamed(16))) is nn.GroupNorm


def test_a_weight_with_a_parametrisation_is_refused() -> None:
    norm = nn.BatchNorm2d(16)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    with pytest.raises(Refused, match="ParametrizedBatchNorm2d"):
        replace_batchnorm(nn.Sequential(norm))


def test_hooks_are_refused() -> None:
    model = nn.Sequential(nn.BatchNorm2d(16))
    model[0].register_forward_hook(lambda module, inputs, output: output.relu())
    with pytest.raises(Refused, match="layer '0' is a BatchNorm2d with hooks"):
        replace_batchnorm(model)


def test_batch_norm_over_processes_is_replaced() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(16)))
    assert type(model[0]) is nn.SyncBatchNorm
    assert type(replace_batchnorm(model)[0]) is nn.GroupNorm


def test_scale_and_shift_are_taken_over() -> None:
    norm = nn.BatchNorm2d(16, eps=0.1, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    norm.bias.requires_grad_(False)
    new = replace_batchnorm(norm)
    assert torch.equal(new.weight, norm.weight)
    assert new.weight is not norm.weight  # an optimizer must be made after this
    assert (new.eps, new.weight.requires_grad, new.bias.requires_grad) == (0.1, True, False)
    norm.register_parameter("bias", None)
    assert replace_batchnorm(norm).bias is None
    assert replace_batchnorm(nn.BatchNorm2d(16, affine=False)).weight is None


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_one_is_replaced_once_it_knows_its_channels(affine: bool) -> None:
    model = nn.Sequential(nn.LazyConv2d(16, 3), nn.LazyBatchNorm2d(affine=affine))
    with pytest.raises(Refused, match="layer '1' is a LazyBatchNorm2d that has seen no batch"):
        replace_batchnorm(model)
    model(torch.zeros(2, 1, 5, 5))
    assert replace_batchnorm(model)[1].num_groups == 2


# --- the model around them ----------------------------------------------------------------------


def test_a_layer_with_several_names_stays_one() -> None:
    norm = nn.BatchNorm2d(16)
    inner = nn.Sequential(norm)
    model = nn.ModuleDict({"a": norm, "b": norm, "c": inner, "d": inner})
    parameters = len(list(model.parameters()))
    replace_batchnorm(model)
    assert type(model["a"]) is nn.GroupNorm
    assert model["a"] is model["b"] is model["c"][0] is model["d"][0]
    assert len(list(model.parameters())) == parameters


def test_nothing_is_replaced_where_something_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm2d(16), nn.BatchNorm1d(1))
    with pytest.raises(Refused, match="'1'"):
        replace_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d


def test_timms_layer_keeps_its_activation() -> None:
    layers = pytest.importorskip("timm.layers")
    layer = layers.BatchNormAct2d(16)
    x = torch.randn(5, 16, 3, 3)
    new = replace_batchnorm(layer)
    torch.testing.assert_close(new(x), F.group_norm(x, 2).relu())
