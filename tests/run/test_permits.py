"""What is released is what is accounted for: an algorithm that does otherwise is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dp_accounting import GaussianDpEvent
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import Refused, Relation, Rng
from hushgrad.accounting import RDP
from hushgrad.algorithms import Agd, FedAvg, LocalGd, PerDistance, Sgd, SpiderBoost, Srm, noisy_min
from hushgrad.algorithms.algorithm import StepPlan
from hushgrad.clipping.rules import Clip, abadi
from hushgrad.noise import Independent, Noise, gaussian, laplace
from hushgrad.run.permit import ZcdpLimit
from hushgrad.run.query import ClippedSum, Summand, answerable
from hushgrad.run.step import StepContext
from hushgrad.sampling import FullBatch
from hushgrad.testing import check_algorithm
from hushgrad.types import Bounded

State = dict[str, Any]


def ask(context: StepContext, factor: float = 1.0) -> ClippedSum:
    return ClippedSum(lambda here: [Summand(here, context.clip, factor)])


@dataclass(frozen=True)
class Planted:
    """An algorithm whose step is a function."""

    act: Any

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        return self.act(context), state


def less_noise(context: StepContext) -> dict[str, Tensor]:
    noise = gaussian(0.9 * context.noise.noise_multiplier)
    return context.mean(context.release(ask(context), noise=noise))


def noise_of_its_own_scale(context: StepContext) -> dict[str, Tensor]:
    """Its multiplier is right, and what it applies is not."""
    noise = replace(context.noise, scale=lambda bounded: 0.9 * bounded.l2)
    return context.mean(context.release(ask(context), noise=noise))


def another_kind(context: StepContext) -> dict[str, Tensor]:
    return context.mean(context.release(ask(context), noise=laplace(50.0)))


def two_releases(context: StepContext) -> dict[str, Tensor]:
    context.release(ask(context))
    return context.mean(context.release(ask(context)))


def another_batch(context: StepContext) -> dict[str, Tensor]:
    x, y = context.batch_pass.batch
    other = replace(context.batch_pass, batch=(x[:2].clone(), y[:2].clone()))
    return context.mean(replace(context, work=other).release(ask(context)))


def a_sum_of_its_own(context: StepContext) -> dict[str, Tensor]:
    total = ask(context).bounded(context.work)
    return context.mean(context.release(Bounded(total.sum, 0.1 * total.l2)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Optimistic:
    """A query whose bound nobody has proved."""

    inner: ClippedSum
    of_each_record = False

    def bounded(self, work: Any) -> Bounded:
        return replace(self.inner.bounded(work), l2=0.1)

    def event(self, noise_multiplier: float) -> Any:
        return GaussianDpEvent(noise_multiplier)


def a_query_of_its_own(context: StepContext) -> dict[str, Tensor]:
    return context.mean(context.release(Optimistic(ask(context))))


class Lenient(Clip):
    """A rule that states less than it keeps."""

    def bound(self, groups: int) -> float:
        return 0.1 * super().bound(groups)


def a_rule_of_its_own(context: StepContext) -> dict[str, Tensor]:
    plain = abadi(1.0)
    rule = Lenient(plain.name, plain.weigh, plain.clip_norm, plain.keeps, plain.mapped)
    return context.mean(context.release(ClippedSum(lambda here: [Summand(here, rule)])))


def nothing_released(context: StepContext) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in context.params.items()}


def past_the_noise(context: StepContext) -> dict[str, Tensor]:
    """The released values, and beside them the sum that they were made of."""
    released = context.mean(context.release(ask(context)))
    private = ask(context).bounded(context.work).sum
    return {name: x + 1e-3 * private[name] for name, x in released.items()}


PLANTED = {
    less_noise: "expected noise of at least",
    noise_of_its_own_scale: "expected noise of at least",
    another_kind: "expected gaussian noise",
    two_releases: "at most 1 release at step",
    another_batch: "the batch that was drawn for the step",
    a_query_of_its_own: "computes its own bound, got Optimistic",
    a_rule_of_its_own: "expected a clipping rule, got a Lenient",
    nothing_released: "expected an estimate made from context.release",
}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(3, 2)


def loss_of(net: nn.Module) -> Any:
    return lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none")


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(40, 3), torch.randint(2, (40,))


def run_of(algorithm: Any, **options: Any) -> tuple[hg.Run, nn.Module]:
    usual = {"records": 40, "batch": 20, "epochs": 2, "delta": 1e-3, "noise_multiplier": 1.0}
    plan = hg.plan(**(usual | options), algorithm=algorithm)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return hg.train(net, optimizer, data(), plan=plan, rng=Rng.fixed(0)), net


@pytest.mark.parametrize("act", PLANTED, ids=lambda act: act.__name__)
def test_a_planted_mistake_is_refused_before_it_is_released(act, monkeypatch) -> None:
    released = []
    real = hg.run.step.release  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "hushgrad.run.step.release",
        lambda bounded, noise, **labels: released.append(1) or real(bounded, noise, **labels),
    )
    run, net = run_of(Planted(act))
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(Refused, match=PLANTED[act]):
        run.step(loss_of(net), next(iter(run)))
    assert all(torch.equal(x, p) for x, p in zip(before, net.parameters(), strict=True))
    assert len(released) == (act is two_releases)


def test_a_sum_is_no_query() -> None:
    run, net = run_of(Planted(a_sum_of_its_own))
    with pytest.raises(Exception, match=r"got Bounded|query"):  # the tests' types are checked too
        run.step(loss_of(net), next(iter(run)))


@pytest.mark.parametrize("act", [*PLANTED, past_the_noise], ids=lambda act: act.__name__)
def test_the_contract_names_a_planted_mistake(act) -> None:
    message = PLANTED.get(act, "the estimate of step 0 to depend on the records by its releases")
    with pytest.raises(AssertionError, match=message):
        check_algorithm(Planted(act))


@dataclass(frozen=True)
class TwoSums:
    """Two releases at each step, which its plan foresees."""

    def stage(self, step: int, conditions: Any) -> StepPlan:
        return StepPlan(conditions.sampling, answers=2)

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        one, other = (context.mean(context.release(ask(context))) for _ in range(2))
        return {name: (x + other[name]) / 2 for name, x in one.items()}, state


FULL = {"sampling": FullBatch(), "batch": 24}
KEPT: list[tuple[Any, dict[str, Any]]] = [
    (Sgd(), {}),
    (Sgd(noisy_min(0.3)), FULL),
    (Srm(0.2, abadi(0.1), first_batch=16), {}),
    (SpiderBoost(3, PerDistance(1.0)), {}),
    (LocalGd(), FULL | {"relation": Relation.REPLACE_ONE}),
    (LocalGd(pure=True), FULL | {"relation": Relation.REPLACE_ONE}),
    (Agd(3.0, splits=4, choices=5), FULL | {"accountant": RDP}),
    (TwoSums(), {}),
]


@pytest.mark.parametrize(("algorithm", "options"), KEPT, ids=lambda x: repr(x)[:40])
def test_the_contract_holds_for_our_own(algorithm, options: dict[str, Any]) -> None:
    check_algorithm(algorithm, **options)


def test_two_sums_of_one_batch_cost_more_than_one_and_are_noised_apart(monkeypatch) -> None:
    one = hg.plan(records=40, batch=20, epochs=2, delta=1e-3, noise_multiplier=1.0)
    two = replace(one, algorithm=TwoSums())
    assert two.epsilon == pytest.approx(replace(one, noise_multiplier=2**-0.5).epsilon)
    assert two.epsilon > one.epsilon
    found = []
    real = hg.run.step.release  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "hushgrad.run.step.release",
        lambda *given, **labels: found.append(real(*given, **labels)) or found[-1],
    )
    run, net = run_of(TwoSums())
    run.step(loss_of(net), next(iter(run)))
    first, second = (released.values["weight"] for released in found)
    assert not torch.equal(first, second)


def test_a_step_of_which_a_limit_pays_is_refused_beyond_it() -> None:
    @dataclass(frozen=True)
    class Greedy:
        carries_metrics = False

        def stage(self, step: int, conditions: Any) -> StepPlan:
            return StepPlan(conditions.sampling)

        def limit(self, noise_multiplier: float, conditions: Any) -> ZcdpLimit:
            return ZcdpLimit(0.5, conditions.relation)

        def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
            assert context.affords(GaussianDpEvent(1.0)) is (context.step == 0)
            return context.mean(context.release(ask(context), noise=gaussian(1.0))), state

    run, net = run_of(Greedy(), batch=40, sampling=FullBatch(), accountant=RDP)
    batches = iter(run)
    run.step(loss_of(net), next(batches))
    with pytest.raises(Refused, match="what the limit has left"):
        run.step(loss_of(net), next(batches))


@pytest.mark.parametrize("planned", [0.1, 1.0, 10.0])
def test_what_a_limit_pays_is_what_is_applied(planned: float) -> None:
    @dataclass(frozen=True)
    class Flattering:
        """Its noise says another multiplier than it applies."""

        carries_metrics = False

        def limit(self, noise_multiplier: float, conditions: Any) -> ZcdpLimit:
            return ZcdpLimit(0.5, conditions.relation)

        def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
            noise = replace(gaussian(4.0), scale=lambda bounded: bounded.l2)
            return context.mean(context.release(ask(context), noise=noise)), state

    options = {"batch": 40, "sampling": FullBatch(), "accountant": RDP}
    run, net = run_of(Flattering(), **options, noise_multiplier=planned)
    with pytest.raises(Refused, match="expected noise of at least"):
        run.step(loss_of(net), next(iter(run)))


def test_a_query_can_be_added_by_whoever_proves_its_bound() -> None:
    @answerable
    @dataclass(frozen=True)
    class Count:
        """How many records the batch has: one record moves it by 1."""

        of_each_record = False

        def bounded(self, work: Any) -> Bounded:
            x, _ = work.batch
            return Bounded({"count": torch.tensor([float(len(x))])}, l2=1.0)

        def event(self, noise_multiplier: float) -> Any:
            return GaussianDpEvent(noise_multiplier)

    @dataclass(frozen=True)
    class Counting:
        def stage(self, step: int, conditions: Any) -> StepPlan:
            return StepPlan(conditions.sampling, query=Count)

        def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
            number = context.release(Count()).values["count"]
            return {n: number * torch.ones_like(p) for n, p in context.params.items()}, state

    check_algorithm(Counting(), metrics=None)


def test_an_empty_batch_is_released_as_any_other() -> None:
    run, net = run_of(Sgd(), records=40, batch=1, epochs=1 / 40, sampling=hg.sampling.Poisson(1e-6))
    (batch,) = list(run)
    assert len(batch[0]) == 0
    run, net = run_of(FedAvg(0.1), batch=1, epochs=1 / 40, sampling=hg.sampling.Poisson(1e-6))
    run.step(lambda b: loss_of(net)(b), next(iter(run)))
    assert run.steps_taken == 1


@dataclass(frozen=True)
class Wavering:
    """Its third step has half of the noise, which its `repeats` denies."""

    repeats = (0, 1)

    def stage(self, step: int, conditions: Any) -> StepPlan:
        return StepPlan(conditions.sampling, noise=0.5 if step == 2 else 1.0)

    def step(self, context: StepContext, state: State) -> tuple[dict[str, Tensor], State]:
        return context.mean(context.release(ask(context))), state


def test_a_step_gets_the_noise_that_its_run_is_charged_for() -> None:
    plain = hg.plan(records=40, batch=20, epochs=2, delta=1e-3, noise_multiplier=1.0)
    plan = replace(plain, algorithm=Wavering())
    assert plan.event(4) == plain.event(4)
    assert {plan.noise_at(step).noise_multiplier for step in range(4)} == {1.0}
    with pytest.raises(AssertionError, match="leave `repeats` out"):
        check_algorithm(Wavering())


def flattering(noise_multiplier: float) -> Noise:
    """1 % less noise than the accountant is told of."""
    return replace(gaussian(noise_multiplier), scale=gaussian(0.99 * noise_multiplier).scale)


def test_a_kind_of_noise_that_applies_less_than_its_event_states_is_refused() -> None:
    run, net = run_of(Sgd(), noise=Independent(flattering))
    with pytest.raises(Refused, match="expected noise of at least"):
        run.step(loss_of(net), next(iter(run)))
