"""The course of a run: its draws, its batches, its guarantee, and its end."""

from __future__ import annotations

import math
from itertools import pairwise

import dp_accounting
import pytest
import torch
from scipy import stats
from small_runs import RECORDS, data, loss_of, model, small_plan, started
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hushgrad as hg
from hushgrad import Refused, Relation, Rng
from hushgrad.run.guarantee import Guarantee
from hushgrad.run.randomness import own_randomness
from hushgrad.sampling import FullBatch, Poisson, Shuffled, Stated, WithoutReplacement


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
