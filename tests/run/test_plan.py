"""A plan: its epsilon, its event, and what makes no sense."""

from __future__ import annotations

import dp_accounting
import pytest
from small_runs import small_plan

import hushgrad as hg
from hushgrad import Relation
from hushgrad.sampling import Poisson, Shuffled


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
