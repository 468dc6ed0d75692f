"""The quick search for noise: what it returns was confirmed, and it seldom asks often."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dp_accounting import DpEvent, LaplaceDpEvent

from hushgrad import Relation
from hushgrad.accounting import PLD, RDP, Accountant, Target, Training, least_noise
from hushgrad.accounting.aiming import NoiseSearch, aim_noise
from hushgrad.accounting.closed_forms import gaussian_noise_multiplier
from hushgrad.accounting.events import gaussian


def run(batch: int, steps: int) -> Callable[[float], DpEvent]:
    return lambda z: Training(50_000, batch=batch, noise_multiplier=z, steps=steps).event


def question(
    event_of: Callable[[float], DpEvent], epsilon: float, accountant: Accountant
) -> NoiseSearch:
    return NoiseSearch(event_of, accountant, 1e-5, Relation.ADD_REMOVE, 0.999 * epsilon, epsilon)


@pytest.mark.parametrize("accountant", [PLD, RDP])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
@pytest.mark.parametrize(("batch", "steps"), [(50, 1000), (1000, 1), (1000, 5000), (50_000, 20)])
def test_what_is_found_keeps_the_target_and_few_figures_are_asked(
    monkeypatch: pytest.MonkeyPatch, batch: int, steps: int, epsilon: float, accountant: Accountant
) -> None:
    asked = []
    kind, spend = type(accountant), type(accountant).epsilon

    def counted(self: Accountant, event: DpEvent, **rest: object) -> float:
        asked.append(self == accountant)
        return spend(self, event, **rest)

    monkeypatch.setattr(kind, "epsilon", counted)
    found = aim_noise(question(run(batch, steps), epsilon, accountant))
    exact = sum(asked)
    if found is None:  # a slower search then has to
        found = least_noise(run(batch, steps), Target(epsilon, 1e-5, accountant=accountant))
    else:
        assert exact <= (3 if accountant is PLD else 6)
        assert len(asked) <= 8
    z, claimed = found
    monkeypatch.undo()
    spent = accountant.epsilon(run(batch, steps)(z), delta=1e-5)
    assert claimed == spent
    assert 0.998 * epsilon <= spent <= epsilon


def test_the_usual_run_is_aimed_at() -> None:
    assert aim_noise(question(run(1000, 5000), 3.0, PLD)) is not None


def test_one_release_gets_the_closed_form() -> None:
    z, _ = least_noise(lambda z: gaussian(z), Target(1.0, 1e-5))
    assert z == pytest.approx(gaussian_noise_multiplier(1.0, delta=1e-5), rel=2e-3)


def test_where_the_central_limit_says_nothing_nothing_is_aimed_at() -> None:
    assert aim_noise(question(lambda z: LaplaceDpEvent(z), 1.0, PLD)) is None


def test_a_target_that_no_noise_meets_ends() -> None:
    assert aim_noise(question(lambda _: gaussian(1.0), 0.1, PLD)) is None
