"""A private run end to end: what is drawn is accounted, noise comes once, the plan is the end."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import dp_accounting
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hushgrad as hg
from hushgrad import Refused, Relation, Rng
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.clipping.rules import abadi
from hushgrad.run.guarantee import Guarantee
from hushgrad.run.plan import Plan
from hushgrad.run.randomness import own_randomness
from hushgrad.sampling import FullBatch, Poisson, Shuffled, Stated, WithoutReplacement

RECORDS = 400


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(RECORDS, 6, generator=torch.Generator().manual_seed(5))
    return x, (x[:, 0] + 0.3 * x[:, 1] > 0).long()


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(net: nn.Module):
    return lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none")


def small_plan(**changes) -> Plan:
    options = {"records": RECORDS, "batch": 40, "epochs": 1, "delta": 1e-4, "noise_multiplier": 1.0}
    return hg.plan(**(options | changes))


def started(net: nn.Module, plan: Plan, seed: int = 0, lr: float = 0.1) -> hg.Run:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    return hg.train(net, optimizer, data(), plan=plan, rng=Rng.fixed(seed))


# --- the plan ---


def test_a_plan_meets_its_epsilon_from_the_private_side() -> None:
    plan = hg.plan(records=60_000, batch=512, epochs=2, epsilon=1.0, delta=1e-5)
    assert 0.99 < plan.epsilon <= 1.0
    assert plan.steps == 235
    assert plan.sampling == Poisson(512 / 60_000)
    assert plan.divisor == pytest.approx(512)


def test_a_plan_is_the_event_of_its_steps() -> None:
    plan = small_plan()
    expected = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0)), 10
    )
    assert plan.event(plan.steps) == expected


def test_the_same_noise_costs_more_if_a_record_is_replaced() -> None:
    kept, replaced = small_plan(), small_plan(relation=Relation.REPLACE_ONE)
    assert replaced.epsilon > 1.2 * kept.epsilon


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 500}, "1 <= batch <= records, got batch 500 of 400"),
        ({"epochs": 0}, "epochs above 0, got 0"),
        ({"epsilon": 1.0}, "either epsilon or noise_multiplier, got both"),
        ({"noise_multiplier": None}, "either epsilon or noise_multiplier, got neither"),
        ({"delta": 1.5}, "0 < delta < 1, got 1.5"),
        ({"noise_multiplier": -1.0}, "noise multiplier >= 0"),
        ({"accountant": hg.accounting.GDP}, "proves its figures, got gdp"),
        ({"sampling": Shuffled(40)}, "replace-one or zero-out with .*got add-remove"),
    ],
)
def test_a_plan_that_makes_no_sense_is_named(changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = small_plan(**changes).epsilon


# --- a step ---


def test_without_noise_and_clipping_it_is_plain_gradient_descent() -> None:
    """Full batch, σ = 0, R beyond every norm: the same steps as torch takes."""
    plan = small_plan(sampling=FullBatch(), epochs=0.5, noise_multiplier=0.0, clip=abadi(1e6))
    net, plain = model(), model()
    run = started(net, plan)
    for batch in run:
        run.step(loss_of(net), batch)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(plan.steps):
        optimizer.zero_grad()
        loss_of(plain)(data()).mean().backward()
        optimizer.step()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert run.guarantee.epsilon == math.inf
    assert "not private" in str(run.guarantee)


@pytest.mark.parametrize("micro_batch", [None, 7])
def test_the_update_has_the_noise_of_the_plan(micro_batch: int | None) -> None:
    """Two runs that differ in their noise alone: the gap has √2 times its scale."""
    plan = small_plan(clip=abadi(0.5), noise_multiplier=2.0)
    grads = []
    for seed in (0, 1):
        net = nn.Linear(6, 2000, bias=False)
        nn.init.zeros_(net.weight)
        run = hg.train(
            net,
            torch.optim.SGD(net.parameters(), lr=0.0),
            (torch.zeros(RECORDS, 6),),
            plan=plan,
            rng=Rng.fixed(seed),
            execution=hg.Execution(micro_batch=micro_batch),
        )
        batch = next(iter(run))
        run.step(lambda b, net=net: net(b[0]).sum(1), batch)
        grads.append(net.weight.grad.double().flatten().numpy())
    gap = (grads[0] - grads[1]) * 40
    scale = 2.0 * 0.5 * (1 + SUM_SLACK) * math.sqrt(2)
    assert stats.kstest(gap, stats.norm(scale=scale).cdf).pvalue > 1e-3
    assert stats.kstest(gap, stats.norm(scale=scale * 2 / 3).cdf).pvalue < 1e-3
    assert stats.kstest(gap, stats.norm(scale=scale * 3 / 2).cdf).pvalue < 1e-3


def test_an_empty_batch_takes_a_step_of_noise_without_calling_the_loss() -> None:
    plan = hg.plan(records=100_000, batch=1, epochs=1e-5, delta=1e-6, noise_multiplier=1.0)
    net = model()
    with pytest.warns(UserWarning, match="data of about the 100000 records"):
        run = hg.train(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            tuple(x[:3] for x in data()),
            plan=plan,
            rng=Rng.fixed(0),
        )
    before = [p.detach().clone() for p in net.parameters()]
    batch = next(iter(run))
    assert len(batch[0]) == 0

    def never(batch: object) -> Tensor:
        raise AssertionError("the loss was called")

    run.step(never, batch)
    assert all(not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert run.steps_taken == 1


def test_the_divisor_is_the_plans_and_not_the_batchs() -> None:
    net = nn.Linear(6, 1, bias=False)
    plan = small_plan(noise_multiplier=0.0, clip=abadi(1e6))
    run = hg.train(
        net,
        torch.optim.SGD(net.parameters(), lr=0.0),
        (torch.ones(RECORDS, 6),),
        plan=plan,
        rng=Rng.fixed(0),
    )
    sizes = set()
    for batch in run:
        run.step(lambda b: net(b[0])[:, 0], batch)
        sizes.add(len(batch[0]))
        np.testing.assert_allclose(net.weight.grad.numpy(), len(batch[0]) / 40, rtol=1e-5)
    assert len(sizes) > 3


def test_a_penalty_is_added_after_the_noise() -> None:
    plan = small_plan(noise_multiplier=1.0)
    grads = []
    for factor in (0.0, 3.0):
        net = model()
        run = started(net, plan)
        run.step(
            loss_of(net),
            next(iter(run)),
            penalty=lambda net=net, factor=factor: factor * net[0].weight.square().sum() / 2,
        )
        grads.append(net[0].weight.grad.clone())
        weight = model()[0].weight
    torch.testing.assert_close(grads[1] - grads[0], 3 * weight.detach())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: torch.optim.NAdam(p, lr=0.01),
        lambda p: torch.optim.RAdam(p, lr=0.01),
        lambda p: torch.optim.Adamax(p, lr=0.01),
        lambda p: torch.optim.Adadelta(p),
    ],
)
def test_any_first_order_optimizer_learns(make) -> None:
    net = model()
    plan = small_plan(epochs=3, noise_multiplier=0.5, batch=100)
    run = hg.train(net, make(net.parameters()), data(), plan=plan, rng=Rng.fixed(0))
    before = loss_of(net)(data()).mean().item()
    for batch in run:
        run.step(loss_of(net), batch)
    assert loss_of(net)(data()).mean().item() < before


def test_an_optimizer_that_asks_again_is_refused() -> None:
    net = model()
    with pytest.raises(Refused, match="got LBFGS; use SGD or Adam"):
        hg.train(
            net, torch.optim.LBFGS(net.parameters()), data(), plan=small_plan(), rng=Rng.fixed(0)
        )


# --- the run ---


def test_a_run_is_reproducible_from_its_seed_and_says_so() -> None:
    states = []
    for seed in (3, 3, 4):
        net = model()
        run = started(net, small_plan(), seed)
        for batch in run:
            run.step(loss_of(net), batch)
        states.append(net.state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert not torch.equal(states[0]["0.weight"], states[2]["0.weight"])
    assert "reproducible, not private" in str(run.guarantee)
    assert run.guarantee.epsilon == math.inf


def test_a_run_leaves_torchs_own_generator_alone() -> None:
    """How far it has moved would tell the sizes of the batches that dropout was drawn for."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    run = started(net, small_plan())
    before = torch.get_rng_state()
    for batch in run:
        run.step(loss_of(net), batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_drawn_anew_at_each_step() -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2))
    run = started(net, small_plan(sampling=FullBatch(), noise_multiplier=0.0), lr=0.0)
    grads = []
    for batch in run:
        run.step(loss_of(net), batch)
        grads.append(net[1].weight.grad.clone())
    assert all(not torch.equal(a, b) for a, b in pairwise(grads))


def test_the_guarantee_names_what_it_rests_on() -> None:
    net = model()
    plan = small_plan()
    run = hg.train(
        net, torch.optim.SGD(net.parameters(), lr=0.1), data(), plan=plan, rng=Rng.from_os()
    )
    for batch in run:
        run.step(loss_of(net), batch)
    text = str(run.guarantee)
    for words in (
        "(2.2248, 0.0001)-DP",
        "add/remove one record",
        "Poisson sampling, q = 0.1",
        "PLD accountant",
        "10 of 10 planned steps",
        "independence of records: tested",
    ):
        assert words in text
    assert run.guarantee.epsilon == plan.epsilon
    assert "1 / records" not in text


def test_the_guarantee_says_that_delta_is_too_large() -> None:
    with pytest.warns(UserWarning, match="delta below 1 / records = 0.01, got 0.01"):
        lax = hg.plan(records=100, batch=10, epochs=1, noise_multiplier=1.0, delta=0.01)
    assert "below 1 / records" in str(Guarantee(lax, 0, reproducible=False))


@pytest.mark.parametrize("sampling", [Poisson(0.1), FullBatch(), Poisson(0.02)], ids=str)
def test_the_batches_are_those_that_the_accounted_scheme_draws(sampling) -> None:
    plan = small_plan(sampling=sampling)
    x, _ = data()
    run = started(model(), plan)
    own = run._memory.sampling
    for step, batch in enumerate(run._batches(range(len(run)))):
        assert torch.equal(batch[0], x[plan.sampling.draw(RECORDS, step=step, rng=own)])
    assert plan.event(1) == dp_accounting.SelfComposedDpEvent(
        sampling.amplify(dp_accounting.GaussianDpEvent(1.0), num_records=RECORDS), 1
    )


def test_two_runs_from_one_key_do_not_share_their_draws() -> None:
    rng, drawn = Rng.from_os(), []
    for _ in range(2):
        net = model()
        run = hg.train(
            net, torch.optim.SGD(net.parameters(), lr=0.1), data(), plan=small_plan(), rng=rng
        )
        drawn.append([batch[0] for batch in run._batches(range(len(run)))])
    assert any(len(a) != len(b) or not torch.equal(a, b) for a, b in zip(*drawn, strict=True))


def test_a_run_ends_with_its_plan_and_goes_on_where_it_stopped() -> None:
    net = model()
    run = started(net, small_plan())
    for i, batch in enumerate(run):
        run.step(loss_of(net), batch)
        if i == 3:
            break
    assert run.guarantee.epsilon == math.inf  # by its seed
    assert run.guarantee.plan.epsilon == small_plan().epsilon
    rest = 0
    for batch in run:
        run.step(loss_of(net), batch)
        rest += 1
    assert (rest, run.steps_taken, list(run)) == (6, 10, [])


def test_a_batch_is_good_for_one_step() -> None:
    net = model()
    run = started(net, small_plan())
    with pytest.raises(Refused, match="that the run has drawn"):
        run.step(loss_of(net), data())
    batch = next(iter(run))
    with pytest.raises(Refused, match="all its records"):
        run.step(loss_of(net), tuple(x[1:] for x in batch))
    run.step(loss_of(net), batch)
    with pytest.raises(Refused, match="no step has used"):
        run.step(loss_of(net), batch)


def test_unfreezing_needs_another_run() -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    run = started(net, small_plan())
    batches = iter(run)
    run.step(loss_of(net), next(batches))
    net[0].weight.requires_grad_(True)
    with pytest.raises(Refused, match=r"changes in 0\.weight; start another run"):
        run.step(loss_of(net), next(batches))


@pytest.mark.parametrize(
    ("sampling", "relation"),
    [
        (Poisson(0.1), Relation.ADD_REMOVE),
        (FullBatch(), Relation.REPLACE_ONE),
        (Shuffled(40), Relation.REPLACE_ONE),
    ],
)
def test_every_scheme_runs(sampling, relation: Relation) -> None:
    net = model()
    run = started(net, small_plan(sampling=sampling, relation=relation))
    sizes = []
    for batch in run:
        run.step(loss_of(net), batch)
        sizes.append(len(batch[0]))
    assert len(sizes) == 10
    assert run.guarantee.plan.epsilon < math.inf


def test_batches_of_one_size_by_the_accountant_that_covers_them() -> None:
    options = {"sampling": WithoutReplacement(40), "relation": Relation.REPLACE_ONE}
    with pytest.raises(Refused, match="rdp"):
        _ = small_plan(**options).epsilon
    plan = small_plan(**options, accountant=hg.accounting.RDP)
    net = model()
    run = started(net, plan)
    assert [len(batch[0]) for batch in run._batches(range(10))] == [40] * 10
    assert "RDP accountant" in str(run.guarantee)


def test_a_loader_of_ones_own_is_named_in_the_guarantee() -> None:
    loader = DataLoader(TensorDataset(*data()), batch_size=40, shuffle=True)
    plan = small_plan(sampling=Stated(loader, Shuffled(40)), relation=Relation.REPLACE_ONE)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="data=None with a Stated sampling"):
        hg.train(net, optimizer, data(), plan=plan, rng=Rng.fixed(0))
    run = hg.train(net, optimizer, None, plan=plan, rng=Rng.fixed(0))
    for batch in run:
        run.step(loss_of(net), tuple(batch))
    assert run.steps_taken == 10
    assert "as stated by the user" in str(run.guarantee)


def test_two_loops_over_a_run_do_not_draw_a_batch_twice_or_go_past_the_plan() -> None:
    net = model()
    run = started(net, small_plan())
    outer = iter(run)
    run.step(loss_of(net), next(outer))
    run.step(loss_of(net), next(iter(run)))
    with pytest.raises(Refused, match="one loop over the run at a time"):
        next(outer)
    outer = iter(run)
    next(outer)
    for batch in run:
        run.step(loss_of(net), batch)
    assert list(outer) == []
    assert run.steps_taken == run.plan.steps - 1


def test_a_loop_ends_where_its_run_is_finished() -> None:
    net = model()
    run = started(net, small_plan())
    for batch in run:
        run.step(loss_of(net), batch)
        if run.steps_taken == 3:
            run.finish()
    assert run.steps_taken == 3


def test_a_run_cannot_be_set_back_without_its_folder() -> None:
    """Steps that are taken again are charged only by `train(…, resume=True)`."""
    assert not hasattr(started(model(), small_plan()), "load")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_data_of_any_precision_are_trained_on(dtype: torch.dtype) -> None:
    net, (x, y) = model().to(dtype), data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = hg.train(net, optimizer, (x.to(dtype), y), plan=small_plan(), rng=Rng.fixed(0))
    run.step(loss_of(net), next(iter(run)))
    assert run.steps_taken == 1


def test_dropout_follows_from_more_than_32_bits_of_the_key() -> None:
    """What torch takes of a seed can be tried out, and masks by position must stay secret."""

    class Halved(Rng):
        """The same first word as another key, which alone would be the seed."""

        def words(self, count: int, *, start: int = 0):
            found = super().words(count, start=start).copy()
            if start == 0:
                found[:1] = 7
            return found

    drawn = []
    for key in (b"a" * 32, b"b" * 32, b"a" * 32):
        with own_randomness(Halved(key, reproducible=True)):
            drawn.append(torch.rand(2000))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    for values in drawn[:2]:
        assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-3


def test_a_step_that_fails_is_left_out_and_the_run_still_ends(tmp_path) -> None:
    net = model()
    run = hg.train(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        data(),
        plan=small_plan(),
        rng=Rng.from_os(),
        folder=tmp_path,
    )

    def broken(batch: object) -> Tensor:
        raise RuntimeError("no such thing")

    for i, batch in enumerate(run):
        if i == 3:
            with pytest.raises(RuntimeError, match="no such thing"):
                run.step(broken, batch)
        else:
            run.step(loss_of(net), batch)
        if i == 5:
            run.save()
            assert (run.state()["step"], run.state()["taken"]) == (6, 5)
    assert run.steps_taken == 9
    assert not (tmp_path / "key").exists()
    assert run.guarantee.epsilon == run.plan.epsilon


def test_arguments_of_a_wrong_kind_are_named() -> None:
    """In a process of its own: here the tests' own checks of types would come first."""
    program = """
import torch, hushgrad as hg
net = torch.nn.Linear(2, 2)
plan = hg.plan(records=100, batch=10, epochs=1, delta=1e-5, noise_multiplier=1.0)
good = dict(plan=plan, rng=hg.Rng.fixed(0))
for changes in (dict(rng=3), dict(plan={}), dict(budget="people")):
    try:
        hg.train(net, torch.optim.SGD(net.parameters(), lr=1.0), torch.ones(9, 2), **good | changes)
    except ValueError as error:
        print(error)
try:
    hg.plan(records=100, batch=10, epochs=1, delta=1e-5, noise_multiplier=1.0, clip="abadi")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "expected rng to be a Rng, got a int; pass Rng.from_os()",
        "expected plan to be a Plan, got a dict; pass hg.plan(…)",
        'expected budget to be a Budget, got a str; pass hg.Ledger("ledger.sqlite").budget("name")',
        "expected a clipping rule, got 'abadi'; pass one such as hg.automatic() or hg.abadi(1.0)",
    ], done.stderr
