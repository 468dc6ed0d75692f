"""Federated averaging with clients as the unit of privacy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hushgrad.algorithms.algorithm import State
from hushgrad.algorithms.output import Output, last
from hushgrad.batches.records import count, map_tensors
from hushgrad.gradients import Gradients, check_parameters, restored, unwrap_constants
from hushgrad.gradients.factors import Dense, Factors, in_turn
from hushgrad.iterates import copy_values, exchange_values
from hushgrad.numerics import wide
from hushgrad.run.query import ClippedSum, Part, Summand
from hushgrad.run.step import StepContext


@dataclass(frozen=True)
class FedAvg:
    """DP-FedAvg: what is clipped and summed for a client is its update by local descent.

    A record of the data is a client: every tensor is [clients, examples, …], filled up with
    examples whose loss is 0. `loss` is given the examples of one client, and returns a loss for
    each. The client takes `local_steps` steps of gradient descent on their mean, at `local_rate`,
    from the model's point θ to θ_k, and its gradient is θ − θ_k: with SGD at rate 1 the optimizer
    takes the step of federated averaging, with another it is a server optimizer. The bound is that
    of the plan's clipping rule; DP-NormFedAvg is the same with `clip=hg.normalize()`. Each round is
    one event of the plan's sampling, now of clients, and the guarantee's records are clients.

    Reference: McMahan et al. 2018, Learning Differentially Private Recurrent Language Models;
    Das et al. 2021, Convergence of Private Federated Learning with Normalized Updates.
    """

    local_rate: float
    local_steps: int = 1
    output: Output = last

    def __post_init__(self) -> None:
        if not (math.isfinite(self.local_rate) and self.local_rate > 0) or self.local_steps < 1:
            raise ValueError(
                "expected local_rate > 0 and local_steps >= 1, got "
                f"{self.local_rate} and {self.local_steps}; 0.1 and 1 are a start"
            )

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        """The noisy mean of the clients' clipped updates."""
        updates = ClippedSum(lambda own: [Summand(own, context.clip)], vectors=self.updates)
        return context.mean(context.release(updates)), state

    def updates(self, part: Part) -> Gradients:
        """θ − θ_k for each client, one client at a time, with the loss that it starts from."""
        check_parameters(part.objective.params)  # a hook would see one client's gradient
        clients = count(part.batch)
        found = [self._trained(part, k) for k in range(clients)]
        factors: Factors = {
            name: {(0,): Dense(torch.stack([update[name] for update, _ in found]))}
            if clients
            else {}
            for name in part.objective.params
        }
        device = next(iter(part.objective.params.values())).device
        losses = torch.tensor([loss for _, loss in found], dtype=torch.float64, device=device)
        return Gradients(factors, part.objective.params, losses, in_turn(clients))

    def _trained(self, part: Part, client: int) -> tuple[dict[str, Tensor], float]:
        batch, _ = unwrap_constants(part.batch)
        examples = map_tensors(lambda x: x[client], batch)
        before = copy_values(part.objective.params)
        values, tensors = copy_values(part.objective.params), list(part.objective.params.values())
        losses = []
        with restored({}, part.objective.modules), exchange_values(part.objective.params, values):
            for _ in range(self.local_steps):
                with torch.enable_grad():
                    mean = part.objective.loss(examples).mean()
                    grads = torch.autograd.grad(mean, tensors, allow_unused=True)
                losses.append(float(mean.detach()))
                for p, grad in zip(tensors, grads, strict=True):
                    if grad is not None:
                        p.data = p.data - self.local_rate * grad
            # In float32 at least: a sum in bfloat16 would not keep the bound.
            moved = {n: wide(before[n]) - wide(p.data) for n, p in part.objective.params.items()}
            return moved, losses[0]
