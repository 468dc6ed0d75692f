"""What people put around an optimizer: schedules, averages, autocast, loss scaling, penalties."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hushgrad as hg
from hushgrad import Execution, Rng
from hushgrad.clipping.rules import Clip, abadi, automatic, normalize
from hushgrad.gradients import per_sample
from hushgrad.run.metrics import Metrics

RECORDS, BATCH, STEPS = 64, 16, 8


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(RECORDS, 6, generator=torch.Generator().manual_seed(5))
    return x.to(dtype), (x[:, 0] > 0).long()


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def loss_of(net: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none")


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def started(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    sigma: float = 1.0,
    clip: Clip | None = None,
    metrics: Metrics | None = None,
    execution: Execution | None = None,
) -> hg.Run:
    plan = hg.plan(
        records=RECORDS,
        batch=BATCH,
        epochs=STEPS * BATCH / RECORDS,
        delta=1e-3,
        noise_multiplier=sigma,
        clip=clip,
        metrics=metrics,
    )
    return hg.train(
        net,
        optimizer,
        data(next(net.parameters()).dtype),
        plan=plan,
        rng=Rng.fixed(0),
        execution=execution or Execution(),
    )


# --- learning-rate schedules ---

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


# --- averages of the iterates ---


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


# --- autocast: products in half precision, norms and sums in float32 ---


@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 0.02), (torch.float16, 2e-3)])
@pytest.mark.parametrize("where", ["inside the loss", "around the step"])
def test_autocast_leaves_norms_and_sums_wide(dtype: torch.dtype, close: float, where: str) -> None:
    net = model()
    params = dict(net.named_parameters())

    def half(b: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return loss_of(net)(b)

    loss = half if where == "inside the loss" else loss_of(net)
    plain = hg.clipped_sum(loss_of(net), params, data(), clip=normalize(), modules=(net,))
    with torch.autocast("cpu", dtype=dtype, enabled=where == "around the step"):
        gradients = per_sample(loss, params, data(), modules=(net,))
        narrow = hg.clipped_sum(loss, params, data(), clip=normalize(), modules=(net,))
    for name, square in gradients.sq_norms().items():
        assert square.dtype == torch.float64
        assert narrow.sum[name].dtype == torch.float32
        gap = (narrow.sum[name] - plain.sum[name]).norm() / plain.sum[name].norm()
        assert 1e-6 < gap < close  # autocast was on, and cost no more than its digits
    assert narrow.l2 == plain.l2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_run_under_autocast_goes_the_way_of_float32(dtype: torch.dtype) -> None:
    ends = []
    for enabled in (False, True):
        net = model()
        run = started(net, torch.optim.SGD(net.parameters(), lr=0.5), sigma=0.0)

        def loss(b: tuple[Tensor, Tensor], net: nn.Module = net, on: bool = enabled) -> Tensor:
            with torch.autocast("cpu", dtype=dtype, enabled=on):
                return loss_of(net)(b)

        for batch in run:
            run.step(loss, batch)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in net.parameters())
        ends.append(flat(net) - flat(model()))
    assert 1e-6 < (ends[1] - ends[0]).norm() / ends[0].norm() < 0.02


# --- loss scaling ---


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-10])
@pytest.mark.parametrize("clip", [abadi(0.5), automatic(), normalize()], ids=str)
def test_in_float32_a_loss_scale_changes_no_bit(clip: Clip, scale: float) -> None:
    ends = []
    for execution in (Execution(), Execution(loss_scale=scale), Execution(loss_scale=scale * 2)):
        net = model()
        run = started(
            net, torch.optim.Adam(net.parameters(), lr=0.05), clip=clip, execution=execution
        )
        for batch in run:
            run.step(loss_of(net), batch)
        ends.append(flat(net))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
    assert not torch.equal(ends[0], flat(model()))


def faint(net: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """A loss whose gradients are below the smallest float16, under autocast."""

    def loss(b: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(b[0])
        return 2.0**-26 * F.cross_entropy(logits.float(), b[1], reduction="none")

    return loss


def bright(net: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda b: 2.0**-26 * F.cross_entropy(net(b[0]), b[1], reduction="none")


def test_a_loss_scale_rescues_gradients_that_float16_rounds_to_zero() -> None:
    net = model()
    params = dict(net.named_parameters())
    execution = Execution(loss_scale=torch.amp.GradScaler("cpu").get_scale())
    assert execution.loss_scale == 2.0**16
    right = hg.clipped_sum(bright(net), params, data(), clip=normalize())
    lost = hg.clipped_sum(faint(net), params, data(), clip=normalize())
    saved = hg.clipped_sum(faint(net), params, data(), clip=normalize(), execution=execution)
    assert all(not total.any() for total in lost.sum.values())
    for name, total in saved.sum.items():
        assert (total - right.sum[name]).norm() < 5e-3 * right.sum[name].norm()
    assert saved.l2 == lost.l2 == right.l2


def test_a_scale_inside_the_loss_is_another_clipping() -> None:
    """What a GradScaler does to an ordinary loss: private all the same, and no longer the same."""
    net = model()
    params = dict(net.named_parameters())
    scaler = torch.amp.GradScaler("cpu")
    inside = hg.clipped_sum(
        lambda b: scaler.scale(loss_of(net)(b)), params, data(), clip=abadi(10.0)
    )
    plain = hg.clipped_sum(loss_of(net), params, data(), clip=abadi(10.0))
    outside = hg.clipped_sum(
        loss_of(net),
        params,
        data(),
        clip=abadi(10.0),
        execution=Execution(loss_scale=scaler.get_scale()),
    )
    at_threshold = hg.clipped_sum(loss_of(net), params, data(), clip=normalize(10.0))
    for name, total in plain.sum.items():
        assert torch.equal(outside.sum[name], total)
        torch.testing.assert_close(inside.sum[name], at_threshold.sum[name], rtol=1e-5, atol=1e-5)
        assert (inside.sum[name] - total).norm() > 0.1 * total.norm()
    assert inside.l2 == plain.l2 == outside.l2


@pytest.mark.parametrize("scale", [0.0, -2.0, 3.0, math.inf, math.nan])
def test_a_loss_scale_is_a_power_of_two(scale: float) -> None:
    with pytest.raises(ValueError, match="expected loss_scale to be a power of two"):
        Execution(loss_scale=scale)


def test_under_a_loss_scale_records_that_meet_are_refused_as_ever() -> None:
    net = model()
    params = dict(net.named_parameters())
    execution = Execution(loss_scale=2.0**8)
    hg.clipped_sum(loss_of(net), params, data(), execution=execution)
    with pytest.raises(hg.Refused):
        hg.clipped_sum(
            lambda b: F.cross_entropy(net(b[0] - b[0].mean(0)), b[1], reduction="none"),
            params,
            data(),
            execution=execution,
        )


# --- a penalty, outside the clipped part ---

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
