"""The estimators: scikit-learn's conventions, their guarantee, and what the accountant is told."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from made_tables import table
from scipy import sparse, stats
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

import hushgrad as hg
from hushgrad import clipping
from hushgrad.accounting import PLD
from hushgrad.accounting.closed_forms import gaussian_epsilon
from hushgrad.algorithms.sgd import rrpsgd
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.glm import (
    PrivateLinearRegression,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    PrivatePoissonRegressor,
    losses,
)
from hushgrad.glm.defaults import Public, descent_settings
from hushgrad.glm.descent import Descent, descend
from hushgrad.glm.exact import EXACT
from hushgrad.glm.rows import scaled_rows
from hushgrad.run.plan import Plan
from hushgrad.sampling import FullBatch, Poisson
from hushgrad.types import Refused, Relation

CLASSIFIERS = [PrivateLogisticRegression, PrivateLinearSVC]
ALGORITHMS = ["sgd", "gd", "objective", "output"]

# They need a seed, with which a fit is not private, and little noise, for they score models of 20
# to 300 records. One that privacy does not allow is named: Poisson regression's score on 200
# records, whose noise is scaled by the largest count that can be. They also pass arguments of wrong
# types on purpose, so they run where the types of calls are not checked.
CHECKS = """
import json, warnings
warnings.simplefilter("ignore")
from sklearn.utils.estimator_checks import check_estimator
from hushgrad import glm
model = glm.{model}(epsilon=50.0, algorithm="gd", steps=60, rng=0, feature_norm=10.0{more})
found = check_estimator(model, on_fail=None, expected_failed_checks={known})
print(json.dumps([[one["check_name"], one["status"], repr(one["exception"])] for one in found]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("PrivateLogisticRegression", ""),
        ("PrivateLinearSVC", ""),
        ("PrivateLinearRegression", ", target_bound=4.0"),
        ("PrivatePoissonRegressor", ", target_bound=10.0"),
    ],
)
def test_scikit_learns_own_checks_pass(model: str, more: str) -> None:
    known = {}
    if model == "PrivatePoissonRegressor":
        known = {"check_regressors_train": "a score that the noise on 200 counts does not allow"}
    program = CHECKS.format(model=model, more=more, known=known)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one for one in found if one[1] == "failed"] == []
    assert sum(status == "passed" for _, status, _ in found) > 40


@pytest.mark.parametrize("model", CLASSIFIERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("classes", [2, 3])
def test_a_classifier_learns(model, algorithm: str, classes: int) -> None:
    x, y = table(classes=classes)
    names = np.array(["a", "b", "c"])[:classes]
    fitted = model(epsilon=4.0, algorithm=algorithm, records=3000, classes=names, rng=1)
    if model is PrivateLinearSVC and classes == 3 and algorithm in ("objective", "output"):
        with pytest.raises(ValueError, match="bounded slope and curvature"):
            fitted.fit(x, names[y])
        return
    fitted.fit(x, names[y])
    assert fitted.score(x, names[y]) > (0.9 if classes == 2 else 0.8)
    assert fitted.coef_.shape == (1 if classes == 2 else 3, 4)
    if model is PrivateLogisticRegression:
        np.testing.assert_allclose(fitted.predict_proba(x).sum(1), 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_least_squares_are_found(algorithm: str) -> None:
    x, _ = table()
    y = 5 * (x @ [1.0, -2.0, 0.0, 0.5]) + 3
    model = PrivateLinearRegression(
        epsilon=4.0, algorithm=algorithm, target_bound=15.0, records=3000, rng=0
    ).fit(x, y)
    assert model.score(x, y) > (0.5 if algorithm == "output" else 0.9)
    assert model.intercept_ == pytest.approx(3, abs=5 if algorithm == "output" else 1.5)


@pytest.mark.parametrize("algorithm", ["sgd", "gd"])
def test_counts_are_found(algorithm: str) -> None:
    x, _ = table(6000)
    y = np.random.default_rng(1).poisson(np.exp(x @ [1.0, -1.0, 0.5, 0.0] + 0.5))
    model = PrivatePoissonRegressor(
        epsilon=4.0, algorithm=algorithm, target_bound=8.0, records=6000, rng=0
    ).fit(x, y)
    np.testing.assert_allclose(model.coef_, [1.0, -1.0, 0.5, 0.0], atol=0.4)
    with pytest.raises(ValueError, match="expected algorithm 'sgd' or 'gd'"):
        model.set_params(algorithm="objective").fit(x, y)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("records", [None, 3000])
def test_the_guarantee_names_what_it_rests_on(algorithm: str, records: int | None) -> None:
    x, y = table()
    model = PrivateLogisticRegression(epsilon=1.0, algorithm=algorithm, records=records).fit(x, y)
    guarantee = model.guarantee_
    assert 0.99 <= guarantee.epsilon <= 1.0 + 1e-6 and guarantee.delta == 1e-5
    expected = Relation.REPLACE_ONE if records is None else Relation.ADD_REMOVE
    assert guarantee.relation is expected
    words = str(guarantee)
    assert ("replace one record" if records is None else "add/remove one record") in words
    assert "which labels occur" in words
    stated = PrivateLogisticRegression(algorithm="output", classes=[0, 1]).fit(x, y)
    assert "which labels occur" not in str(stated.guarantee_)
    seeded = PrivateLogisticRegression(algorithm=algorithm, records=records, rng=0, steps=20)
    seeded.fit(x, y)
    assert seeded.guarantee_.epsilon == math.inf
    assert str(seeded.guarantee_).startswith("reproducible, not private")


@pytest.mark.parametrize("algorithm", ["sgd", "gd"])
@pytest.mark.parametrize("records", [None, 2500])
def test_what_is_drawn_and_added_is_what_is_accounted(algorithm, records, monkeypatch) -> None:
    """Every release is seen: its noise, its bound, and how many there are."""
    x, y = table(2500)
    seen, drawn = [], []
    import hushgrad.run.step as module

    original, draw = module.release, Poisson.draw

    def spy(bounded, noise, **rest):
        seen.append((noise.noise_multiplier, bounded.l2))
        return original(bounded, noise, **rest)

    def spied(self, num_records, **rest):
        positions = draw(self, num_records, **rest)
        drawn.append((self.rate, len(positions)))
        return positions

    monkeypatch.setattr(module, "release", spy)
    monkeypatch.setattr(Poisson, "draw", spied)
    model = PrivateLogisticRegression(epsilon=2.0, algorithm=algorithm, records=records, batch=200)
    model.fit(x, y)
    assert len(seen) == model.n_iter_ and len(set(seen)) == 1
    sigma, l2 = seen[0]
    assert l2 == pytest.approx(math.hypot(1, 0.3) * (1 + SUM_SLACK), rel=1e-9)
    relation = Relation.REPLACE_ONE if records is None else Relation.ADD_REMOVE
    sampling = FullBatch() if algorithm == "gd" else Poisson(200 / 2500)
    event = sampling.run_event(
        hg.accounting.gaussian(sigma), num_records=2500, num_steps=model.n_iter_
    )
    told = EXACT if algorithm == "gd" else PLD
    assert told.epsilon(event, delta=1e-5, relation=relation) == model.guarantee_.epsilon
    if algorithm == "sgd":
        assert {rate for rate, _ in drawn} == {0.08}
        sizes = np.array([size for _, size in drawn])
        assert abs(sizes.mean() - 200) <= 5 * math.sqrt(184 / len(sizes))
        assert stats.chisquare(np.bincount(sizes > 200, minlength=2)).pvalue > 1e-5
    else:
        doubled = 2 if records is None else 1
        alone = gaussian_epsilon(sigma / math.sqrt(model.n_iter_) / doubled, delta=1e-5)
        assert alone == pytest.approx(model.guarantee_.epsilon)


def test_noise_on_a_step_has_its_scale() -> None:
    """One full-batch step from θ = 0: θ₁ = −η(gradient + noise)/n, and nothing else moves it."""
    rows = scaled_rows(np.eye(50), feature_norm=1.0, intercept=0.3)
    y = torch.ones(50, dtype=torch.float64)
    plan = Plan(
        records=40,  # the public number, whatever the data's
        sampling=FullBatch(),
        steps=1,
        noise_multiplier=3.0,
        delta=1e-5,
        clip=clipping.abadi(0.25),
    )
    drawn = []
    for _ in range(100):
        done = descend(
            rows,
            y,
            classes=1,
            loss=losses.logistic(),
            plan=plan,
            descent=Descent(rate=2.0, average=0.0),
            rng=hg.Rng.from_os(),
        )
        norm = math.hypot(1, 0.3)
        sums = -done.theta[0] * 40 / 2
        expected = -0.25 / norm * torch.cat([torch.ones(50), torch.tensor([50 * 0.3])]).double()
        drawn.append((sums - expected) / (3.0 * 0.25 * (1 + SUM_SLACK)))
    values = torch.cat(drawn).numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-4
    assert stats.kstest(values * 1.5, "norm").pvalue < 1e-6


def test_a_plan_that_accounts_for_something_else_is_refused() -> None:
    rows = scaled_rows(np.eye(8), feature_norm=1.0)
    plan = Plan(
        records=8,
        sampling=Poisson(0.5),
        steps=3,
        noise_multiplier=3.0,
        delta=1e-5,
        clip=clipping.abadi(1.0),
        algorithm=rrpsgd(),
    )
    with pytest.raises(Refused, match="expected a plan of DP-SGD"):
        descend(
            rows,
            torch.ones(8, dtype=torch.float64),
            classes=1,
            loss=losses.logistic(),
            plan=plan,
            descent=Descent(rate=1.0),
            rng=hg.Rng.from_os(),
        )


@pytest.mark.parametrize("clip_norm", ["auto", 0.2, clipping.automatic(), clipping.normalize(0.5)])
def test_any_rule_clips(clip_norm) -> None:
    x, y = table()
    model = PrivateLogisticRegression(epsilon=4.0, clip_norm=clip_norm, records=3000, rng=0)
    assert model.fit(x, y).score(x, y) > 0.9
    name = "abadi" if isinstance(clip_norm, str | float) else clip_norm.name.partition("(")[0]
    assert f"clipping {name}" in str(model.guarantee_)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", [sparse.csr_array, sparse.csc_matrix, sparse.coo_array])
def test_sparse_rows_are_fitted(algorithm: str, kind) -> None:
    """Their sums equal the dense ones' up to rounding; noise is keyed by bits, so it differs."""
    x, y = table()
    x[np.abs(x) < 0.3] = 0
    model = PrivateLogisticRegression(epsilon=4.0, algorithm=algorithm, records=3000, steps=80)
    assert model.fit(kind(x), y).score(kind(x), y) > 0.85


def test_a_bound_is_never_read_off_the_data() -> None:
    """Rows and targets far beyond their bounds are cut, and the fit is that of the cut ones."""
    x, y = table(500)
    model = PrivateLogisticRegression(feature_norm=1.0, rng=0, steps=20)
    near, far = clone(model).fit(2 * x, y).coef_, clone(model).fit(2.0**21 * x, y).coef_
    np.testing.assert_array_equal(near, far)
    line = PrivateLinearRegression(target_bound=1.0, rng=0, steps=20)
    far = clone(line).fit(x, np.where(y > 0, 1e9, -1e9)).coef_
    np.testing.assert_allclose(far, clone(line).fit(x, 2.0 * y - 1).coef_, rtol=1e-9)


def test_pipelines_clones_and_parameters() -> None:
    x, y = table()
    model = PrivateLogisticRegression(epsilon=4.0, records=3000, rng=hg.Rng.from_os())
    assert clone(model).get_params() == model.get_params()
    pipeline = make_pipeline(Normalizer(), model)
    assert pipeline.fit(7 * x, y).score(7 * x, y) > 0.9
    assert pipeline[-1].guarantee_.epsilon <= 4.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon > 0"),
        ({"delta": 0.0}, "0 < delta < 1"),
        ({"delta": 0.1}, "below 1 / records"),
        ({"algorithm": "adam"}, "expected an algorithm among"),
        ({"clip_norm": "median"}, "expected clip_norm"),
        ({"clip_norm": -1.0}, "clip_norm > 0"),
        ({"feature_norm": 0.0}, "feature_norm > 0"),
        ({"records": 0}, "whole number"),
        ({"classes": [0, 2]}, "only the labels stated"),
        ({"classes": [1]}, "two classes or more"),
        ({"regularization": -1.0}, "regularization >= 0"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict, message: str) -> None:
    x, y = table(100)
    with pytest.raises(ValueError, match=message):
        PrivateLogisticRegression(**changes).fit(x, y)


def test_defaults_follow_public_numbers_alone() -> None:
    public = Public(30_000, 1.0, 1e-5, Relation.ADD_REMOVE, 1, 1.04, 1.0, 0.25, 30.0)
    one = descent_settings(public, full=False)
    assert one == descent_settings(public, full=False) and one.steps > 100
    stricter = Public(30_000, 0.1, 1e-5, Relation.ADD_REMOVE, 1, 1.04, 1.0, 0.25, 30.0)
    assert descent_settings(stricter, full=False).steps < one.steps
    assert descent_settings(public, full=True).steps == math.ceil(one.steps / 10)
    given = descent_settings(public, full=False, batch=100, steps=7, rate=0.3)
    assert (given.sampling, given.steps, given.rate) == (Poisson(100 / 30_000), 7, 0.3)


def test_the_exact_accountant_agrees_with_the_numerical_one() -> None:
    event = FullBatch().run_event(hg.accounting.gaussian(9.0), num_records=1, num_steps=30)
    for relation in (Relation.ADD_REMOVE, Relation.REPLACE_ONE):
        exact = EXACT.epsilon(event, delta=1e-5, relation=relation)
        numerical = PLD.epsilon(event, delta=1e-5, relation=relation)
        assert exact * (1 - 1e-9) <= numerical <= exact * (1 + 1e-3)
        assert EXACT.delta(event, epsilon=exact, relation=relation) == pytest.approx(1e-5, rel=1e-6)
    sampled = Poisson(0.1).run_event(hg.accounting.gaussian(9.0), num_records=1, num_steps=3)
    with pytest.raises(Refused, match="Gaussian releases of all records"):
        EXACT.epsilon(sampled, delta=1e-5)
