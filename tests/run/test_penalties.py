"""A penalty may read parameters and constants, and no record."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from watched_runs import RECORDS, Case, Net, data, first, loss_of

import hushgrad as hg
from hushgrad import Refused, Rng


def reads(case: Case, batch: tuple[Tensor, Tensor]) -> Iterator[Callable]:
    x, weight, net = batch[0], case.net.one.weight, case.net
    view = x[:, 0]
    yield lambda: net(x).square().mean()
    yield lambda: weight.sum() * view.mean()
    yield lambda: weight.sum() * x.mean().item()
    yield lambda: weight.sum() / len(x)
    yield lambda: weight.sum() * sum(x.flatten().tolist())
    yield lambda: weight.sum() * float(x.numpy().mean())
    yield lambda: weight.sum() - weight.detach().sum() + (weight * x.sum()).sum() * 0
    yield lambda: (weight * x.double().sum()).sum()
    activations = net(x)
    yield lambda: activations.square().mean()
    yield lambda: loss_of(net)(batch).mean()


@pytest.mark.parametrize("number", range(10))
def test_a_penalty_that_reads_the_batch_is_refused_before_anything_is_released(number: int) -> None:
    case = Case()
    batch = first(case)
    penalty = list(reads(case, batch))[number]
    before = [p.detach().clone() for p in case.net.parameters()]
    with pytest.raises(Refused, match="a function of the parameters alone"):
        case.run.step(case.loss, batch, penalty=penalty)
    assert all(torch.equal(a, b) for a, b in zip(before, case.net.parameters(), strict=True))
    assert case.run.entry is None and case.run.steps_taken == 0


def test_a_penalty_that_reads_a_moved_batch_is_refused() -> None:
    case = Case()
    moved = tuple(t.clone() for t in first(case))
    with pytest.raises(Refused, match="a tensor of the batch"):
        case.run.step(case.loss, moved, penalty=lambda: moved[0].mean() * case.net.one.weight.sum())


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
def test_a_penalty_that_reads_the_data_set_is_refused(kind: str) -> None:
    net, columns = Net(), data()
    records = columns if kind == "tensors" else tuple(x.numpy() for x in columns)
    plan = hg.plan(records=RECORDS, batch=20, epochs=1, delta=1e-4, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = hg.train(net, optimizer, records, plan=plan, rng=Rng.from_os())
    with pytest.raises(Refused, match="one that reads the data set"):
        run.step(loss_of(net), next(iter(run)), penalty=lambda: net(columns[0]).square().mean())


@pytest.mark.parametrize("kind", ["new at each step", "updated"])
def test_a_tensor_computed_from_batches_is_refused_at_the_second_step(kind: str) -> None:
    case, weight = Case(), None
    mean = torch.zeros(())
    batches = iter(case.run)
    weight = case.net.one.weight
    for step in range(2):
        batch = next(batches)
        now = batch[0].mean()
        if kind == "updated":
            mean += now
        read = now if kind == "new at each step" else mean
        if step == 0:
            case.run.step(case.loss, batch, penalty=lambda r=read: r * weight.sum())
    with pytest.raises(Refused, match="a tensor that is new, or has changed"):
        case.run.step(case.loss, batch, penalty=lambda: read * weight.sum())


def test_a_penalty_may_read_parameters_constants_averages_and_torchs_random_numbers() -> None:
    torch.manual_seed(1)
    net = Net()
    average = torch.optim.swa_utils.AveragedModel(net)
    anchor, public = net.one.weight.detach().clone(), torch.randn(50, 24)
    plan = hg.plan(records=RECORDS, batch=20, epochs=1, delta=1e-4, noise_multiplier=1.0)
    run = hg.train(
        net,
        torch.optim.SGD(net.parameters(), lr=0.01),
        data(),
        plan=plan,
        rng=Rng.from_os(),
        keep={"average": average},
    )

    def penalty() -> Tensor:
        apart = (net.one.weight - average.module.one.weight).square().sum()
        some = public[torch.randint(50, (4,))]
        return apart + (net.one.weight - anchor).square().sum() + net(some).square().mean()

    state = torch.get_rng_state()
    for batch in run:
        run.step(loss_of(net), batch, penalty=lambda: (0.1 / (1 + run.steps_taken)) * penalty())
        average.update_parameters(net)
    assert run.steps_taken == plan.steps
    assert not torch.equal(state, torch.get_rng_state())  # by the penalty's own draws
