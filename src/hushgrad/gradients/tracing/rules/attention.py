"""Multi-head attention: torch's own, whose projections are then seen one by one."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch.nn.functional as F

from hushgrad.gradients.tracing.rules.registry import decomposition


def without_overrides(function: Any) -> FunctionType:
    """A function of torch that is written in Python, without its question for special tensors.

    It would hand itself over as one call; without that its own body runs, whatever the layout and
    the masks, and each operation in it on a parameter comes by itself.
    """
    scope = {**function.__globals__, "has_torch_function": lambda tensors: False}
    return FunctionType(function.__code__, scope, function.__name__, function.__defaults__)


decomposition(F.multi_head_attention_forward)(without_overrides(F.multi_head_attention_forward))
