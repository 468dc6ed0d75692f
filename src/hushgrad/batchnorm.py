"""BatchNorm couples the records of a batch; GroupNorm does the same work for each by itself."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def replace_batchnorm(model: Model, *, max_groups: int = 32) -> Model | nn.GroupNorm:
    """Put a GroupNorm in the place of every BatchNorm of `model`, and return the model.

    Scale and shift are taken over; running statistics are dropped. The keys of weight and bias in
    the state dict stay as they are. A model that is itself a BatchNorm comes back as a GroupNorm.
    """
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        return _group_norm(model, max_groups)
    for name, child in model.named_children():
        replaced = replace_batchnorm(child, max_groups=max_groups)
        if replaced is not child:
            setattr(model, name, replaced)
    return model


def _group_norm(norm: nn.modules.batchnorm._BatchNorm, max_groups: int) -> nn.GroupNorm:
    channels = norm.num_features
    groups = max(g for g in range(1, min(max_groups, channels) + 1) if channels % g == 0)
    new = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        with torch.no_grad():
            new.weight.copy_(norm.weight)
            new.bias.copy_(norm.bias)
        new.to(norm.weight.device, norm.weight.dtype)
        new.weight.requires_grad_(norm.weight.requires_grad)
        new.bias.requires_grad_(norm.bias.requires_grad)
    return new.train(norm.training)
