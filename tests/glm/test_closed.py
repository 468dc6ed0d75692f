"""A linear loss has the per-sample gradients that autograd finds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hushgrad as hg
from hushgrad.algorithms import Srm
from hushgrad.glm.closed import LinearLoss
from hushgrad.glm.losses import bi_tempered, hinge, logistic, multinomial, poisson, squared
from hushgrad.persample import difference, traced
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
