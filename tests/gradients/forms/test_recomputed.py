"""The frugal form: the same norms and sums as the fast one, from one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compare import private
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import hushgrad as hg
from hushgrad.gradients import AnyGradients, auto, difference, per_sample, recomputed, traced
from hushgrad.gradients.forms.recomputed import Recomputed
from hushgrad.run.step import clipped_sum
from hushgrad.types import PerSample, Refused
from zoo.sequences import LastStep
from zoo.small import TiedWords
from zoo.vision import small_cnn


class TwiceCheckpointed(nn.Module):
    """One layer in two blocks that are both recomputed, each in a graph of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.layer, self.reentrant = nn.Linear(5, 4), nn.Linear(4, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(2):
            h = checkpoint(lambda h: torch.tanh(self.layer(h)), h, use_reentrant=self.reentrant)
        return h


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "cnn with dropout": (small_cnn, lambda: torch.randn(9, 3, 6, 6)),
    "tied": (TiedWords, lambda: torch.randint(11, (9, 4))),
    "normed weight": (
        lambda: nn.Sequential(weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)),
        lambda: torch.randn(9, 5),
    ),
    "lstm": (lambda: LastStep(5, 6, 3), lambda: torch.randn(9, 7, 5)),
    "checkpointed": (lambda: TwiceCheckpointed(reentrant=False), lambda: torch.randn(9, 5)),
}


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum(1)


def taken(name: str) -> tuple[dict[str, AnyGradients], dict[str, Tensor]]:
    """The gradients in both forms, with the same draws, and weights for a sum."""
    build, data = MODELS[name]
    model, batch = build().train(), data()
    loss, params, found = loss_of(model), private(model), {}
    for form in (traced, recomputed):
        per_sample(loss, params, batch, form=form, modules=(model,))  # certifies
        torch.manual_seed(3)
        found[form.name] = per_sample(loss, params, batch, form=form, modules=(model,))
    weights = torch.rand(9, dtype=torch.float64)
    return found, dict.fromkeys(params, weights)


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums_are_those_of_the_fast_form(name: str) -> None:
    found, weights = taken(name)
    fast, frugal = found["traced"], found["recomputed"]
    assert isinstance(frugal, Recomputed) and torch.equal(fast.losses, frugal.losses)
    for parameter, square in fast.squares.items():
        assert torch.equal(square.upper, frugal.squares[parameter].upper)
    sums = frugal.weighted_sum(weights)
    for parameter, total in fast.weighted_sum(weights).items():
        assert torch.equal(total, sums[parameter])


def test_one_parameter_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())))
    loss, params, batch = loss_of(model), private(model), torch.randn(8, 6)
    per_sample(loss, params, batch, form=recomputed, modules=(model,))
    held = []
    measure = Recomputed._measure

    def counted(self: Recomputed, name: str, uses: dict) -> None:
        held.append(sum(map(bool, self._tape.factors.values())))
        measure(self, name, uses)

    monkeypatch.setattr(Recomputed, "_measure", counted)
    per_sample(loss, params, batch, form=recomputed, modules=(model,))
    assert len(held) >= 8 and max(held) <= 1  # beside the one at hand, its layer's other


def test_a_parameter_that_comes_back_twice_is_left_to_the_fast_form() -> None:
    """Reentrant checkpointing hides the second use until the first has come back."""
    model = TwiceCheckpointed(reentrant=True)
    loss, params, batch = loss_of(model), private(model), torch.randn(9, 5)
    gradients = per_sample(loss, params, batch, form=(recomputed, *auto), modules=(model,))
    assert gradients.form == "traced"


def test_a_step_runs_in_it_with_a_loss_scale_and_a_bad_record() -> None:
    model = small_cnn().eval()
    loss, params, batch = loss_of(model), private(model), torch.randn(9, 3, 6, 6)
    batch[4] = torch.nan
    plain = clipped_sum(loss, params, batch, modules=(model,))
    execution = hg.Execution(form=recomputed, loss_scale=2.0**8, micro_batch=5)
    frugal = clipped_sum(loss, params, batch, modules=(model,), execution=execution)
    for name, total in plain.sum.items():
        assert total.isfinite().all()
        assert torch.allclose(total.double(), frugal.sum[name].double(), rtol=1e-4, atol=1e-6)


def test_it_is_a_final_type_of_its_own() -> None:
    assert Recomputed.__mro__ == (Recomputed, object)
    assert all(isinstance(x, PerSample) for x in taken("tied")[0].values())


def test_what_it_cannot_do_is_said() -> None:
    found, weights = taken("tied")
    frugal = found["recomputed"]
    with pytest.raises(Refused, match="hold no factors"):
        difference(frugal, found["traced"])
    for one, other in (("recomputed", "traced"), ("traced", "recomputed")):
        with pytest.raises(Refused, match="hold no factors"):
            found[one] + found[other]
    frugal.weighted_sum(weights)
    with pytest.raises(Refused, match="summed once"):
        frugal.weighted_sum(weights)


def passes_back(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Counts backward passes over a graph; True where the graph is kept for another."""
    found: list[bool] = []
    backward = Recomputed._pass_back

    def counted(self: Recomputed, hand_over: Callable, *, again: bool) -> None:
        found.append(again)
        backward(self, hand_over, again=again)

    monkeypatch.setattr(Recomputed, "_pass_back", counted)
    return found


GROUPINGS = (hg.per_layer, hg.grouping.per_parameter, hg.grouping.whole)
CLIPS = (hg.abadi(0.3), hg.automatic(), hg.clipping.reparameterized(0.2))


# Every model by one rule, and every rule on one model.
@pytest.mark.parametrize("groups", GROUPINGS)
@pytest.mark.parametrize(
    ("name", "clip"), [*((name, CLIPS[0]) for name in MODELS), *(("tied", c) for c in CLIPS[1:])]
)
def test_layers_that_are_clipped_by_themselves_are_summed_in_one_pass(
    name: str, clip: hg.Clip, groups: hg.Grouping, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, data = MODELS[name]
    model, batch = build().eval(), data()
    loss, params = loss_of(model), private(model)
    settings = {"clip": clip, "groups": groups, "modules": (model,)}
    plain = clipped_sum(loss, params, batch, **settings)
    execution = hg.Execution(form=recomputed)
    clipped_sum(loss, params, batch, **settings, execution=execution)  # certifies
    passes = passes_back(monkeypatch)
    frugal = clipped_sum(loss, params, batch, **settings, execution=execution)
    assert passes == ([True, False] if groups is hg.grouping.whole else [True])
    for parameter, total in plain.sum.items():
        assert torch.allclose(total, frugal.sum[parameter], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "rule",
    [
        hg.clipping.custom(lambda norms: 1 / norms.sum().expand_as(norms), bound=2.0),
        hg.abadi(0.3),
    ],
)
def test_sums_that_were_foreseen_wrongly_are_taken_again(rule: hg.Clip) -> None:
    """By a rule that looks at all groups, and for a record that is not finite in some of them."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    loss, params, batch = loss_of(model), private(model), torch.randn(9, 5)
    batch[2] = torch.inf  # tanh saturates: the second layer's gradient is finite
    settings = {"clip": rule, "groups": hg.per_layer, "modules": (model,)}
    sums = []
    for execution in (hg.Execution(), hg.Execution(form=recomputed)):
        torch.manual_seed(0)  # for places that records may draw
        sums.append(clipped_sum(loss, params, batch, **settings, execution=execution).sum)
    plain, frugal = sums
    without = torch.cat([batch[:2], batch[3:]])
    expected = clipped_sum(loss, params, without, **settings)
    for parameter, total in plain.items():
        assert torch.equal(total, frugal[parameter])
        assert torch.allclose(total.double(), expected.sum[parameter].double(), atol=1e-5)
