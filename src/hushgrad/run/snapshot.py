"""The state of a run's model and optimizer, to detect whether anybody else wrote to them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hushgrad.bits import digests
from hushgrad.types import Refused


@dataclass(frozen=True)
class Snapshot:
    """Digests of everything in a model's state dict, and of the optimizer's tensors.

    Digests of bits, so that values that were changed and restored are no change.
    """

    model: dict[str, int]
    optimizer: dict[str, int]

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
        """Return the present state of both."""
        return cls(digests(_held_by_model(model)), digests(_held_by_optimizer(optimizer)))

    def require_same(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a model or an optimizer that is not as the run left it.

        Entries that were removed from the optimizer's state are allowed: momentum may be reset.
        """
        now = Snapshot.of(model, optimizer)
        if now.model != self.model:
            names = now.model.keys() | self.model.keys()
            raise _changed({n for n in names if now.model.get(n) != self.model.get(n)})
        # A subset is allowed, as the user may reset momentum, which reads no record.
        if not now.optimizer.items() <= self.optimizer.items():
            raise Refused(
                "expected the optimizer's state as the last step of the run left it, got another; "
                "do not call optimizer.step() or optimizer.load_state_dict() between the steps of "
                "a run: what they do is not private"
            )


def _changed(names: Collection[str]) -> Refused:
    some = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))
    return Refused(
        f"expected the model as the last step of the run left it, got other values of {some}. "
        "What else writes to it, such as optimizer.step(), load_state_dict() or a forward pass in "
        "training mode, is not private, but the run's guarantee would cover it: let only run.step "
        "take steps, evaluate in eval() mode or on a copy, project in Sgd(project=…), and load or "
        "change weights before the loop or after run.finish() has ended the run"
    )


def _held_by_model(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, private or frozen, and the buffers that are saved, each once."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    for prefix, owner in model.named_modules():
        for name, buffer in owner._buffers.items():
            # Buffers that are not saved are not part of what is released.
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _held_by_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        # Parameters as keys have no names here; they live as long as the run.
        f"{id(owner)} {name}": x
        for owner, state in optimizer.state.items()
        if isinstance(state, dict)
        for name, x in state.items()
        if isinstance(x, Tensor)
    }
