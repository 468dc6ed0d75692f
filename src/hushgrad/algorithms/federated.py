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

    A record of the data is a client: every tensor is [clients, examples, …], padded with examples
    whose loss is 0. The `loss` is given the examples of one client, and returns a loss for each of
    them. From the model's iterate θ the client takes steps of gradient descent on their mean loss,
    to θ_k, and its gradient is θ − θ_k. With SGD at rate 1 the optimizer takes the step of
    federated averaging; another optimizer is a server optimizer. With `clip=hg.normalize()` this is
    DP-NormFedAvg.

    Guarantees: one client moves a round's sum by at most the clipping rule's bound. Each round is
    one event of the plan's sampling of clients, and the records of the guarantee are clients.

    Args:
        local_rate: the learning rate of the clients.
        local_steps: how many steps each client takes.
        output: which iterate the run returns.

    Raises:
        ValueError: if `local_rate` is not positive and finite, or `local_steps` is below 1.

    Example:
        >>> from hushgrad import plan
        >>> fedavg = FedAvg(local_rate=0.1, local_steps=5)
        >>> p = plan(
        ...     records=1000,
        ...     batch=100,
        ...     epochs=1,
        ...     delta=1e-5,
        ...     noise_multiplier=1.0,
        ...     algorithm=fedavg,
        ... )
        >>> p.records  # clients
        1000

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
        """Return the noisy mean of the clients' clipped updates."""
        # The same query as DP-SGD's; only the vectors differ.
        updates = ClippedSum(lambda own: [Summand(own, context.clip)], vectors=self.updates)
        return context.mean(context.release(updates)), state

    def updates(self, part: Part) -> Gradients:
        """Return θ − θ_k for each client, one client at a time, with the client's initial loss."""
        check_parameters(part.objective.params)  # a hook would see one client's gradient
        # One at a time: each client trains from the same iterate.
        clients = count(part.batch)
        found = [self._trained(part, k) for k in range(clients)]
        factors: Factors = {
            # Updates are differences of weights, which have no factors.
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
