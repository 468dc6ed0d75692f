"""Batches that were drawn: charged whether used or not, and no other batch is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from watched_runs import RECORDS, Case, Net, data, first

import hushgrad as hg
from hushgrad import Refused, Rng
from hushgrad.ledger import Ledger, renyi


def test_a_second_batch_in_a_row_without_a_step_is_refused() -> None:
    case = Case()
    batches = iter(case.run)
    for _ in range(3):  # one by itself is charged, and no more
        next(batches)
        case.run.step(case.loss, next(batches))
    next(batches), next(batches)
    with pytest.raises(Refused, match=r"got 2 without it; call run\.step"):
        next(batches)


@pytest.mark.parametrize("unused", [0, 1, 2])
def test_a_batch_that_was_drawn_is_charged_whether_it_was_used_or_not(
    tmp_path: Path, unused: int
) -> None:
    """Under a Rényi filter, which gives back what is not used."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.set_budget("people", epsilon=20, delta=1e-3, rule=renyi(8.0))
    budget = ledger.budget("people")
    case = Case(budget=budget)
    batches = iter(case.run)
    case.run.step(case.loss, next(batches))
    for _ in range(unused):
        next(batches)
    case.run.finish()
    said = str(case.run.guarantee)
    assert (f"; {unused} more drawn, not used, and charged" in said) == bool(unused)
    assert case.run.guarantee.steps_unused == unused
    entry = case.run.entry
    assert entry is not None and entry._row().steps == 1 + unused


def test_a_batch_that_was_drawn_gives_no_budget_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.set_budget("people", epsilon=9, delta=1e-3)
    budget = ledger.budget("people")
    unseen = Case(budget=budget)
    unseen.run.finish()
    assert budget.spent["epsilon"] == 0
    seen = Case(budget=budget)
    next(iter(seen.run))
    seen.run.finish()
    assert budget.spent["epsilon"] == seen.plan.epsilon


SAME: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a list": lambda x, y: [x, y],
    "a mapping": lambda x, y: {"y": y, "x": x},
    "another dtype": lambda x, y: (x.double(), y.int()),
    "half": lambda x, y: (x.half(), y),
    "a copy": lambda x, y: (x.clone(), y.clone()),
    "flat": lambda x, y: (x.flatten(1), y),
    "axes turned": lambda x, y: (x.permute(0, 3, 1, 2), y),
    "axes turned, another dtype": lambda x, y: (x.permute(0, 3, 1, 2).double(), y),
    "another dtype, axes turned": lambda x, y: (x.double().permute(0, 3, 1, 2), y),
    "a crop": lambda x, y: (x[:, :, 1:], y),
    "expanded": lambda x, y: (x[:, None].expand(-1, 3, -1, -1, -1), y),
    "channels last": lambda x, y: (x.contiguous(memory_format=torch.channels_last), y),
}

OTHER: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copies of one record": lambda x, y: (x[:1].expand_as(x), y),
    "one record many times": lambda x, y: (x[torch.zeros(len(x), dtype=torch.long)], y),
    "standardised": lambda x, y: (x - x.mean(0), y),
    "scaled by the largest": lambda x, y: (x / x.abs().max(), y),
    "another order": lambda x, y: (x.flip(0), y),
    "other labels": lambda x, y: (x, y.roll(1)),
    "a shifted view": lambda x, y: (
        x.as_strided(x.shape, x.stride(), 1) if len(x) < 2 else torch.cat([x[1:], x[:1]]),
        y,
    ),
    "records and entries exchanged": lambda x, y: (x.flatten(1).t().reshape(len(x), -1), y),
    "the first of each entry": lambda x, y: (
        x.as_strided((len(x), len(x)), (0, 24)),
        y,
    ),
    "fewer": lambda x, y: (x[1:], y[1:]),
    "other data": lambda x, y: tuple(c[: len(x)] for c in data()),
    "no tensor": lambda x, y: (),
    "an extra column": lambda x, y: (x, y, torch.arange(len(x)) * x.mean()),
}


@pytest.mark.parametrize("way", SAME)
def test_the_drawn_batch_may_be_moved_cast_and_viewed_record_by_record(way: str) -> None:
    case = Case()
    batch = SAME[way](*first(case))

    def loss(b: object) -> Tensor:
        x, y = (b["x"], b["y"]) if isinstance(b, dict) else b  # type: ignore[index]
        return case.net.one(x.float().flatten(1).sum(1, keepdim=True).expand(-1, 24)).square().sum(
            1
        ) + case.net.two(case.net.one(torch.ones(len(y), 24))).sum(1)

    case.run.step(loss, batch)
    assert case.run.steps_taken == 1


@pytest.mark.parametrize("way", OTHER)
def test_any_other_batch_is_refused_with_the_remedy(way: str) -> None:
    case = Case(rng=Rng.fixed(1))
    x, y = first(case)
    assert len(x) > 2
    with pytest.raises(Refused) as refusal:
        case.run.step(case.loss, OTHER[way](x, y))
    assert "inside the loss" in str(refusal.value)
    assert str(len(x)) not in str(refusal.value)
    case.run.step(case.loss, (x, y))  # the right one still serves


def test_a_batch_that_was_written_to_is_refused() -> None:
    for write in (lambda x: x.copy_(x[:1].clone()), lambda x: x.numpy().__setitem__(0, 7.0)):
        case = Case()
        batch = first(case)
        write(batch[0])
        with pytest.raises(Refused, match="got one that was written to"):
            case.run.step(case.loss, batch)


@pytest.mark.parametrize(
    ("planned", "warned"), [(200, False), (185, False), (400, True), (100, True)]
)
def test_data_of_another_size_than_planned_are_warned_of(planned: int, warned: bool) -> None:
    """Under add/remove their number is private: it is not said, and not looked at closely."""
    net = Net()
    plan = hg.plan(records=planned, batch=20, epochs=1, delta=1e-4, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def start() -> None:
        hg.train(net, optimizer, data(), plan=plan, rng=Rng.from_os())

    if not warned:
        start()
        return
    with pytest.warns(UserWarning, match=f"about the {planned} records") as caught:
        start()
    assert str(RECORDS) not in str(caught[0].message)


@pytest.mark.parametrize("relation", [hg.Relation.REPLACE_ONE, hg.Relation.ZERO_OUT])
@pytest.mark.parametrize("planned", [199, 201, 400])
def test_where_the_number_of_records_is_public_it_must_be_the_plans(
    relation: hg.Relation, planned: int
) -> None:
    net = Net()
    plan = hg.plan(
        records=planned, batch=20, epochs=1, delta=1e-4, noise_multiplier=1.0, relation=relation
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(Refused, match=f"expected the {planned} records of the plan, got 200"):
        hg.train(net, optimizer, data(), plan=plan, rng=Rng.from_os())


def test_an_optimizer_that_holds_the_head_alone_is_refused_by_name() -> None:
    with pytest.raises(Refused, match=r"none of its groups with one\.weight, one\.bias; freeze"):
        Case(make=lambda p: torch.optim.SGD(list(p)[2:], lr=0.1))
