"""Training: the user's loop, with a private gradient in the place of the ordinary one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.execution import Execution
from hushgrad.guarantee import Guarantee
from hushgrad.persample import check_optimizer
from hushgrad.persample.records import count
from hushgrad.plan import Plan
from hushgrad.rng import Rng
from hushgrad.sampling import Loader, Scheme, Stated
from hushgrad.step import private_gradient
from hushgrad.types import Batch, Loss, Params, Refused

_REFUSED_OPTIMIZERS = (torch.optim.LBFGS, torch.optim.SparseAdam)
_PLAIN = Execution()


class Run:
    """A private training run: draws the batches of its plan, and takes one step for each.

    Guarantees: what is drawn is what the plan accounts for; noise is added once to each step, also
    to an empty batch; the gradient is divided by a public number; only released values reach the
    optimizer. The run ends with its plan.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Callable[[range], Iterator[Batch]],
        *,
        plan: Plan,
        rng: Rng,
        execution: Execution,
    ) -> None:
        self.plan = plan
        self._model, self._optimizer, self._batches = model, optimizer, batches
        self._rng, self._execution = rng, execution
        self._params: Params = _trainable(model)
        self._position = self.steps_taken = 0
        self._drawn: int | None = None

    def __len__(self) -> int:
        return self.plan.steps

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the steps that are left; each is good for one step."""
        for batch in self._batches(range(self._position, self.plan.steps)):
            self._position += 1
            self._drawn = count(batch)
            yield batch
        self._drawn = None

    def step(
        self, loss: Loss, batch: Batch, *, penalty: Callable[[], Tensor] | None = None
    ) -> None:
        """One private step on the batch that was just drawn.

        `loss(batch)` returns one value for each record. `penalty()` reads no record (a weight
        decay, say), and its gradient is added after the noise.
        """
        self._require_drawn(batch)
        self._require_same_parameters()
        self._drawn = None
        released = private_gradient(
            loss,
            self._params,
            batch,
            plan=self.plan,
            step=self._position - 1,
            rng=self._rng,
            modules=(self._model,),
            execution=self._execution,
        )
        for name, p in self._params.items():
            p.grad = (released.values[name] / self.plan.divisor).to(p.dtype)
        if penalty is not None:
            _add_gradient(penalty, self._params)
        self._optimizer.step()
        self.steps_taken += 1

    @property
    def guarantee(self) -> Guarantee:
        """What the run guarantees, whenever it ends."""
        return Guarantee(self.plan, self.steps_taken, self._rng.reproducible)

    def _require_drawn(self, batch: Batch) -> None:
        if self._drawn is None:
            raise Refused(
                "expected a batch that the run has drawn and that no step has used, got another; "
                "call run.step once for each batch of `for batch in run`"
            )
        if count(batch) != self._drawn:
            raise Refused(
                "expected all the records of the batch that was drawn, got another number of them; "
                "pass the batch as it came, or each of its records transformed by itself"
            )

    def _require_same_parameters(self) -> None:
        now = _trainable(self._model)
        if {n: id(p) for n, p in now.items()} != {n: id(p) for n, p in self._params.items()}:
            changed = sorted(now.keys() ^ self._params.keys())
            raise Refused(
                f"expected the parameters that the run started with, got changes in "
                f"{', '.join(changed) or 'their tensors'}; start another run after freezing or "
                "unfreezing"
            )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Any,
    *,
    plan: Plan,
    rng: Rng,
    execution: Execution = _PLAIN,
) -> Run:
    """Start a private training run of `model` on `data`, by any first-order optimizer.

    `data` is a tensor, an array, a tuple or mapping of them, a map-style data set, or a
    `sampling.Loader` of one. With a sampling that was `Stated`, it is left None.
    """
    if isinstance(optimizer, _REFUSED_OPTIMIZERS):
        raise Refused(
            f"expected an optimizer that takes one dense gradient for each step, got "
            f"{type(optimizer).__name__}; use SGD or Adam"
        )
    check_optimizer(optimizer, _trainable(model))
    # Two runs from one key must not draw the same batches and noise.
    own = rng.derive("run") if rng.reproducible else rng.derive("run", secrets.token_bytes(16))
    batches = _batches(data, plan, own)
    return Run(model, optimizer, batches, plan=plan, rng=own, execution=execution)


def _batches(data: Any, plan: Plan, rng: Rng) -> Callable[[range], Iterator[Batch]]:
    sampling = plan.sampling
    if isinstance(sampling, Stated):
        if data is not None:
            raise ValueError(
                "expected data=None with a Stated sampling, whose loader has the data, got "
                f"a {type(data).__name__}; pass None"
            )
        return lambda steps: sampling.batches(num_records=plan.records, steps=steps)
    assert isinstance(sampling, Scheme)
    loader = data if isinstance(data, Loader) else Loader(data)
    return lambda steps: loader.batches(sampling, num_records=plan.records, steps=steps, rng=rng)


def _trainable(model: nn.Module) -> Params:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _add_gradient(penalty: Callable[[], Tensor], params: Params) -> None:
    with torch.enable_grad():
        found = torch.autograd.grad(penalty(), list(params.values()), allow_unused=True)
    for p, gradient in zip(params.values(), found, strict=True):
        if gradient is not None:
            assert p.grad is not None
            p.grad += gradient
