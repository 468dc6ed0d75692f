"""scikit-learn estimators: linear models that are fitted with differential privacy.

    model = PrivateLogisticRegression(epsilon=1.0, delta=1e-6, feature_norm=4.0, records=30_000)
    model.fit(X, y)
    print(model.guarantee_)

After `fit`, `guarantee_` has `epsilon`, `delta`, `relation`, `sampling` and `accountant`, and
explains in words what they depend on. Publish only `coef_`, `intercept_` and what follows from
them: a score on the training data is another release.

Each fit on the same records costs its own ε. If this process is known to have fitted some of the
records before, as clones in a search do, `epsilon` and `delta` are those of all these fits
together, `guarantee_.fits` is their number and `guarantee_.alone` the cost of this one. Not counted
are fits in other processes, a search by scores, and preprocessing that looks at the records.
"""

from __future__ import annotations

from collections.abc import Callable
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

_SETTINGS = """
    Args:
        epsilon: ε of the guarantee.
        delta: δ of the guarantee.
        algorithm: "sgd" (Poisson batches), "gd" (full batches), "objective" or "output"
            perturbation.
        feature_norm: your statement of how long a row of features can be. It is never computed
            from the data. Longer rows are scaled down to it.
        clip_norm: "auto" for the loss's largest slope times the bound on a row, which clips
            nothing of a Lipschitz loss; a number, for Abadi's rule; or a rule such as
            `hg.automatic()`. It applies to rows divided by `feature_norm`.
        fit_intercept: whether to fit an intercept.
        {own}
        records: the number of records, if it is public. The guarantee is then for adding or
            removing a record. If None, it is for replacing one, and the noise is twice as large.
        batch: the expected batch size; if None, chosen from public numbers (see `defaults`).
        steps: the number of steps, likewise.
        learning_rate: the step size, likewise.
        regularization: the strength of ‖θ‖²/2 per record, on rows divided by `feature_norm`. If
            None, 0 for descent, and chosen from public numbers for the perturbations.
        rng: None for a secret key from the operating system, a `hushgrad.Rng`, or a number for a
            run that is reproducible and **not private**.
        budget: a ledger's budget, charged before anything is released.

    Raises:
        ValueError: (from `fit`) for settings or data that cannot be used.
        Refused: (from `fit`) if the budget or the accountant does not allow the fit.
    """
_CLASSES = """classes: the possible labels. If None, the labels that occur are assumed to be
            public, and the guarantee says so."""
_TARGET_BOUND = """target_bound: your statement of how large |y| can be. It is never computed from
            the data. Larger targets are clipped to it."""


def _document(own: str) -> Callable[[type], type]:
    """Append the shared settings, and those of the kind of estimator, to a class's docstring."""

    def append(estimator: type) -> type:
        estimator.__doc__ = (estimator.__doc__ or "").rstrip() + "\n" + _SETTINGS.format(own=own)
        return estimator

    return append


class _Private(BaseEstimator):  # type: ignore[misc]
    """What all estimators share: input checks, one private fit, linear scores."""

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
        """Return the name that this estimator and its clones share, by which fits are counted."""
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
        """Return an unfitted estimator with the same arguments; key and budget are shared."""
        made = type(self)(
            **{
                name: value if isinstance(value, Rng | Budget) else clone(value, safe=False)
                for name, value in self.get_params(deep=False).items()
            }
        )
        made._family = self._own_family()
        return made

    def __getstate__(self) -> Any:
        """Return the state to pickle, and count the copy, which may be fitted elsewhere."""
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
    """A classifier."""

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
        """Fit privately; `guarantee_` then has the guarantee."""
        settings = self._settings()
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        check_classification_targets(y)
        known = y if self.classes is None else self.classes
        self.classes_ = np.unique(known)
        if len(self.classes_) < 2:
            raise ValueError(
                f"expected two classes or more, got only one class: {self.classes_[0]!r}; pass "
                "all labels as `classes`"
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
        """Return a score for each record: of the second of two classes, or one for each class."""
        scores = self._scores(X)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> np.ndarray:
        """Return the class with the largest score, for each record."""
        scores = self.decision_function(X)
        places = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)
        return np.asarray(self.classes_[places])


@_document(_CLASSES)
class PrivateLogisticRegression(_PrivateClassifier):
    """Logistic regression with differential privacy, for two classes or more (multinomial).

    Example:
        >>> X, y = np.array([[-1.0], [1.0]] * 500), np.array([0, 1] * 500)
        >>> model = PrivateLogisticRegression(epsilon=2.0, records=1000, classes=[0, 1], rng=0)
        >>> model.fit(X, y).predict([[-0.9], [0.9]])
        array([0, 1])
    """

    def _linear(self, classes: int) -> Linear:
        loss = losses.logistic() if classes == 1 else losses.multinomial()
        return Linear(loss, loss, classes, loss.lipschitz, loss.smoothness, reach=30.0)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, for each record."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([expit(-scores), expit(scores)], 1)
        return np.asarray(softmax(scores, axis=1))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the logarithm of the probability of each class, for each record."""
        return np.asarray(np.log(self.predict_proba(X)))


@_document(_CLASSES)
class PrivateLinearSVC(_PrivateClassifier):
    """A linear support vector machine with differential privacy: the hinge loss.

    Several classes use the loss of Crammer and Singer. The perturbations need a smooth loss: they
    replace the hinge's corner by a parabola of half-width ½ (Chaudhuri et al. 2011), for two
    classes only.

    Example:
        >>> X, y = np.array([[-1.0], [1.0]] * 500), np.array([0, 1] * 500)
        >>> model = PrivateLinearSVC(epsilon=2.0, records=1000, classes=[0, 1], rng=0)
        >>> model.fit(X, y).predict([[-0.9], [0.9]])
        array([0, 1])
    """

    def _linear(self, classes: int) -> Linear:
        if classes == 1:
            return Linear(losses.hinge(), losses.smoothed_hinge(), 1, 1.0, 1.0, reach=10.0)
        loss = losses.multiclass_hinge()
        return Linear(loss, None, classes, loss.lipschitz, 1.0, reach=10.0)


class _PrivateRegressor(RegressorMixin, _Private):  # type: ignore[misc]
    """A regressor."""

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


@_document(_TARGET_BOUND)
class PrivateLinearRegression(_PrivateRegressor):
    """Least squares with differential privacy.

    Targets are divided by `target_bound`. With `clip_norm="auto"` residuals above about
    `target_bound` have no more influence than one of that size: this is the Huber loss. The
    perturbations minimise the Huber loss with its knot at `target_bound`.

    Example:
        >>> X = np.linspace(-1, 1, 1000)[:, None]
        >>> model = PrivateLinearRegression(epsilon=2.0, records=1000, rng=0)
        >>> bool(abs(model.fit(X, 0.5 * X[:, 0]).coef_[0] - 0.5) < 0.2)
        True
    """

    def fit(self, X: Any, y: Any) -> PrivateLinearRegression:
        """Fit privately; `guarantee_` then has the guarantee."""
        settings = self._settings()
        X, y = self._checked(X, y)
        bound = self.target_bound
        labels = torch.from_numpy(np.clip(y, -bound, bound) / bound)
        linear = Linear(losses.squared(), losses.huber(1.0), 1, 1.0, 1.0, reach=3.0)
        self._keep_one(fit(X, labels, linear, settings), scale=bound)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the expected target of each record."""
        return np.asarray(self._scores(X)[:, 0])


@_document(_TARGET_BOUND)
class PrivatePoissonRegressor(_PrivateRegressor):
    """Poisson regression of counts with a log link and differential privacy, by "sgd" or "gd".

    Counts are clipped to `target_bound`. With `clip_norm="auto"` a record whose expected count is
    off by more than about `target_bound` has no more influence than one that is off by that much.

    Example:
        >>> X, y = np.ones((1000, 1)), np.full(1000, 2)
        >>> model = PrivatePoissonRegressor(epsilon=2.0, records=1000, target_bound=4.0, rng=0)
        >>> bool(abs(model.fit(X, y).predict([[1.0]])[0] - 2) < 0.5)
        True
    """

    _counts = True

    def fit(self, X: Any, y: Any) -> PrivatePoissonRegressor:
        """Fit privately; `guarantee_` then has the guarantee."""
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
        """Return the expected count of each record."""
        return np.asarray(np.exp(self._scores(X)[:, 0]))
