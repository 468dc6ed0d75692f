"""One adapter per library: how it clips a workload's batch, and one private step with it.

Every library clips each record's gradient to norm `CLIP_NORM` by Abadi's rule, adds the records
up, adds noise, and takes a step of SGD on the sum divided by the batch size. It is clipped as a
whole, except by `hushgrad-layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.workloads import Batch, Workload

CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 1e-3
RATE = 0.1  # what the plan says of the sampling; a step's time does not depend on it


class Steps(Protocol):
    """A workload set up to take steps."""

    def step(self) -> None:
        """One step, from the batch to new parameters."""


class Private(Steps, Protocol):
    """A workload set up for one library, and the names of the parameters clipped together."""

    groups: Sequence[Sequence[str]]

    def clipped_sum(self) -> dict[str, Tensor]:
        """The sum of the clipped gradients of the batch, without noise, by parameter name."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer of every step."""
    return torch.optim.SGD(trainable(model).values(), lr=LEARNING_RATE)


class Plain:
    """Without privacy: the step that all others are measured against, as it is or compiled."""

    def __init__(self, workload: Workload, *, compile: bool = False) -> None:
        self.batch = workload.batch
        self.loss = torch.compile(workload.loss) if compile else workload.loss
        self.optimizer = sgd(workload.model)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.batch, reduction="mean").backward()
        self.optimizer.step()


class Hushgrad:
    """This library, by `hg.train`: a step has all the checks and records that a user's has.

    Only the drawing of the batch is left out, as it is for every library here. The frugal form
    takes a second backward pass and holds less. With `layers` it needs no second pass, as each
    layer is clipped by itself.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        frugal: bool = False,
        layers: bool = False,
        compile: bool = False,
    ) -> None:
        import hushgrad as hg
        from hushgrad.gradients import auto, recomputed
        from hushgrad.sampling import Poisson, Stated

        self.workload, self.params = workload, trainable(workload.model)
        grouping = hg.per_layer if layers else hg.grouping.whole
        self.groups = tuple(dict.fromkeys(grouping(tuple(self.params)).members.values()))
        clip = hg.abadi(CLIP_NORM)
        execution = hg.Execution(form=recomputed if frugal or layers else auto, compile=compile)
        self.bounded = partial(
            hg.clipped_sum, clip=clip, groups=grouping, modules=(workload.model,),
            execution=execution,
        )  # fmt: skip
        plan = hg.Plan(
            records=round(len(workload.batch[0]) / RATE),
            sampling=Stated([workload.batch], Poisson(RATE)),
            steps=10**7,  # more than are ever taken
            noise_multiplier=NOISE_MULTIPLIER,
            delta=1e-5,
            clip=clip,
            groups=grouping,
        )
        self.run = hg.train(
            workload.model, sgd(workload.model), None, plan=plan, rng=hg.Rng.from_os(),
            execution=execution,
        )  # fmt: skip
        self.batches = iter(self.run)

    def clipped_sum(self) -> dict[str, Tensor]:
        return self.bounded(self.workload.loss, self.params, self.workload.batch).sum

    def step(self) -> None:
        self.run.step(self.workload.loss, next(self.batches))


def with_layers_of_opacus(model: nn.Module) -> dict[str, nn.Parameter]:
    """Put Opacus's LSTM in the place of torch's, which it refuses; the names stay torch's."""
    from opacus.validators.lstm import fix

    names = {}
    for child_name, child in list(model.named_children()):
        if isinstance(child, nn.LSTM):
            own = fix(child)
            setattr(model, child_name, own)
            names |= {f"{child_name}.{x}": f"{child_name}.{y}" for x, y in own.old_to_new.items()}
    return {names.get(name, name): p for name, p in trainable(model).items()}


class OpacusHooks:
    """Opacus with `grad_sample_mode="hooks"`: every per-sample gradient is stored."""

    def __init__(self, workload: Workload) -> None:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        self.workload = workload
        self.params = with_layers_of_opacus(workload.model)
        self.groups = (tuple(self.params),)
        # The hooks sit on the submodules, so that the loss can go on calling the model itself.
        self.module = GradSampleModule(workload.model)
        self.optimizer = DPOptimizer(
            sgd(workload.model),
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=CLIP_NORM,
            expected_batch_size=len(workload.batch[0]),
        )

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.workload.loss(self.workload.batch, reduction="mean").backward()

    def clipped_sum(self) -> dict[str, Tensor]:
        self.backward()
        self.optimizer.clip_and_accumulate()
        return {name: p.summed_grad for name, p in self.params.items()}

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


class OpacusGhost:
    """Opacus with `grad_sample_mode="ghost"`: a backward pass for the norms, one for the sum."""

    def __init__(self, workload: Workload) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping

        self.workload = workload
        self.params = with_layers_of_opacus(workload.model)
        self.groups = (tuple(self.params),)
        self.module = GradSampleModuleFastGradientClipping(
            workload.model, max_grad_norm=CLIP_NORM, use_ghost_clipping=True
        )
        self.optimizer = DPOptimizerFastGradientClipping(
            sgd(workload.model),
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=CLIP_NORM,
            expected_batch_size=len(workload.batch[0]),
        )

    def backward(self) -> None:
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

        self.optimizer.zero_grad(set_to_none=True)
        losses = self.workload.loss(self.workload.batch)
        DPTensorFastGradientClipping(self.module, self.optimizer, losses, "mean").backward()

    def clipped_sum(self) -> dict[str, Tensor]:
        self.backward()
        self.optimizer.accumulate()
        return {name: p.summed_grad for name, p in self.params.items()}

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


class LossModule(nn.Module):
    """A loss as a module, so that `functional_call` can swap the parameters it closes over."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model, self.loss = workload.model, workload.loss

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(batch)


class Vmap:
    """`torch.func.vmap(grad)` over the whole batch, by hand."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.params = trainable(workload.model)
        self.groups = (tuple(self.params),)
        self.optimizer = sgd(workload.model)
        module = LossModule(workload)

        def loss(params: dict[str, Tensor], record: Batch) -> Tensor:
            swapped = {f"model.{name}": p for name, p in params.items()}
            return functional_call(module, swapped, (tuple(t.unsqueeze(0) for t in record),))[0]

        self.gradients = vmap(grad(loss), in_dims=(None, 0), randomness="different")

    def clipped_sum(self) -> dict[str, Tensor]:
        params = {name: p.detach() for name, p in self.params.items()}
        gradients = self.gradients(params, self.workload.batch)
        squares = [g.flatten(1).square().sum(1) for g in gradients.values()]
        weights = (CLIP_NORM / torch.stack(squares).sum(0).sqrt()).clamp(max=1.0)
        return {name: torch.tensordot(weights, g, 1) for name, g in gradients.items()}

    def step(self) -> None:
        batch_size = len(self.workload.batch[0])
        for name, total in self.clipped_sum().items():
            total += NOISE_MULTIPLIER * CLIP_NORM * torch.randn_like(total)
            self.params[name].grad = total / batch_size
        self.optimizer.step()


PRIVATE: dict[str, Callable[[Workload], Private]] = {
    "hushgrad": Hushgrad,
    "hushgrad-frugal": partial(Hushgrad, frugal=True),
    "hushgrad-layers": partial(Hushgrad, layers=True),
    "hushgrad-compiled": partial(Hushgrad, compile=True),
    "opacus-hooks": OpacusHooks,
    "opacus-ghost": OpacusGhost,
    "vmap": Vmap,
}
BASE = "plain"
"""The library that all the others are compared with."""
LIBRARIES: dict[str, Callable[[Workload], Steps]] = {
    BASE: Plain,
    "plain-compiled": partial(Plain, compile=True),
    **PRIVATE,
}
