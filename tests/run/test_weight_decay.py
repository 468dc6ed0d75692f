"""A penalty outside of the clipped part is coupled weight decay, and costs nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from short_runs import flat, loss_of, model, started
from torch import Tensor, nn

from hushgrad.clipping.rules import abadi

COUPLED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=0.1, **o),
    "heavy ball": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, **o),
    "Nesterov": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, lr=0.05, **o),
    "Adamax": lambda p, **o: torch.optim.Adamax(p, lr=0.05, **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=0.1, **o),
    "NAdam": lambda p, **o: torch.optim.NAdam(p, lr=0.05, **o),
    "RMSprop": lambda p, **o: torch.optim.RMSprop(p, lr=0.02, **o),
    "RAdam": lambda p, **o: torch.optim.RAdam(p, lr=0.05, **o),
    "Adadelta": lambda p, **o: torch.optim.Adadelta(p, **o),
    "ASGD": lambda p, **o: torch.optim.ASGD(p, lr=0.1, **o),
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_penalty_is_coupled_weight_decay_for_every_optimizer(name: str) -> None:
    """λ/2·|w|² by `penalty=` is λ by `weight_decay=`: neither clipped nor noised.

    With λ a power of two neither rounds, so the sums and with them the noise are the same too.
    """
    decay, ends = 2.0, []
    for options, factor in (({"weight_decay": decay}, 0.0), ({}, decay), ({}, 0.0)):
        net = model(torch.float64)
        run = started(net, COUPLED[name](net.parameters(), **options), clip=abadi(0.01))

        def penalty(net: nn.Module = net, factor: float = factor) -> Tensor:
            return factor / 2 * sum(p.square().sum() for p in net.parameters())

        for batch in run:
            run.step(loss_of(net), batch, penalty=penalty)
        ends.append(flat(net))
    assert torch.equal(ends[0], ends[1])
    assert (ends[2] - ends[1]).norm() > 1e-4 * ends[2].norm()


def test_decoupled_weight_decay_is_another_thing_than_a_penalty() -> None:
    ends = []
    for decay, factor in ((3.0, 0.0), (0.0, 3.0)):
        net = model(torch.float64)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=decay)
        run = started(net, optimizer)
        for batch in run:
            run.step(
                loss_of(net),
                batch,
                penalty=lambda net=net, factor=factor: factor / 2 * net[0].weight.square().sum(),
            )
        ends.append(flat(net))
    assert (ends[0] - ends[1]).norm() > 0.01 * ends[0].norm()


def test_a_penalty_costs_nothing_and_shifts_no_noise() -> None:
    """The first gradients differ by the penalty's own, whatever its size."""
    grads = []
    for factor in (0.0, 1e6):
        net = model(torch.float64)
        run = started(net, torch.optim.SGD(net.parameters(), lr=0.0))
        run.step(
            loss_of(net),
            next(iter(run)),
            penalty=lambda net=net, factor=factor: factor * net[2].weight.sum(),
        )
        grads.append(copy.deepcopy([p.grad for p in net.parameters()]))
    for i, (without, with_it) in enumerate(zip(*grads, strict=True)):
        expected = 1e6 if i == 2 else 0.0
        torch.testing.assert_close(
            with_it - without, torch.full_like(without, expected), rtol=1e-9, atol=0
        )
