"""What a run vouches for is made by its own steps: others' are refused, unused batches charged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import Refused, Rng
from hushgrad.bits import digests
from hushgrad.ledger import Ledger, renyi

RECORDS = 200


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(RECORDS, 2, 3, 4, generator=torch.Generator().manual_seed(5))
    return x, (x[:, 0, 0, 0] > 0).long()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(24, 5), nn.Linear(5, 2)
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x.reshape(len(x), 24)).tanh())


def loss_of(net: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none")


class Case:
    def __init__(self, **options) -> None:
        torch.manual_seed(1)
        self.net = Net()
        make = options.pop("make", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        self.optimizer = make(self.net.parameters())
        self.loss = loss_of(self.net)
        self.plan = hg.plan(records=RECORDS, batch=20, epochs=1, delta=1e-4, noise_multiplier=1.0)
        self.run = hg.train(
            self.net,
            self.optimizer,
            data(),
            plan=self.plan,
            rng=options.pop("rng", Rng.from_os()),
            **options,
        )

    def plainly(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).mean().backward()
        self.optimizer.step()


# --- a step of the user's own ---


def test_plain_steps_in_place_of_private_ones_are_refused_and_nothing_is_guaranteed() -> None:
    case = Case()
    batches = iter(case.run)
    case.plainly(next(batches))
    with pytest.raises(Refused, match=r"other values of one\.bias, one\.weight, two\.bias and 1"):
        next(batches)
    for ask in (lambda: case.run.guarantee, case.run.finish):
        with pytest.raises(Refused, match=r"let run\.step alone"):
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


# --- batches that no step has used ---


def test_a_second_batch_in_a_row_without_a_step_is_refused() -> None:
    case = Case()
    batches = iter(case.run)
    for _ in range(3):  # one by itself is charged, and no more
        next(batches)
        case.run.step(case.loss, next(batches))
    next(batches), next(batches)
    with pytest.raises(Refused, match=r"two in a row without it; call run\.step"):
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


# --- the batch that is handed over ---


def first(case: Case) -> tuple[Tensor, Tensor]:
    return next(iter(case.run))


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


# --- a penalty that reads records ---


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
    with pytest.raises(Refused, match="a tensor that is new, or other than"):
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


# --- digests ---


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (40, 33), (8, 3, 5, 7), (1200, 3)])
def test_a_digest_sees_a_bit_and_a_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (9 * torch.rand(shape, generator=torch.Generator().manual_seed(1))).to(dtype)

    def digest(x: Tensor) -> int:
        return digests({"x": x})["x"]

    assert digest(x) == digest(x.clone())
    for place in {0, x.numel() // 2, x.numel() - 1}:
        other = x.clone()
        raw = torch.view_as_real(other) if other.is_complex() else other
        raw.view(-1).view(torch.uint8)[place * raw.element_size()] ^= 1
        assert digest(x) != digest(other)
    if x.numel() > 8 and not torch.equal(x.flatten().flip(0), x.flatten()):
        assert digest(x) != digest(x.flatten().flip(0).reshape(shape))


def test_a_digest_takes_any_layout() -> None:
    x = torch.randn(50, 60)
    for view in (x.t(), x[:, ::2], x[1:, 1:], x[:1].expand(50, 60), x.view(2, 25, 60)[1]):
        before = digests({"x": view})
        assert before == digests({"x": view})
        x[0] += 1
        x[40] += 1
        assert before != digests({"x": view})


# --- what a run asks of its arguments ---


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
