"""Estimators in scikit-learn's manner: linear models that are fitted with differential privacy.

    model = PrivateLogisticRegression(epsilon=1.0, delta=1e-6, feature_norm=4.0, records=30_000)
    model.fit(X, y)
    print(model.guarantee_)

All of them take

- `epsilon`, `delta`: the guarantee;
- `algorithm`: "sgd" (Poisson batches), "gd" (full batches), "objective" or "output" perturbation;
- `feature_norm`: the user's statement of how long a row of features can be. It is never read off
  the data. A longer row is shortened to it, so that a small value gives all rows one length;
- `clip_norm`: "auto" for the loss's largest slope times the bound on a row, at which nothing of a
  Lipschitz loss is clipped; or a number, for Abadi's rule; or a rule such as `hg.automatic()`. It
  refers to rows divided by `feature_norm`;
- `fit_intercept`;
- `records`: the number of records, if that is public. The guarantee is then for adding or removing
  a record. Left out, it is for replacing one, under which all data sets have one size, and the
  noise is twice as large;
- `batch`, `steps`, `learning_rate`: chosen from public numbers if left out, see `defaults`;
- `regularization`: the strength of ‖θ‖²/2 a record, on rows divided by `feature_norm`. Left out, it
  is 0 for descent and chosen from public numbers for the perturbations;
- `rng`: None for a secret key from the operating system, a `hushgrad.Rng`, or a number for a run
  that is reproducible and **not private**;
- `budget`: a ledger's budget that the fit is charged to, before anything is released.

After `fit`, `guarantee_` has `epsilon`, `delta`, `relation`, `sampling` and `accountant`, and says
in words what they rest on. Only `coef_`, `intercept_` and what follows from them may be shown: a
score on the training data is a release of its own.

Each fit on the same records costs its own ε. Where this process is known to have fitted shares of
them before, as clones in a search do, `epsilon` and `delta` are those of all these fits together,
`guarantee_.fits` is their number and `guarantee_.alone` what this one costs. Not counted are fits
in other processes, a search by scores, and preprocessing that looks at the records.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from hushgrad.clipping.rules import Clip
from hushgrad.glm import losses
from hushgrad.glm.fits import new_family, note_copy
from hushgrad.glm.fitting import FitSettings, Fitted, Linear, fit
from hushgrad.ledger import Budget
from hushgrad.rng import Rng


class _Private(BaseEstimator):  # type: ignore[misc]
    """What all of them share: checked input, one private fit, linear scores."""

    _counts = False  # whether targets are counts

    def _settings(self) -> FitSettings:
        rng = self.rng
        if rng is None:
            rng = Rng.from_os()
        elif not isinstance(rng, Rng):
            rng = Rng.fixed(int(rng))
        names = [n for n in FitSettings.__dataclass_fields__ if n not in ("rng", "family")]
        chosen = {name: getattr(self, name) for name in names}
        return FitSettings(**chosen, rng=rng, family=self._own_family())

    def _own_family(self) -> str:
        """The name that this estimator and its clones share, so that their fits are counted."""
        if not hasattr(self, "_family"):
            self._family = new_family()
        return self._family

    def _keep(self, fitted: Fitted, *, scale: float = 1.0) -> None:
        self.guarantee_ = fitted.guarantee
        self.n_iter_ = fitted.steps
        self._coef, self._intercept = scale * fitted.coef, scale * fitted.intercept

    def _scores(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        return np.asarray(X @ self._coef.T + self._intercept)

    def __sklearn_clone__(self) -> Any:
        """An unfitted one with the same arguments; a key is not copied, and neither is a budget."""
        made = type(self)(
            **{
                name: value if isinstance(value, Rng | Budget) else clone(value, safe=False)
                for name, value in self.get_params(deep=False).items()
            }
        )
        made._family = self._own_family()
        return made

    def __getstate__(self) -> Any:
        """What is pickled, also for another process, whose fits are not seen in this one."""
        if not hasattr(self, "guarantee_"):
            note_copy(self._own_family())
        return super().__getstate__()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.positive_only = self._counts
        tags.non_deterministic = self.rng is None or isinstance(self.rng, Rng)
        return tags


class _PrivateClassifier(ClassifierMixin, _Private):  # type: ignore[misc]
    """A classifier; `classes` states the labels there can be.

    Left out, the labels that occur are taken to be public, and the guarantee says so.
    """

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        algorithm: str = "sgd",
        feature_norm: float = 1.0,
        clip_norm: str | float | Clip = "auto",
        fit_intercept: bool = True,
        classes: Any = None,
        records: int | None = None,
        batch: int | None = None,
        steps: int | None = None,
        learning_rate: float | None = None,
        regularization: float | None = None,
        rng: Rng | int | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.epsilon, self.delta, self.algorithm = epsilon, delta, algorithm
        self.feature_norm, self.clip_norm = feature_norm, clip_norm
        self.fit_intercept, self.classes, self.records = fit_intercept, classes, records
        self.batch, self.steps, self.learning_rate = batch, steps, learning_rate
        self.regularization, self.rng, self.budget = regularization, rng, budget

    def fit(self, X: Any, y: Any) -> Any:
        """Fit privately; the first line of `guarantee_` says how privately."""
        settings = self._settings()
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        check_classification_targets(y)
        known = y if self.classes is None else self.classes
        self.classes_ = np.unique(known)
        if len(self.classes_) < 2:
            raise ValueError(
                f"expected two classes or more, got only one class: {self.classes_[0]!r}; state "
                "them in `classes`"
            )
        places = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        if not (self.classes_[places] == y).all():
            raise ValueError("expected only the labels stated in `classes`, got another; add it")
        binary = len(self.classes_) == 2
        labels = torch.from_numpy(2.0 * places - 1 if binary else places)
        fitted = fit(X, labels, self._linear(1 if binary else len(self.classes_)), settings)
        self._keep(fitted)
        self.guarantee_ = fitted.guarantee.with_public(
            "the labels stated" if self.classes is not None else "which labels occur"
        )
        self.coef_, self.intercept_ = self._coef, self._intercept
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """One score for each record, of the second class, or one of each class."""
        scores = self._scores(X)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> np.ndarray:
        """The class of the largest score."""
        scores = self.decision_function(X)
        places = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)
        return np.asarray(self.classes_[places])


class PrivateLogisticRegression(_PrivateClassifier):
    """Logistic regression, of two classes or multinomial."""

    def _linear(self, classes: int) -> Linear:
        loss = losses.logistic() if classes == 1 else losses.multinomial()
        return Linear(loss, loss, classes, loss.lipschitz, loss.smoothness, reach=30.0)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([expit(-scores), expit(scores)], 1)
        return np.asarray(softmax(scores, axis=1))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """The logarithm of the probability of each class."""
        return np.asarray(np.log(self.predict_proba(X)))


class PrivateLinearSVC(_PrivateClassifier):
    """A linear support vector machine: the hinge loss, or Crammer and Singer's of many classes.

    The perturbations, which need a smooth loss, round its corner off within ½ of 1 (Chaudhuri et
    al. 2011) and are for two classes.
    """

    def _linear(self, classes: int) -> Linear:
        if classes == 1:
            return Linear(losses.hinge(), losses.smoothed_hinge(), 1, 1.0, 1.0, reach=10.0)
        loss = losses.multiclass_hinge()
        return Linear(loss, None, classes, loss.lipschitz, 1.0, reach=10.0)


class _PrivateRegressor(RegressorMixin, _Private):  # type: ignore[misc]
    """A regressor; `target_bound` is the user's statement of how large |y| can be.

    Like `feature_norm` it is never read off the data, and a larger target is cut to it.
    """

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        algorithm: str = "sgd",
        feature_norm: float = 1.0,
        target_bound: float = 1.0,
        clip_norm: str | float | Clip = "auto",
        fit_intercept: bool = True,
        records: int | None = None,
        batch: int | None = None,
        steps: int | None = None,
        learning_rate: float | None = None,
        regularization: float | None = None,
        rng: Rng | int | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.epsilon, self.delta, self.algorithm = epsilon, delta, algorithm
        self.feature_norm, self.target_bound = feature_norm, target_bound
        self.clip_norm, self.fit_intercept, self.records = clip_norm, fit_intercept, records
        self.batch, self.steps, self.learning_rate = batch, steps, learning_rate
        self.regularization, self.rng, self.budget = regularization, rng, budget

    def _checked(self, X: Any, y: Any) -> tuple[Any, np.ndarray]:
        if not (np.isfinite(self.target_bound) and self.target_bound > 0):
            raise ValueError(
                f"expected target_bound > 0 and finite, got {self.target_bound}; state how large "
                "a target can be, without looking at the data"
            )
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, y_numeric=True)
        return X, y.astype(np.float64)

    def _keep_one(self, fitted: Fitted, *, scale: float = 1.0) -> None:
        self._keep(fitted, scale=scale)
        self.coef_, self.intercept_ = self._coef[0], float(self._intercept[0])


class PrivateLinearRegression(_PrivateRegressor):
    """Least squares.

    Targets are divided by `target_bound`. With `clip_norm="auto"` a record whose residual is above
    about `target_bound` pulls no harder than at that: the squared loss, Huberised there. The
    perturbations minimise the Huber loss with its knot at `target_bound`.
    """

    def fit(self, X: Any, y: Any) -> PrivateLinearRegression:
        """Fit privately; the first line of `guarantee_` says how privately."""
        settings = self._settings()
        X, y = self._checked(X, y)
        bound = self.target_bound
        labels = torch.from_numpy(np.clip(y, -bound, bound) / bound)
        linear = Linear(losses.squared(), losses.huber(1.0), 1, 1.0, 1.0, reach=3.0)
        self._keep_one(fit(X, labels, linear, settings), scale=bound)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The expected target of each record."""
        return np.asarray(self._scores(X)[:, 0])


class PrivatePoissonRegressor(_PrivateRegressor):
    """Poisson regression of counts with a log link, by "sgd" or "gd".

    Counts are cut to `target_bound`. With `clip_norm="auto"` a record whose expected count is off
    by more than about `target_bound` pulls no harder than at that.
    """

    _counts = True

    def fit(self, X: Any, y: Any) -> PrivatePoissonRegressor:
        """Fit privately; the first line of `guarantee_` says how privately."""
        settings = self._settings()
        X, y = self._checked(X, y)
        if (y < 0).any():
            raise ValueError("expected counts of 0 or more, got a negative one; check the targets")
        bound = float(self.target_bound)
        labels = torch.from_numpy(np.minimum(y, bound))
        linear = Linear(losses.poisson(), None, 1, bound, bound, reach=3.0)
        self._keep_one(fit(X, labels, linear, settings))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The expected count of each record."""
        return np.asarray(np.exp(self._scores(X)[:, 0]))
