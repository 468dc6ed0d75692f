"""What a run vouches for is made by its own steps: whatever else writes to the model is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from watched_runs import Case, Net

from hushgrad import Refused


def test_plain_steps_in_place_of_private_ones_are_refused_and_nothing_is_guaranteed() -> None:
    case = Case()
    batches = iter(case.run)
    case.plainly(next(batches))
    with pytest.raises(Refused, match=r"other values of one\.bias, one\.weight, two\.bias and 1"):
        next(batches)
    for ask in (lambda: case.run.guarantee, case.run.finish):
        with pytest.raises(Refused, match=r"let only run\.step take steps"):
            ask()


@pytest.mark.parametrize("place", ["before", "after", "at the end", "after a break"])
def test_a_plain_step_beside_the_private_ones_is_refused(place: str) -> None:
    case, taken = Case(), []

    def loop() -> None:
        for batch in case.run:
            if place == "before":
                case.plainly(batch)
            case.run.step(case.loss, batch)
            taken.append(1)
            last = case.run.steps_taken == case.plan.steps
            if place == "after" or (place == "at the end" and last):
                case.plainly(batch)
            if place == "after a break":
                case.plainly(batch)
                break
        print(case.run.guarantee)

    with pytest.raises(Refused, match="the model as the last step of the run left it"):
        loop()
    assert len(taken) == {"before": 0, "at the end": case.plan.steps}.get(place, 1)


def by_data(case: Case) -> None:
    for p in case.net.parameters():
        p.data.sub_(0.01)


def by_numpy(case: Case) -> None:
    case.net.one.weight.detach().numpy()[0, 0] += 1


def by_permuting(case: Case) -> None:
    weight = case.net.one.weight
    weight.data = weight.data.flip(0)


def by_loading(case: Case) -> None:
    case.net.load_state_dict({k: v + 1 for k, v in case.net.state_dict().items()})


def by_assigning(case: Case) -> None:
    other = Net()
    case.net.load_state_dict(other.state_dict(), assign=True)


def by_no_grad(case: Case) -> None:
    with torch.no_grad():
        case.net.two.bias.add_(1e-6)


def by_a_buffer(case: Case) -> None:
    case.net.count += 1


def by_casting(case: Case) -> None:
    case.net.half()


WRITES = [by_data, by_numpy, by_permuting, by_loading, by_assigning, by_no_grad, by_a_buffer]


@pytest.mark.parametrize("write", [*WRITES, by_casting], ids=lambda f: f.__name__)
@pytest.mark.parametrize("when", ["with a batch drawn", "between"])
def test_whatever_writes_to_the_model_between_two_steps_is_refused(
    write: Callable[[Case], None], when: str
) -> None:
    case = Case()
    batches = iter(case.run)
    case.run.step(case.loss, next(batches))
    batch = next(batches) if when == "with a batch drawn" else None
    write(case)
    with pytest.raises(Refused):
        case.run.step(case.loss, batch) if batch is not None else next(batches)
    assert case.run.steps_taken == 1


def test_a_fused_optimizer_which_counts_no_version_is_seen() -> None:
    case = Case(make=lambda p: torch.optim.Adam(p, lr=0.1, fused=True))
    batches = iter(case.run)
    case.run.step(case.loss, next(batches))
    versions = [p._version for p in case.net.parameters()]
    case.optimizer.step()
    assert [p._version for p in case.net.parameters()] == versions
    with pytest.raises(Refused, match="the model as the last step"):
        next(batches)


def test_the_optimizers_state_is_the_runs_too() -> None:
    case = Case()
    batches = iter(case.run)
    case.run.step(case.loss, next(batches))
    kept = [p.detach().clone() for p in case.net.parameters()]
    case.optimizer.step()  # its momentum, and the parameters, which are put back
    with torch.no_grad():
        for p, value in zip(case.net.parameters(), kept, strict=True):
            p.copy_(value)
    with pytest.raises(Refused, match="expected the optimizer's state"):
        next(batches)


def test_a_tensor_that_joins_the_optimizer_later_is_refused() -> None:
    case = Case()
    batches = iter(case.run)
    case.run.step(case.loss, next(batches))
    case.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(Refused, match="neither private nor frozen"):
        case.run.step(case.loss, next(batches))


def test_what_leaves_the_model_as_it_was_goes_on() -> None:
    """A schedule, an average that reads, weights that are swapped and put back, momentum reset."""
    case = Case()
    schedule = torch.optim.lr_scheduler.StepLR(case.optimizer, 1, 0.9)
    average = torch.optim.swa_utils.AveragedModel(case.net)
    with torch.no_grad():
        case.net.one.weight.mul_(0.5)  # before the first batch the model is the user's
    for batch in case.run:
        case.run.step(case.loss, batch)
        schedule.step()
        average.update_parameters(case.net)
        own = copy.deepcopy(case.net.state_dict())
        case.net.load_state_dict(average.module.state_dict())
        case.net.load_state_dict(own)
        case.optimizer.state.clear()
        case.net.cache.add_(1)  # which no state dict holds
    assert case.run.guarantee.private
    with torch.no_grad():
        case.net.one.weight.zero_()  # once the run is over it is the user's again
    assert str(case.run.guarantee).startswith("(")


def test_a_resumed_run_goes_on_from_its_own_weights(tmp_path: Path) -> None:
    case = Case(folder=tmp_path)
    batches = iter(case.run)
    case.run.step(case.loss, next(batches))
    case.run.save()
    by_data(case)
    with pytest.raises(Refused):
        case.run.save()
    again = Case(folder=tmp_path, resume=True)
    by_loading(again)
    with pytest.raises(Refused, match="as the last step of the run left it"):
        next(iter(again.run))
