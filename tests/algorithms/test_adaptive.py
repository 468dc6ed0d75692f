"""DP-AGD: what was measured and chosen stays within the budget."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from dp_accounting.dp_event import ZCDpEvent
from record_by_record import (
    FEATURES,
    RECORDS,
    Spy,
    assert_close,
    bound,
    clipped,
    combine,
    data,
    gradients_at,
    loss_of,
    model,
    plan_of,
    point_of,
    size,
    total,
    watched,
)
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import Refused, Relation, Rng
from hushgrad.accounting import PLD, RDP
from hushgrad.algorithms import Agd, adaptive
from hushgrad.algorithms.adaptive import _mean, rho_of
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.run.execution import Execution
from hushgrad.sampling import FullBatch

C1 = 0.8
FULL = {"sampling": FullBatch(), "batch": RECORDS, "epochs": 4}


def agd_plan(**changes):
    options = FULL | {"epochs": 40, "accountant": RDP, "noise_multiplier": 0.5}
    return plan_of(Agd(largest_loss=3.0, splits=4, choices=5), **(options | changes))


@pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.REPLACE_ONE])
def test_what_was_measured_and_chosen_stays_within_the_budget(monkeypatch, relation) -> None:
    spy = Spy(monkeypatch)
    plan = agd_plan(relation=relation)
    seen = watched(plan, monkeypatch, lr=1.0)
    double = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    spent = 0.0
    for bounded, noise in zip(spy.bounded, spy.noises, strict=True):
        if noise.name == "gaussian":
            assert bounded.l2 == bound(C1)
            spent += (double / noise.noise_multiplier) ** 2 / 2
        else:  # scores that move by Δ, on a grid of 2⁻¹⁴ of the noise: ε-DP, ε²/2-zCDP
            assert bounded.l1 == bound(3.0)
            spent += (2 / noise.noise_multiplier + 2**-14) ** 2 / 2
    rho = rho_of(0.5, relation)
    assert rho == double**2 / 0.5
    assert spent <= rho
    assert spent > 0.6 * rho  # and it was used
    assert spent == pytest.approx(seen.run._spent, rel=1e-6)
    assert plan.event(40) == plan.event(1) == ZCDpEvent(rho)
    assert seen.run._remembered["over"]
    assert seen.run.steps_taken < 40


def test_a_step_is_the_chosen_length_along_the_measured_gradient(monkeypatch) -> None:
    spy = Spy(monkeypatch)
    seen = watched(agd_plan(noise_multiplier=0.02), monkeypatch, lr=1.0, penalty=0.01)
    each = [clipped(g, C1) for g in gradients_at(seen.points[0], seen.batches[0])]
    assert_close(spy.bounded[0].sum, total(each, seen.points[0]), 1e-6)
    mean = {n: x / RECORDS + 0.02 * seen.points[0][n] for n, x in spy.values[0].items()}
    scores = []
    for k in range(5):
        theta = combine((1.0, seen.points[0]), (-2.0 * k / 4 / size(mean), mean))
        net = model()
        net.load_state_dict(theta)
        losses = loss_of(net)(data()).detach().clamp(0, 3.0).sum()
        scores.append(float(losses + RECORDS * 0.01 * size(theta) ** 2))
    assert torch.allclose(spy.bounded[1].sum["scores"], torch.tensor(scores).double(), atol=1e-5)
    chosen = int(spy.values[1]["scores"].argmin())
    assert chosen > 0
    step = combine((1.0, seen.points[0]), (-2.0 * chosen / 4 / size(mean), mean))
    assert_close(seen.points[1], step, 1e-6)


def test_a_gradient_that_leads_nowhere_is_measured_again_and_averaged(monkeypatch) -> None:
    """The choice is made to fall on no step twice, and then on the third length of five."""
    spy = Spy(monkeypatch)
    chosen = iter([0, 0, 2])
    monkeypatch.setattr(adaptive, "_place_of_least", lambda scores: next(chosen))
    seen = watched(agd_plan(epochs=1), monkeypatch, lr=1.0)
    first = rho_of(0.5, Relation.ADD_REMOVE) / 8
    measured = [k for k, noise in enumerate(spy.noises) if noise.name == "gaussian"]
    costs = [1 / spy.noises[k].noise_multiplier ** 2 / 2 for k in measured]
    assert costs == pytest.approx([first, 0.1 * first, 0.11 * first])  # γ of what is known
    weighted = combine(
        *(
            (c / sum(costs), x)
            for c, x in zip(costs, (spy.values[k] for k in measured), strict=True)
        )
    )
    step = combine((1.0, seen.points[0]), (-2.0 * 2 / 4 / size(weighted), weighted))
    assert_close(seen.points[1], step, 1e-9)
    assert seen.run._remembered["gradient"] == pytest.approx(sum(costs))


def test_two_measurements_are_as_good_as_one_of_both_costs() -> None:
    """Weights by ρ give the variance of a single measurement for the sum of the costs."""
    draws = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0)).double()
    costs = (3.0, 1.0)
    old, new = (x / math.sqrt(2 * rho) for x, rho in zip(draws, costs, strict=True))
    mean = _mean(old, costs[0], new, costs[1])
    assert float(mean.std()) == pytest.approx(1 / math.sqrt(2 * sum(costs)), rel=0.02)
    assert float(((old + new) / 2).std()) > 1.1 / math.sqrt(2 * sum(costs))


def test_a_loss_of_one_record_moves_a_score_by_at_most_its_bound(monkeypatch) -> None:
    spy = Spy(monkeypatch)
    x, y = data()
    far = x.clone()
    far[0] *= 1e6
    for records in ((x, y), (far, 1 - y)):
        watched(agd_plan(epochs=1), monkeypatch, lr=1.0, records=records)
    for found in spy.bounded:
        if "scores" in found.sum:
            assert float(found.sum["scores"].max()) <= 3.0 * RECORDS
            assert float(found.sum["scores"].min()) >= 0


def test_scores_of_the_farthest_records_reach_their_bound_and_stop_there(monkeypatch) -> None:
    """Every record at the largest loss: a clamp that is 1 % off shows."""
    spy = Spy(monkeypatch)
    x, _ = data()
    wrong = 1 - model()(x).argmax(1)  # losses above log 2
    plan = plan_of(Agd(0.5, splits=4), **(FULL | {"epochs": 1, "accountant": RDP}))
    watched(plan, monkeypatch, lr=1.0, records=(x, wrong))
    scores = next(found for found in spy.bounded if "scores" in found.sum)
    assert float(scores.sum["scores"][0]) == pytest.approx(0.5 * RECORDS, rel=1e-9)
    assert scores.l1 == bound(0.5)


def test_a_penalty_does_not_carry_scores_to_where_a_record_is_lost(monkeypatch) -> None:
    """At 1e20 float64 has steps of 16384, and one record would move a score by that."""
    spy = Spy(monkeypatch)
    seen = watched(agd_plan(epochs=1), monkeypatch, lr=1.0, penalty=1e20)
    scores = [found.sum["scores"] for found in spy.bounded if "scores" in found.sum]
    assert float(torch.stack(scores).max()) == 2.0**36 * 3.0
    assert torch.finfo(torch.float64).eps * 2.0**36 < 1e-3 * SUM_SLACK * RECORDS
    assert seen.run.steps_taken == 1


class Rows(nn.Module):
    """Notes how many rows it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = model(), set[int]()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.seen.add(len(x))
        return self.inner(x)


def test_losses_are_taken_in_batches_that_keep_a_records_bits() -> None:
    """32 rows, the most that any model needs, whichever number certification found."""
    net = Rows()
    plan = agd_plan(epochs=1)
    optimizer, execution = torch.optim.SGD(net.parameters(), lr=1.0), Execution(micro_batch=8)
    run = hg.train(net, optimizer, data(), plan=plan, rng=Rng.fixed(0), execution=execution)
    for batch in run:
        run.step(loss_of(net), batch)
    assert net.seen
    assert all(rows % 32 == 0 for rows in net.seen)


def test_the_ends_share_their_dropout_and_records_do_not(monkeypatch) -> None:
    """The same record in every place of two micro-batches: at one end all draws are its own."""
    x, y = data()
    same = (x[:1].expand(RECORDS, FEATURES).clone(), y[:1].expand(RECORDS).clone())
    parts: list[Tensor] = []
    real = adaptive._losses
    monkeypatch.setattr(adaptive, "_losses", lambda part: parts.append(real(part)) or parts[-1])
    options = {"records": same, "dropout": 0.5, "execution": Execution(micro_batch=32)}
    watched(agd_plan(epochs=1), monkeypatch, lr=1.0, **options)
    one, other = ([found for found in parts if len(found) == n] for n in (32, RECORDS - 32))
    assert len(one) == len(other) > 0
    assert not any(torch.equal(a[: RECORDS - 32], b) for a in one for b in other)


def test_a_run_that_is_over_stays_where_it_is(monkeypatch) -> None:
    """The penalty's gradient is part of a chosen step, and not a step of its own."""
    seen = watched(agd_plan(), monkeypatch, lr=1.0, penalty=0.1)
    assert seen.run._remembered["over"]
    assert_close(seen.points[-1], seen.points[-2], 0.0)


def test_adaptive_budgets_resume_with_the_same_bits(tmp_path: Path) -> None:
    plan = agd_plan(noise_multiplier=0.05)
    nets = [model(), model(), model()]
    runs = []
    for net, folder, until, resume in (
        (nets[0], "whole", None, False),
        (nets[1], "halves", 2, False),
        (nets[2], "halves", None, True),
    ):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        options = {"plan": plan, "rng": Rng.fixed(3), "folder": tmp_path / folder}
        run = hg.train(net, optimizer, data(), **options, resume=resume)
        for batch in run:
            run.step(loss_of(net), batch)
            if run.steps_taken == until:
                run.save()
                break
        runs.append(run)
    assert_close(point_of(nets[0]), point_of(nets[2]), 0.0)
    assert runs[0].steps_taken == runs[2].steps_taken > 2
    assert runs[2].guarantee.charges == ()


def test_another_choice_on_the_same_gradient_is_a_second_release(tmp_path: Path) -> None:
    """A penalty moves the scores and not the sum of gradients: its choice is drawn, and charged."""
    plan = agd_plan(noise_multiplier=0.05)
    for penalty, resume in ((0.0, False), (0.0, True), (0.05, True)):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        options = {"plan": plan, "rng": Rng.from_os(), "folder": tmp_path}
        run = hg.train(net, optimizer, data(), **options, resume=resume)
        for batch in run:

            def decay(weight: float = penalty, net: nn.Module = net) -> Tensor:
                return weight * sum(p.square().sum() for p in net.parameters())  # type: ignore[return-value]

            run.step(loss_of(net), batch, penalty=decay if penalty else None)
            break
        charged = [charge.epsilon for charge in run.guarantee.charges]
        assert len(charged) == (penalty > 0)
    assert charged[0] >= plan.epsilon  # all of ρ, once more at least


def test_adaptive_budgets_need_their_accountant_and_noise() -> None:
    met = agd_plan(noise_multiplier=None, epsilon=1.0)
    assert 0.99 < met.epsilon <= 1.0
    with pytest.raises(Refused, match="rdp accountant"):
        _ = agd_plan(accountant=PLD).epsilon
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    run = hg.train(net, optimizer, data(), plan=agd_plan(noise_multiplier=0.0), rng=Rng.fixed(0))
    with pytest.raises(Refused, match="expected noise"):
        run.step(loss_of(net), next(iter(run)))
    with pytest.raises(Refused, match="full batches"):
        plan_of(Agd(3.0))
    with pytest.raises(ValueError, match="largest_loss > 0"):
        Agd(0.0)
    with pytest.raises(ValueError, match="splits >= 2"):
        Agd(3.0, splits=1)
