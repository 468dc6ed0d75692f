"""How often the same records were fitted, and what is charged to their budget."""

import pickle

import numpy as np
import pytest
from made_tables import table
from scipy import sparse
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from hushgrad.glm import PrivateLogisticRegression
from hushgrad.ledger import Ledger
from hushgrad.types import Refused

ALGORITHMS = ["sgd", "gd", "objective", "output"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_fit_is_charged_to_a_budget(algorithm: str, tmp_path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.set_budget("census", epsilon=1.5, delta=1e-4)
    x, y = table(500)
    model = PrivateLogisticRegression(
        epsilon=1.0, algorithm=algorithm, records=500, steps=20, budget=ledger.budget("census")
    ).fit(x, y)
    spent = ledger.budget("census").spent["epsilon"]
    assert spent == pytest.approx(model.guarantee_.epsilon, rel=1e-9)
    with pytest.raises(Refused):
        model.fit(x, y)
    with pytest.raises(Refused, match="secret key"):
        model.set_params(rng=0).fit(x, y)


@pytest.mark.parametrize("algorithm", ["gd", "output"])
def test_folds_are_charged_to_the_budget_of_the_whole(algorithm: str, tmp_path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.set_budget("census", epsilon=4.5, delta=1e-3)
    ledger.set_budget("other", epsilon=4.5, delta=1e-3)
    x, y = table(600)
    model = PrivateLogisticRegression(
        algorithm=algorithm, records=600, steps=5, budget=ledger.budget("census")
    )
    clone(model).fit(x, y)  # whose records the name then stands for
    search = GridSearchCV(model, {"regularization": [0.01]}, cv=2, error_score="raise")
    search.fit(x, y)
    spent = ledger.budget("census").spent["epsilon"]
    assert spent == pytest.approx(search.best_estimator_.guarantee_.epsilon, rel=1e-9)
    assert spent == pytest.approx(4.0, rel=1e-2)
    with pytest.raises(Refused, match="census"):  # the ledger has no room for a fifth
        clone(model).fit(x[:300], y[:300])
    with pytest.raises(Refused, match="that only other names, got the data of census"):
        clone(model).set_params(budget=ledger.budget("other")).fit(x, y)


def test_a_search_counts_every_fit() -> None:
    x, y = table(600)
    model = PrivateLogisticRegression(epsilon=0.5, algorithm="gd", steps=5)
    search = GridSearchCV(model, {"regularization": [0.01, 0.1]}, cv=3).fit(x, y)
    guarantee = search.best_estimator_.guarantee_
    assert guarantee.fits == 7
    assert guarantee.epsilon == pytest.approx(3.5, rel=1e-2)
    assert guarantee.delta == pytest.approx(7e-5)
    assert guarantee.alone == pytest.approx((0.5, 1e-5), rel=1e-2)
    assert "for 7 fits on shares of the same records" in str(guarantee)


def test_a_scaler_does_not_hide_that_clones_are_fitted() -> None:
    x, y = table(600)
    whole = make_pipeline(StandardScaler(), PrivateLogisticRegression(algorithm="gd", steps=5))
    assert (
        cross_validate(whole, x, y, cv=4, return_estimator=True)["estimator"][-1][
            -1
        ].guarantee_.fits
        == 4
    )
    words = str(whole.fit(x, y)[-1].guarantee_)
    assert "for 5 fits" in words
    assert "not counted: a search over settings" in words and "such as a scaler" in words


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array, sparse.csc_matrix])
def test_estimators_of_their_own_on_shares_of_the_records_are_counted(kind) -> None:
    x, y = table(900)
    x[np.abs(x) < 0.3] = 0.0

    def fitted(rows: slice, columns: int = 4):
        model = PrivateLogisticRegression(algorithm="gd", steps=5)
        return model.fit(kind(x[rows, :columns]), y[rows]).guarantee_

    assert fitted(slice(0, 300)).fits == 1
    assert fitted(slice(300, 900)).fits == 1  # no record in common
    assert fitted(slice(150, 300)).fits == 2
    assert fitted(slice(0, 900)).fits == 4
    found = PrivateLogisticRegression(algorithm="gd", steps=5).fit(x[:300], y[:300])
    assert found.guarantee_.fits == 4  # dense or sparse: those of 0–300, 150–300 and 0–900


def test_fits_under_another_relation_are_named_and_not_added() -> None:
    x, y = table(300)
    model = PrivateLogisticRegression(algorithm="gd", steps=5).fit(x, y)
    found = clone(model).set_params(records=300).fit(x, y).guarantee_
    assert found.fits == 1 and "1 fits under another relation" in str(found)


def test_copies_for_other_processes_are_named() -> None:
    x, y = table(300)
    model = PrivateLogisticRegression(algorithm="gd", steps=5)
    assert "pickled" not in str(clone(model).fit(x, y).guarantee_)
    pickle.loads(pickle.dumps(model))
    assert "1 unfitted copies of this estimator were pickled" in str(model.fit(x, y).guarantee_)
    assert pickle.loads(pickle.dumps(model)).guarantee_ == model.guarantee_


@pytest.mark.parametrize(("records", "rows"), [(5, 1797), (1797, 5), (1000, 2001), (2003, 1000)])
def test_a_number_of_records_unlike_that_of_the_rows_is_refused(records: int, rows: int) -> None:
    x, y = table(rows)
    model = PrivateLogisticRegression(records=records, classes=[0, 1], delta=1e-6)
    with pytest.raises(Refused, match="public number of records") as refusal:
        model.fit(x, y)
    assert str(rows) not in str(refusal.value)  # which is private
    assert not hasattr(model, "guarantee_")


def test_a_fold_of_two_is_near_the_whole() -> None:
    x, y = table(500)
    model = PrivateLogisticRegression(records=1001, algorithm="gd", steps=5, delta=1e-6)
    assert "the number of records, stated as 1001" in str(model.fit(x, y).guarantee_)
