"""A private evaluation: its noise, its bound on a record, its public divisor, its charge."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from hushgrad.accounting import GDP, PLD, RDP, gaussian
from hushgrad.ledger import Ledger, renyi
from hushgrad.noise import Noise, release
from hushgrad.rng import Rng
from hushgrad.run.evaluation import Evaluation, evaluate
from hushgrad.types import Bounded, Refused, Relation, Released

DATA = torch.linspace(0, 1, 1000, dtype=torch.float64)


def itself(batch: Tensor) -> Tensor:
    return batch


def evaluated(
    values: dict[str, Callable[[Tensor], Tensor]] | None = None,
    data: Tensor = DATA,
    *,
    noise_multiplier: float = 0.0,
    records: int = 1000,
) -> Evaluation:
    return evaluate(
        values or {"x": itself},
        data,
        records=records,
        noise_multiplier=noise_multiplier,
        delta=1e-5,
        rng=Rng.from_os(),
        accountant=RDP,  # quicker than PLD
    )


def test_an_average_is_that_of_the_values() -> None:
    found = evaluated({"x": itself, "high": lambda b: b > 0.75})
    assert found.values == pytest.approx({"x": 0.5, "high": 0.25}, abs=1e-6)


@pytest.mark.parametrize("k", [1, 3])
def test_noise_has_the_scale_that_is_stated(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The sums are tested below; here they are the same each time, to be quick.
    total = torch.full((k,), 5 * 2**20)
    monkeypatch.setattr("hushgrad.run.evaluation.RecordValueSums._sums", (total, 0.0))
    sigma, records = 2.0, 500
    functions = {str(n): itself for n in range(k)}
    sample, error = [], 0.0
    for _ in range(1800 // k):
        found = evaluated(functions, DATA[:8], noise_multiplier=sigma, records=records)
        sample += [value - 5 / records for value in found.values.values()]
        error = found.standard_error
    assert error == pytest.approx(sigma * math.sqrt(k) / records, rel=1e-12)

    def fits(scale: float) -> bool:
        return bool(stats.kstest(np.array(sample), stats.norm(scale=scale).cdf).pvalue > 1e-3)

    assert fits(error)
    assert not fits(error * 2 / 3)
    assert not fits(error * 3 / 2)


@pytest.mark.parametrize("loud", [math.nan, math.inf, -math.inf, 1e30, -5.0, 1.0, 0.0])
def test_no_record_moves_a_sum_by_more_than_one(loud: float) -> None:
    quiet = DATA.clone()
    quiet[3] = loud
    with_it = evaluated(data=quiet).values["x"] * 1000
    without = evaluated(data=torch.cat([quiet[:3], quiet[4:]])).values["x"] * 1000
    assert with_it - without == pytest.approx(1.0 if loud >= 1 else 0.0, abs=1e-6)


def test_sums_are_exact_whatever_the_order() -> None:
    data = torch.rand(5000, dtype=torch.float64)
    found = [evaluated(data=d) for d in (data, data.flip(0), data.sort()[0])]
    assert len({round(f.values["x"] * 1000 * 2**20) for f in found}) == 1


def test_the_divisor_is_the_public_number() -> None:
    assert evaluated(data=DATA[:500], records=2000).values["x"] == pytest.approx(
        float(DATA[:500].sum()) / 2000, abs=1e-6
    )


@pytest.mark.parametrize("k", [1, 3])
def test_replacing_a_record_costs_no_more_noise_than_removing_it(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values from 0 to 1 move a sum by 1 when replaced, and not by 2."""
    seen: list[Bounded] = []

    def released(bounded: Bounded, noise: Noise, **settings: Any) -> Released:
        seen.append(bounded)
        return release(bounded, noise, **settings)

    monkeypatch.setattr("hushgrad.run.step.release", released)
    values = {str(n): itself for n in range(k)}

    def asked(data: Tensor, relation: Relation) -> Evaluation:
        settings = {"records": 10**6, "epsilon": 1.0, "delta": 1e-5, "rng": Rng.from_os()}
        return evaluate(values, data, relation=relation, accountant=RDP, **settings)

    removed = asked(DATA, Relation.ADD_REMOVE)
    found = [asked(torch.cat([DATA, torch.tensor([x])]), Relation.REPLACE_ONE) for x in (0.0, 1.0)]
    assert found[0].standard_error == pytest.approx(removed.standard_error, rel=2e-3)
    low, high = (bounded.sum["values"] for bounded in seen[1:])
    most = seen[1].sensitivity(Relation.REPLACE_ONE)
    assert float((high - low).norm()) == pytest.approx(most, rel=1e-12)
    assert float((high - low).norm()) <= most
    for one in found:  # what was taken off is added again, whatever `records` is
        assert 1e6 * one.values["0"] == pytest.approx(500.5, abs=8e6 * one.standard_error + 1)


@pytest.mark.parametrize("relation", list(Relation))
def test_the_cost_is_that_of_one_gaussian_release(relation: Relation) -> None:
    found = evaluate(
        {"x": itself},
        DATA,
        records=1000,
        noise_multiplier=2.0,
        delta=1e-5,
        rng=Rng.from_os(),
        relation=relation,
    )
    assert found.epsilon == PLD.epsilon(gaussian(2.0), delta=1e-5, relation=relation)


def test_noise_is_found_for_an_epsilon() -> None:
    found = evaluate({"x": itself}, DATA, records=1000, epsilon=1.0, delta=1e-5, rng=Rng.from_os())
    assert 0.99 < found.epsilon <= 1.0
    assert found.standard_error == pytest.approx(3.73e-3, rel=0.01)
    assert abs(found.values["x"] - 0.5) < 8 * found.standard_error


def test_two_evaluations_have_noise_of_their_own() -> None:
    rng = Rng.from_os()
    first, second = (
        evaluate({"x": itself}, DATA, records=1000, noise_multiplier=1.0, delta=1e-5, rng=rng)
        for _ in range(2)
    )
    assert first.values != second.values


def test_a_known_seed_is_not_private(tmp_path: Path) -> None:
    options = {"records": 1000, "noise_multiplier": 1.0, "delta": 1e-5, "rng": Rng.fixed(0)}
    assert evaluate({"x": itself}, DATA, **options).epsilon == math.inf
    budget = Ledger(tmp_path / "ledger.sqlite").set_budget("held-out", epsilon=9, delta=1e-4)
    with pytest.raises(Refused, match="secret key with a budget"):
        evaluate({"x": itself}, DATA, **options, budget=budget)
    assert budget.account.rows == ()


def test_a_model_is_evaluated_without_a_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval()
    x, y = torch.randn(70, 4), torch.randint(0, 3, (70,))
    state = torch.get_rng_state()
    found = evaluate(
        {"accuracy": lambda b: model(b[0]).argmax(1) == b[1]},
        (x, y),
        records=70,
        noise_multiplier=0.0,
        delta=1e-5,
        rng=Rng.from_os(),
        modules=(model,),
        chunk=32,
    )
    expected = float((model(x).argmax(1) == y).double().mean())
    assert found.values["accuracy"] == pytest.approx(expected, abs=1e-5)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


# --- charges ---


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


def test_the_release_is_charged_before_it_is_made(ledger: Ledger) -> None:
    budget = ledger.set_budget("held-out", epsilon=2.5, delta=3e-5)
    options = {"records": 1000, "epsilon": 1.0, "delta": 1e-5, "rng": Rng.from_os()}
    for expected in (1, 2):
        found = evaluate({"x": itself}, DATA, **options, budget=budget)
        account = budget.account
        assert len(account.rows) == expected
        assert all(row.settled and row.position == 1 for row in account.rows)
    assert budget.spent["epsilon"] == pytest.approx(2 * found.epsilon)
    calls = []
    with pytest.raises(Refused, match="plan for what is left"):
        evaluate({"x": lambda b: calls.append(b) or b}, DATA, **options, budget=budget)
    assert calls == []


def test_the_charge_is_durable_while_the_noise_is_made(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = ledger.set_budget("held-out", epsilon=2.5, delta=3e-5)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hushgrad.run.step.release", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(
            {"x": itself},
            DATA,
            records=1000,
            epsilon=1.0,
            delta=1e-5,
            rng=Rng.from_os(),
            budget=budget,
        )
    (row,) = Ledger(ledger.path).budget("held-out").account.rows
    assert (row.position, row.settled) == (1, None)
    assert budget.spent["epsilon"] > 0.99


def test_a_renyi_budget_is_charged_the_one_release(ledger: Ledger) -> None:
    budget = ledger.set_budget("held-out", epsilon=2.5, delta=3e-5, rule=renyi(8.0))
    evaluate(
        {"x": itself},
        DATA,
        records=1000,
        noise_multiplier=4.0,
        delta=1e-5,
        rng=Rng.from_os(),
        budget=budget,
    )
    assert budget.spent["rdp"] == pytest.approx(8 / 32)


def test_an_evaluation_that_fails_before_its_release_costs_nothing(ledger: Ledger) -> None:
    budget = ledger.set_budget("held-out", epsilon=2.5, delta=3e-5)
    options = {"records": 1000, "epsilon": 1.0, "delta": 1e-5, "rng": Rng.from_os()}
    for bad, said in [
        (lambda b: b[:1], "one value for each"),
        (lambda b: b - b.mean(), "depends on its own record alone"),
    ]:
        with pytest.raises(Refused, match=said):
            evaluate({"x": bad}, DATA, **options, budget=budget)
    assert set(budget.spent.values()) == {0.0}


# --- bad input ---


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"noise_multiplier": None}, "got neither"),
        ({"epsilon": 1.0}, "got both"),
        ({"records": 0}, "records >= 1"),
        ({"chunk": 0}, "chunk >= 1"),
        ({"delta": 0.0}, "0 < delta < 1"),
        ({"noise_multiplier": -1.0}, "noise multiplier >= 0"),
    ],
)
def test_bad_input_is_an_error(change: dict[str, object], said: str) -> None:
    options = {"records": 1000, "noise_multiplier": 1.0, "delta": 1e-5, "rng": Rng.from_os()}
    with pytest.raises(ValueError, match=said):
        evaluate({"x": itself}, DATA, **(options | change))  # type: ignore[arg-type]


def test_nothing_to_average_is_an_error() -> None:
    with pytest.raises(ValueError, match="got none"):
        evaluate({}, DATA, records=10, noise_multiplier=1.0, delta=1e-5, rng=Rng.from_os())


def test_an_accountant_that_only_approximates_is_refused() -> None:
    options = {"records": 1000, "noise_multiplier": 1.0, "delta": 1e-5, "rng": Rng.from_os()}
    with pytest.raises(Refused, match="proves its figures, got gdp"):
        evaluate({"x": itself}, DATA, **options, accountant=GDP)
