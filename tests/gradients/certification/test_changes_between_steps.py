"""What a user changes between steps: certified anew, exact, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import FORMS, agree, check, expected, private
from torch import Tensor, nn
from uses import loss_of, weigh

from hushgrad import Refused
from hushgrad.gradients import Form, dense, loop, per_sample, traced
from zoo.small import perceptron


@FORMS
def test_freezing_a_layer_certifies_anew(form: Form, certifications: list[Any]) -> None:
    model, batch = perceptron(), torch.randn(5, 3)
    for trained, count in ((True, 1), (False, 2), (True, 2), (False, 2)):
        model[0].requires_grad_(trained)
        gradients = check(loss_of(model), model, batch, form=form)
        assert gradients.sq_norms().keys() == private(model).keys()
        assert len(certifications) == count


@FORMS
def test_a_parameter_that_is_frozen_later_but_still_named_is_refused(form: Form) -> None:
    model, batch = perceptron(), torch.randn(5, 3)
    params = private(model)
    for _ in range(3):
        per_sample(loss_of(model), params, batch, form=form)
    model[0].bias.requires_grad_(False)
    with pytest.raises(Refused, match=r"0\.bias is frozen; leave it out"):
        per_sample(loss_of(model), params, batch, form=form)


@FORMS
def test_another_mode_certifies_anew(form: Form, certifications: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    model[1].running_mean.normal_()
    batch = torch.randn(5, 3)
    model.eval()
    check(loss_of(model), model, batch, form=form)
    model[2].train()
    per_sample(loss_of(model), private(model), batch, form=form, modules=(model,))
    assert len(certifications) == 2
    model.train()
    with pytest.raises(Refused, match="BatchNorm1d in training mode"):
        per_sample(loss_of(model), private(model), batch, form=form, modules=(model,))
    model.eval()
    check(loss_of(model), model, batch, form=form)
    assert len(certifications) == 3


@FORMS
def test_another_length_is_exact(form: Form) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    for size, length in ((5, 6), (5, 8), (8, 8), (3, 1), (5, 6), (9, 16), (16, 16), (11, 11)):
        check(loss_of(model), model, torch.randn(size, length, 3), form=form)


class Skips(nn.Module):
    """Runs its middle layer or not, as a public switch says."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.middle(h).tanh() if self.on else h)


@pytest.mark.parametrize(
    ("pattern", "form"),
    [("10101010", traced), ("11101110", traced), ("01110", traced), ("101", dense), ("101", loop)],
)
def test_a_layer_that_is_skipped_at_some_steps_is_exact(pattern: str, form: Form) -> None:
    model = Skips()
    idle = ("middle.weight", "middle.bias")
    for on in pattern:
        model.on = on == "1"
        gradients = check(loss_of(model), model, torch.randn(5, 3), form=form, idle=idle)
        assert bool(gradients.sq_norms()["middle.weight"].any()) == model.on


@pytest.mark.parametrize("pattern", ["1100", "1110", "0001"])
def test_a_flag_that_comes_with_the_batch_is_exact(pattern: str) -> None:
    """Every record carries it, and the model reads the first record's."""
    model = Skips()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        model.on = bool(batch[1][0])
        return weigh(model(batch[0]))

    idle = ("middle.weight", "middle.bias")
    for on in pattern:
        flag = torch.full((5,), on == "1")
        check(loss, model, (torch.randn(5, 3), flag), idle=idle)


@FORMS
def test_a_branch_that_the_records_choose_together_is_refused(form: Form) -> None:
    """Four records, all of which are drawn for the test: half of them alone go the other way."""
    model = Skips()

    def loss(x: Tensor) -> Tensor:
        model.on = bool(x.sum() > 0)
        return weigh(model(x))

    batch = torch.randn(4, 3).abs() * torch.tensor([[2.0], [-1.0], [2.0], [-1.0]])
    idle = ("middle.weight", "middle.bias")
    with pytest.raises(Refused, match="depends on other records"):
        per_sample(loss, private(model), batch, form=form, idle=idle)


class Ticks(Skips):
    """Counts its passes, and drops some activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(F.dropout(x, 0.2))


@pytest.mark.parametrize("pattern", ["1110101010", "0111011"])
def test_a_pass_that_was_given_up_leaves_no_trace(pattern: str) -> None:
    """Another sequence of operations is tried first; the step still draws and counts once."""
    model, batch = Ticks(), torch.randn(8, 3)
    idle = ("middle.weight", "middle.bias")
    for step, on in enumerate(pattern):
        model.on = on == "1"
        after = []
        for again in range(2):  # the second time, the right sequence is tried first
            torch.manual_seed(step)
            per_sample(
                loss_of(model), private(model), batch, form=traced, modules=(model,), idle=idle
            )
            assert int(model.passes) == 2 * step + again + 1
            after.append(torch.get_rng_state())
        assert torch.equal(*after), step


class Turns(nn.Module):
    """Works time first or records first, as a public switch says; both are the same function."""

    def __init__(self) -> None:
        super().__init__()
        self.time_first = False
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.time_first:
            return self.layer(x.transpose(0, 1)).transpose(0, 1)
        return self.layer(x)


@pytest.mark.parametrize("length", [5, 8, 16])
@pytest.mark.parametrize("size", [8, 16])
def test_records_that_move_to_another_dimension_are_never_taken_for_others(
    length: int, size: int
) -> None:
    """Step 3 is not tested again, and where length and batch agree no shape tells."""
    model, batch = Turns(), torch.randn(size, length, 3)
    for _ in range(3):
        check(loss_of(model), model, batch)
    model.time_first = True
    want = expected(loss_of(model), private(model), batch)
    try:
        gradients = per_sample(loss_of(model), private(model), batch, form=traced, modules=(model,))
    except Refused:
        return
    agree(gradients, want, private(model))


class Gated(nn.Module):
    """Two gates at zero hide a layer that flattens with time in front."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.hidden = nn.Linear(6, 3), nn.Linear(6, 6)
        self.gates = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        turned = x.transpose(0, 1)
        z = self.hidden(turned.reshape(-1, 6)).reshape(turned.shape).transpose(0, 1)
        return self.head(x + self.gates[0] * self.gates[1] * z).mean(1)


def test_a_layer_behind_closed_gates_is_tested_all_the_same() -> None:
    model = Gated()
    batch = torch.randn(16, 5, 6)

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), torch.ones(len(x), dtype=torch.long), reduction="none")

    warmed_batches = [torch.randn(16, 5, 6) for _ in range(6)]
    for one in warmed_batches:
        per_sample(loss, private(model), one, modules=(model,), form=traced)
    with torch.no_grad():
        for gate in model.gates:
            gate.fill_(3.0)
    check(loss, model, batch, form=traced)
