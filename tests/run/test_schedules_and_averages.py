"""Learning-rate schedules and averages of the iterates, beside a private run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from short_runs import STEPS, flat, loss_of, model, started
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hushgrad.run.metrics import Metrics

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=3, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=STEPS + 1),
    "warm-up, then decay": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_steps_with_the_run(name: str) -> None:
    """The same way as by setting those rates by hand, to the last bit."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
    run = started(net, optimizer)
    schedule, rates = SCHEDULES[name](optimizer), []
    for batch in run:
        rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        run.step(loss_of(net), batch)
        schedule.step()
    assert len(set(rates)) > 2
    by_hand = model()
    plain = torch.optim.SGD(by_hand.parameters(), lr=0.2, momentum=0.5)
    run = started(by_hand, plain)
    for (rate, momentum), batch in zip(rates, run, strict=True):
        plain.param_groups[0].update(lr=rate, momentum=momentum)
        run.step(loss_of(by_hand), batch)
    assert torch.equal(flat(net), flat(by_hand))


def test_a_schedule_that_reacts_is_given_what_was_released() -> None:
    """A plateau in the private metrics, which cost nothing more to look at."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    run = started(net, optimizer, metrics=Metrics())
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    for batch in run:
        run.step(loss_of(net), batch)
        schedule.step(run.metrics["loss"])
    assert optimizer.param_groups[0]["lr"] < 0.2


def run_with_average(average: Callable[[nn.Module], AveragedModel] | None) -> tuple[Any, ...]:
    net = model(torch.float64)
    run = started(net, torch.optim.Adam(net.parameters(), lr=0.05))
    averaged = average(net) if average is not None else None
    iterates = []
    for batch in run:
        run.step(loss_of(net), batch)
        if averaged is not None:
            averaged.update_parameters(net)
        iterates.append(flat(net))
    return net, averaged, torch.stack(iterates), run.guarantee


@pytest.mark.parametrize("kind", ["equal", "exponential"])
def test_an_average_is_the_average_and_leaves_the_run_alone(kind: str) -> None:
    decay = 0.8
    weights = {
        "equal": torch.full((STEPS,), 1 / STEPS, dtype=torch.float64),
        # The first iterate is copied; each later one counts 1 − decay and fades.
        "exponential": torch.tensor(
            [decay ** (STEPS - 1)]
            + [(1 - decay) * decay ** (STEPS - 1 - t) for t in range(1, STEPS)],
            dtype=torch.float64,
        ),
    }[kind]
    multi = get_ema_multi_avg_fn(decay) if kind == "exponential" else None
    net, averaged, iterates, guarantee = run_with_average(
        lambda net: AveragedModel(net, multi_avg_fn=multi)
    )
    torch.testing.assert_close(flat(averaged.module), weights @ iterates, rtol=1e-12, atol=1e-14)
    alone, _, others, without = run_with_average(None)
    assert torch.equal(iterates, others) and torch.equal(flat(net), flat(alone))
    assert str(guarantee) == str(without)
    assert (flat(averaged.module) - flat(net)).norm() > 0.1 * (iterates[0] - flat(net)).norm()
