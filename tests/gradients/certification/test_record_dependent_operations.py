"""Models whose sequence of operations depends on the records of the batch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import check
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import Refused
from hushgrad.diagnosis import doctor
from hushgrad.gradients import auto, compiled, dense, loop, per_sample, traced

N, LONGEST = 12, 6


class Unrolled(nn.Module):
    """A cell unrolled to the longest sequence of the batch, as textbooks have it."""

    def __init__(self, cell: type[nn.Module] = nn.GRUCell) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(20, 6), cell(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = torch.zeros(len(x), 5)
        for t in range(int(lengths.max())):
            h = torch.where((t < lengths)[:, None], self.cell(self.words(x[:, t]), h), h)
        return self.head(h)


def loss_of(model: nn.Module) -> Any:
    return lambda b: F.cross_entropy(model(*b[:-1]), b[-1], reduction="none")


def sequences(seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 20, (N, LONGEST), generator=g)
    lengths = torch.randint(2, LONGEST + 1, (N,), generator=g)
    return x, lengths, torch.randint(2, (N,), generator=g)


@pytest.mark.parametrize(("cell", "seed"), [(nn.GRUCell, 0), (nn.GRUCell, 1), (nn.RNNCell, 2)])
def test_a_cell_unrolled_to_the_longest_sequence_ends_in_a_loop(cell: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model = Unrolled(cell)
    params, taken = dict(model.named_parameters()), []
    for step in range(4):
        x, lengths, y = sequences(100 * seed + step)
        lengths[0] = LONGEST - step  # another longest at every step
        batch = (x, lengths.clamp(max=LONGEST - step), y)
        gradients = per_sample(loss_of(model), params, batch, modules=(model,))
        taken.append(gradients.form)
    assert taken[1:] == ["loop"] * 3
    assert check(loss_of(model), model, sequences(seed), form=auto).form == "loop"


def test_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = Unrolled()
    params = dict(model.named_parameters())
    x, _, y = sequences(0)
    with caplog.at_level(logging.WARNING, logger="hushgrad"):
        for longest in (LONGEST, 4):
            batch = (x, torch.full((N,), longest), y)
            per_sample(loss_of(model), params, batch, modules=(model,))
    assert "not traced: the sequence of operations" in caplog.text
    assert "changes" in caplog.text
    assert "recurrence up to the longest sequence" in caplog.text


@pytest.mark.parametrize("form", [(traced,), (compiled, traced)])
def test_without_a_form_that_takes_it_the_remedy_is_named(form: Any) -> None:
    torch.manual_seed(0)
    model = Unrolled()
    params = dict(model.named_parameters())
    x, _, y = sequences(0)
    lengths = torch.full((N,), 3)
    lengths[-1] = LONGEST  # seldom among the few that certification draws

    def step() -> None:
        for _ in range(20):
            per_sample(loss_of(model), params, (x, lengths, y), form=form, modules=(model,))

    with pytest.raises(Refused, match=r"form=loop|changes with the batch"):
        step()


class Experts(nn.Module):
    """Each record goes to one expert; an expert without records does not run."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(3, experts)
        self.experts = nn.ModuleList(nn.Linear(3, 2) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(1)
        share, chosen = shares.max(1)
        out = x.new_zeros(len(x), 2)
        for k, expert in enumerate(self.experts):
            place = (chosen == k).nonzero().flatten()
            if len(place):
                out = out.index_add(0, place, share[place, None] * expert(x[place]))
        return out


def routed(model: Experts, to: list[int]) -> tuple[Tensor, Tensor]:
    """Records of which each goes to one of these experts."""
    x = torch.randn(4000, 3)
    with torch.no_grad():
        chosen = model.gate(x).argmax(1)
    picked = torch.cat([x[chosen == k][:8] for k in to])
    return picked, torch.arange(len(picked)) % 2


def taken(execution: hg.Execution, loss: Any, model: nn.Module, batch: Any) -> Any:
    """The gradients of a whole model's parameters, as a step takes them."""
    objective = execution.objective(loss, dict(model.named_parameters()), (model,))
    return execution.taker(objective, batch)()


@pytest.mark.parametrize("seed", range(4))
def test_experts_without_records_are_named_by_a_pattern(seed: int) -> None:
    torch.manual_seed(seed)
    model = Experts()
    params = dict(model.named_parameters())
    execution = hg.Execution(idle=("experts.*",))
    reached = sorted(set(model.gate(torch.randn(4000, 3)).argmax(1).tolist()))
    for to in (reached, reached[:1], reached[1:]):
        batch = routed(model, to)
        gradients = taken(execution, loss_of(model), model, batch)
        norms = gradients.sq_norms()
        used = [k for k in range(4) if bool(norms[f"experts.{k}.weight"].any())]
        assert used == to
    check(loss_of(model), model, routed(model, reached), form=auto, idle=list(params))


def test_an_expert_on_no_path_is_refused_with_what_train_can_do() -> None:
    model = Experts()
    batch = (torch.ones(8, 3), torch.zeros(8).long())
    message = r"experts\.\d\.weight is trainable but on no path.*hg\.Execution\(idle=\(…,\)\)"
    with pytest.raises(Refused, match=message):
        taken(hg.Execution(), loss_of(model), model, batch)


def test_a_private_run_on_experts() -> None:
    model = Experts()
    plan = hg.plan(records=64, batch=16, epochs=2, delta=1e-3, noise_multiplier=1.0)
    run = hg.train(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.randn(64, 3), torch.arange(64) % 2),
        plan=plan,
        rng=hg.Rng.from_os(),
        execution=hg.Execution(idle=("experts.*",)),
    )
    for batch in run:
        run.step(loss_of(model), batch)
    assert run.steps_taken == 8


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_what_nothing_reaches_gets_zero(scale: float) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "spare": nn.Linear(2, 2)})
    batch = (torch.randn(8, 3), torch.zeros(8).long())
    execution = hg.Execution(idle=("spare.*",), loss_scale=scale)
    gradients = taken(execution, loss_of(model["used"]), model, batch)
    assert not gradients.sq_norms()["spare.weight"].any()
    with pytest.raises(ValueError, match=r"for every pattern of idle, got none for 'spares\.\*'"):
        taken(hg.Execution(idle=("spares.*",)), loss_of(model["used"]), model, batch)
    with pytest.raises(ValueError, match="a tuple of patterns"):
        hg.Execution(idle="spare.*")


def test_the_doctor_takes_idle_parameters() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "spare": nn.Linear(2, 2, bias=False)})
    batch = (torch.randn(8, 3), torch.zeros(8).long())
    found = doctor(model, loss_of(model["used"]), batch, idle=("spare.weight",))
    assert [row.form for row in found.rows][2] == "idle"


def test_forms_that_follow_no_calls_are_what_is_left() -> None:
    assert [form for form in auto if not form.replays] == [dense, loop]
