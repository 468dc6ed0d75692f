"""Replace BatchNorm, which mixes the records of a batch, by GroupNorm, which does not."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hushgrad.types import Refused

Model = TypeVar("Model", bound=nn.Module)

# Normalising n values leaves n - 2 degrees of freedom: nothing of one value, of two the signs.
_LEAST_GROUP = 8
_LEAST_ROW = 4  # channels of inputs [B, C], whose only values are those of the one position


class GroupNormThen(nn.GroupNorm):
    """A GroupNorm followed by the child layers of the BatchNorm subclass that it replaces."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then run the layers in order."""
        return _through(self, super().forward(x))


def replace_batchnorm(
    model: Model, *, max_groups: int = 32, least_group: int = _LEAST_GROUP
) -> Model | nn.GroupNorm:
    """Replace every BatchNorm of `model` by a GroupNorm, in place.

    BatchNorm mixes the records of a batch, so no bound on one record's gradient holds. The new
    layers keep weight and bias under the same state-dict keys and drop the running statistics.
    Layers that a subclass runs after normalising (an activation, a dropout) are kept.

    Args:
        model: any module; it is changed in place.
        max_groups: the largest number of groups.
        least_group: the fewest channels in a group, or all channels if there are fewer. For inputs
            of shape `[B, C]` only the channels of a group are normalised together, and a group of
            one channel would return the same value for every record.

    Returns:
        The model; if the model is itself a BatchNorm, its GroupNorm.

    Raises:
        Refused: for a layer that a GroupNorm cannot replace; the message names the layer.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        >>> replace_batchnorm(model)[1].num_groups
        8

    Reference: Wu and He 2018, Group Normalization.
    """
    if max_groups < 1 or least_group < 1:
        raise ValueError(
            f"expected max_groups and least_group >= 1, got {max_groups} and {least_group}"
        )
    replacements = {
        id(norm): _group_norm(norm, path, max_groups, least_group)
        for path, norm in model.named_modules()
        if isinstance(norm, _BatchNorm)
    }
    for module in list(model.modules()):
        for name, child in module._modules.items():  # one layer may have several names
            if id(child) in replacements:
                module._modules[name] = replacements[id(child)]
    return replacements.get(id(model), model)


def _group_norm(norm: _BatchNorm, path: str, max_groups: int, least_group: int) -> nn.GroupNorm:
    _refuse_irreplaceable(norm, path)
    channels = norm.num_features
    fits = [
        g for g in range(1, max_groups + 1) if channels % g == 0 and channels >= g * least_group
    ]
    kind = GroupNormThen if norm._modules else nn.GroupNorm
    new = kind(max(fits, default=1), channels, eps=norm.eps, affine=norm.affine)
    for name, p in norm.named_parameters(recurse=False):
        own = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
        new.register_parameter(name, own)
    if norm.affine and "bias" not in dict(norm.named_parameters()):  # scaled, but not shifted
        new.register_parameter("bias", None)
    for name, child in norm.named_children():
        new.add_module(name, child)
    new.training = norm.training
    return new


def _refuse_irreplaceable(norm: _BatchNorm, path: str) -> None:
    layer = f"{f'layer {path!r}' if path else 'the model'} is a {type(norm).__name__}"
    if norm.num_features == 0:
        raise Refused(
            f"{layer} that has seen no batch yet and does not know its number of channels; run the "
            "model once on a batch of zeros, and replace it then"
        )
    if norm._forward_hooks or norm._forward_pre_hooks:
        raise Refused(
            f"{layer} with hooks, which would be lost; remove them first, and register them again "
            "on the new layer"
        )
    if isinstance(norm, nn.BatchNorm1d) and norm.num_features < _LEAST_ROW:
        raise Refused(
            f"{layer} of {norm.num_features} channels, too few to normalise within one record: "
            "the outputs would hardly differ between records; use nn.Identity() for inputs "
            f"[B, C], or nn.GroupNorm(1, {norm.num_features}) for inputs [B, C, L]"
        )
    plain = type(norm).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    if not (plain and not norm._modules) and not _is_batch_norm_then_children(norm):
        raise Refused(
            f"{layer}, whose forward does more than normalise and then run its child layers in "
            "order, which would be lost; replace it by hand, for example by nn.GroupNorm"
        )


def _is_batch_norm_then_children(norm: _BatchNorm) -> bool:
    """Test whether a subclass computes BatchNorm followed by its child layers."""
    dims = 4
    if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm3d):
        dims = 2 if isinstance(norm, nn.BatchNorm1d) else 5
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        trial = copy.deepcopy(norm).float().cpu()
        for x in (*trial.parameters(recurse=False), *trial.buffers(recurse=False)):
            if x.is_floating_point():
                x.uniform_(0.5, 2)
        x = 3 * torch.randn(6, norm.num_features, *[4] * (dims - 2))
        return all(_same_in_mode(trial.train(training), x) for training in (False, True))


def _same_in_mode(norm: _BatchNorm, x: Tensor) -> bool:
    by_batch = norm.training or norm.running_mean is None
    statistics = (None, None) if by_batch else (norm.running_mean, norm.running_var)
    normalised = F.batch_norm(
        x, *statistics, norm.weight, norm.bias, training=by_batch, eps=norm.eps
    )
    try:
        torch.manual_seed(1)
        expected = _through(norm, normalised)
        torch.manual_seed(1)
        return torch.allclose(norm(x.clone()), expected, rtol=1e-4, atol=1e-4)
    except Exception:  # the shapes of its layers do not fit, or it takes other inputs
        return False


def _through(module: nn.Module, x: Tensor) -> Tensor:
    for child in module.children():
        x = child(x)
    return x
