"""A linear loss has the per-sample gradients that autograd finds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hushgrad as hg
from hushgrad.algorithms import Srm
from hushgrad.glm.closed import LinearLoss
from hushgrad.glm.losses import bi_tempered, hinge, logistic, multinomial, poisson, squared
from hushgrad.gradients import difference, traced
from hushgrad.types import Refused

LOSSES = [logistic(), hinge(), squared(), poisson(), multinomial(), bi_tempered()]


def problem(loss, *, bias: bool = True, records: int = 13):
    torch.manual_seed(0)
    model = nn.Linear(5, 3 if loss.vector else 1, bias=bias).double()
    x = torch.randn(records, 5, dtype=torch.float64)
    y = torch.randint(3, (records,)) if loss.vector else torch.randint(2, (records,)) * 2.0 - 1
    return model, dict(model.named_parameters()), (x, y)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("bias", [True, False])
def test_norms_and_sums_are_those_of_autograd(loss, bias: bool) -> None:
    model, params, batch = problem(loss, bias=bias)
    own = LinearLoss(model, loss)
    found = own.per_sample(params, batch)
    plain = hg.per_sample(lambda b: own(b), params, batch, form=traced, modules=(model,))
    torch.testing.assert_close(found.losses, plain.losses)
    weights = dict.fromkeys(params, torch.rand(13, dtype=torch.float64))
    sums = found.weighted_sum(weights)
    for name, total in plain.weighted_sum(weights).items():
        torch.testing.assert_close(sums[name], total)
        torch.testing.assert_close(found.squares[name].estimate, plain.squares[name].estimate)
        assert (found.squares[name].upper >= plain.squares[name].estimate * (1 - 1e-12)).all()


def test_a_record_that_is_not_finite_has_no_weight() -> None:
    model, params, (x, y) = problem(logistic())
    x[4] = torch.nan
    total = hg.clipped_sum(LinearLoss(model, logistic()), params, (x, y))
    rest = [i for i in range(13) if i != 4]
    others = hg.clipped_sum(LinearLoss(model, logistic()), params, (x[rest], y[rest]))
    for name, value in total.sum.items():
        torch.testing.assert_close(value, others.sum[name])


def test_the_step_asks_the_loss_and_not_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params, batch = problem(logistic())
    plain = hg.clipped_sum(lambda b: LinearLoss(model, logistic())(b), params, batch)
    monkeypatch.setattr(torch.Tensor, "backward", None)
    own = hg.clipped_sum(LinearLoss(model, logistic()), params, batch)
    for name, value in plain.sum.items():
        torch.testing.assert_close(own.sum[name], value)
    assert own.l2 == plain.l2


def test_other_parameters_are_refused() -> None:
    model, params, batch = problem(logistic())
    with pytest.raises(Refused, match="the linear model's own parameters"):
        LinearLoss(model, logistic()).per_sample({"weight": params["weight"]}, batch)


class Centred(nn.Linear):
    """A linear layer by name, whose records look at each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


def hooked() -> nn.Linear:
    model = nn.Linear(5, 1)
    model.register_forward_hook(lambda module, given, out: out - out.mean(0))
    return model


@pytest.mark.parametrize(
    "model",
    [
        Centred(5, 1),
        hooked(),
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 1)),
    ],
    ids=["subclass", "hook", "parametrization"],
)
def test_a_model_that_is_not_certified_must_be_a_plain_linear_one(model: nn.Module) -> None:
    with pytest.raises(Refused, match=r"expected a plain nn\.Linear"):
        LinearLoss(model, logistic())


def test_what_is_changed_later_is_refused_too() -> None:
    model, params, (x, y) = problem(logistic())
    loss = LinearLoss(model, logistic())
    with pytest.raises(Refused, match="rows of features"):
        loss.per_sample(params, (x[:, None], y))
    model.register_forward_pre_hook(lambda module, given: given)
    with pytest.raises(Refused, match="with hooks"):
        loss.per_sample(params, (x, y))
    with pytest.raises(Refused, match="one score"):
        LinearLoss(nn.Linear(5, 3), logistic())


@pytest.mark.parametrize("loss", [logistic(), multinomial()], ids=repr)
@pytest.mark.parametrize("size", [1, 7, 24, 60, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_record_keeps_its_bits_beside_other_records(loss, size: int, dtype: torch.dtype) -> None:
    model, params, (x, y) = problem(loss, records=1000)
    model.to(dtype)
    x = x.to(dtype)

    def slopes(first: int, last: int) -> torch.Tensor:
        found = LinearLoss(model, loss).per_sample(params, (x[first:last], y[first:last]))
        return torch.stack(list(found.sq_norms().values()))[:, : last - first]

    whole = slopes(0, 1000)
    assert torch.equal(slopes(3, 3 + size), whole[:, 3 : 3 + size])


def test_differences_at_two_points_cancel_where_the_points_agree() -> None:
    model, params, batch = problem(logistic())
    loss = LinearLoss(model, logistic())
    before, again = loss.per_sample(params, batch), loss.per_sample(params, batch)
    assert not any(square.upper.any() for square in difference(again, before).squares.values())


def test_dp_srm_takes_it_and_comes_to_the_same_point_as_by_autograd() -> None:
    _, _, data = problem(logistic(), records=200)

    def trained(closed: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Linear(5, 1).double()
        loss = LinearLoss(model, logistic())
        rule = Srm(0.1, hg.abadi(0.1), first_batch=80)
        plan = hg.plan(
            records=200, batch=40, epochs=2, delta=1e-3, noise_multiplier=0.0, algorithm=rule
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run = hg.train(model, optimizer, data, plan=plan, rng=hg.Rng.fixed(3))
        for batch in run:
            run.step(loss if closed else (lambda b: loss(b)), batch)
        return [p.detach() for p in model.parameters()]

    for own, plain in zip(trained(closed=True), trained(closed=False), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-8)
