"""Per-sample gradients in closed form: the waist, the bound on a record, and its bits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from hushgrad import clipping
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.glm import losses
from hushgrad.glm.gradients import NAME, clipped_linear_sum, linear_difference, linear_gradients
from hushgrad.glm.rows import LONGEST, DenseRows, RowSource, scaled_rows
from hushgrad.types import PerSample

LOSSES = {
    loss.name: loss
    for loss in (
        losses.logistic(),
        losses.squared(),
        losses.hinge(),
        losses.poisson(),
        losses.savage(),
        losses.multinomial(),
        losses.multiclass_hinge(),
        losses.bi_tempered(vector=True),
    )
}
RULES = {
    "abadi": clipping.abadi(0.3),
    "automatic": clipping.automatic(),
    "normalize": clipping.normalize(2.0),
    "discard": clipping.discard(0.5),
    "reparameterized": clipping.reparameterized(0.2),
}


def problem(
    loss: losses.ScoreLoss,
    seed: int,
    *,
    n: int = 21,
    p: int = 5,
    scale: float = 1.0,
    kind=None,
    classes: int = 4,
) -> tuple[RowSource, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(n, p, dtype=torch.float64, generator=rng)
    x = x * (torch.rand(n, p, generator=rng) < 0.7)
    classes = classes if loss.vector else 1
    y = torch.randint(classes, (n,), generator=rng)
    if not loss.vector:
        y = torch.sign(torch.randn(n, dtype=torch.float64, generator=rng))
    theta = torch.randn(classes, p + 1, dtype=torch.float64, generator=rng)
    features = x if kind is None else kind(x.numpy())
    return scaled_rows(features, feature_norm=1.5, intercept=0.3), y, theta


def each(rows: RowSource) -> torch.Tensor:
    """The rows as a plain tensor."""
    x = rows.x if isinstance(rows, DenseRows) else torch.from_numpy(rows.x.toarray())
    return x[: rows.count]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=repr)
@pytest.mark.parametrize("kind", [None, sparse.csr_array, sparse.csc_matrix])
def test_gradients_are_those_of_autograd(loss: losses.ScoreLoss, kind) -> None:
    rows, y, theta = problem(loss, 3, kind=kind)
    gradients = linear_gradients(rows, y, theta, loss=loss)
    assert isinstance(gradients, PerSample)
    weights = torch.rand(rows.count, dtype=torch.float64)
    theta.requires_grad_()
    z = each(rows) @ theta.T
    value = loss.value(z if loss.vector else z[:, 0], y)
    torch.testing.assert_close(gradients.losses, value.detach())
    (expected,) = torch.autograd.grad(value @ weights, theta, retain_graph=True)
    torch.testing.assert_close(gradients.weighted_sum({NAME: weights})[NAME], expected)
    for i, square in enumerate(gradients.sq_norms()[NAME]):
        (own,) = torch.autograd.grad(value[i], theta, retain_graph=True)
        exact = float(own.square().sum())
        assert exact * (1 - 1e-9) <= float(square) <= exact * (1 + 1e-9) + 1e-300


@pytest.mark.parametrize("loss", LOSSES.values(), ids=repr)
@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-8, 0.1, 1.0, 30.0]))
def test_each_record_keeps_its_bound(loss, rule: str, seed: int, scale: float) -> None:
    """Each contribution by itself, measured in 80-bit numbers, and the sum of all of them."""
    clip = RULES[rule]
    rows, y, theta = problem(loss, seed, n=9, scale=scale)
    gradients = linear_gradients(rows, y, scale * theta, loss=loss)
    norms = gradients.sq_norms()[NAME].sqrt()
    weights = clip.weights(norms[:, None])[:, 0]
    parts = []
    for i in range(rows.count):
        alone = torch.where(torch.arange(rows.count) == i, weights, 0.0)
        part = gradients.weighted_sum({NAME: alone})[NAME].numpy().astype(np.longdouble)
        assert np.sqrt(np.square(part).sum()) <= clip.bound(1) * (1 + 1e-12)
        parts.append(part)
    total = clipped_linear_sum(rows, y, scale * theta, loss=loss, clip=clip)
    assert total.l2 == clip.bound(1) * (1 + SUM_SLACK)
    np.testing.assert_allclose(total.sum[NAME], np.sum(parts, 0).astype(float), atol=1e-12)


def test_upper_bounds_hold_in_wider_arithmetic() -> None:
    """Row norms and gradient norms are never below the truth, in 80-bit numbers."""
    for seed in range(20):
        rows, y, theta = problem(LOSSES["multinomial"], seed, n=40, p=300)
        exact_rows = np.square(each(rows).numpy().astype(np.longdouble)).sum(1)
        assert (rows.sq_norms[:40].numpy() >= exact_rows).all()
        gradients = linear_gradients(rows, y, theta, loss=LOSSES["multinomial"])
        slopes = gradients.slopes[:40].numpy().astype(np.longdouble)
        exact = np.square(slopes).sum(1) * exact_rows
        upper = gradients.sq_norms()[NAME].numpy()
        assert (upper >= exact).all() and (upper <= exact * (1 + 1e-12)).all()


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array])
@given(scale=st.floats(1e-3, 1e6), bound=st.floats(0.01, 100))
def test_rows_are_shortened_to_the_stated_bound_and_no_further(kind, scale, bound) -> None:
    x = scale * np.random.default_rng(0).standard_normal((30, 4))
    rows = scaled_rows(kind(x), feature_norm=bound, intercept=0.0)
    got, norms = each(rows).numpy(), np.linalg.norm(x, axis=1)
    assert (np.linalg.norm(got, axis=1) <= LONGEST).all()
    np.testing.assert_allclose(got, x / np.maximum(norms, bound)[:, None], rtol=1e-12)


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array])
@pytest.mark.parametrize("size", [0.0, 5e-324, 1e-310, 1e-160, 1.0, 1e150, 1e200, 1e308])
@pytest.mark.parametrize("bound", [1e-300, 1e-160, 1.0, 1e160, 1e300])
def test_rows_of_every_size_keep_the_bound_that_noise_is_scaled_by(kind, size, bound) -> None:
    """Intercept included, in 80-bit numbers: hypot(1, 0.3), and no float32's 0.3."""
    rows = scaled_rows(kind(np.full((2, 3), size)), feature_norm=bound, intercept=0.3)
    got = each(rows).numpy().astype(np.longdouble)
    assert set(got[:, 3]) <= {0.0, 0.3}
    exact = np.square(got).sum(1)
    assert (np.sqrt(exact) <= math.hypot(1, 0.3) * LONGEST).all()
    assert (rows.sq_norms[:2].numpy() >= exact).all()


def test_a_sparse_rows_bound_is_its_own() -> None:
    """A neighbour with many entries must not move the others by a bit."""
    x = np.zeros((9, 1000))
    x[:, :4], x[0] = np.random.default_rng(0).standard_normal((9, 4)), 1.0
    whole, less = (
        scaled_rows(sparse.csr_array(part), feature_norm=0.5, intercept=0.3) for part in (x, x[1:])
    )
    assert torch.equal(whole.sq_norms[1:], less.sq_norms)
    assert torch.equal(each(whole)[1:], each(less))


@pytest.mark.parametrize("stop", [3, 8, 13, 21])
def test_a_slice_holds_its_own_records_and_zeros(stop: int) -> None:
    rows, _, _ = problem(losses.logistic(), 3)
    cut = rows.take(slice(0, stop))
    assert isinstance(cut, DenseRows) and cut.count == stop
    assert torch.equal(cut.x[:stop], each(rows)[:stop]) and not cut.x[stop:].any()


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e308])
def test_a_record_that_is_not_finite_counts_for_nothing(kind, bad: float) -> None:
    x, y = np.ones((3, 2)), torch.tensor([1.0, -1, 1], dtype=torch.float64)
    x[1] = bad
    theta, clip = torch.ones(1, 3, dtype=torch.float64), clipping.normalize(1.0)
    rows = scaled_rows(kind(x), feature_norm=2.0, intercept=0.3)
    got = clipped_linear_sum(rows, y, theta, loss=losses.logistic(), clip=clip).sum[NAME]
    others = scaled_rows(kind(x[[0, 2]]), feature_norm=2.0, intercept=0.3)
    expected = clipped_linear_sum(others, y[[0, 2]], theta, loss=losses.logistic(), clip=clip).sum[
        NAME
    ]
    assert got.isfinite().all()
    if math.isfinite(bad):  # it is shortened, and points where it did
        assert (got - expected).norm() <= 1 + 1e-12
    else:
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("loss", [losses.logistic(), losses.multinomial()], ids=repr)
@pytest.mark.parametrize("n", [1, 7, 60, 1023, 1500])
@pytest.mark.parametrize("p", [6, 63, 123, 300])
@pytest.mark.parametrize("classes", [2, 3, 4, 10])
def test_a_records_arithmetic_does_not_depend_on_other_records(loss, n, p, classes) -> None:
    """Removing a record shifts the others and changes shapes; their slopes keep their bits."""
    rows, y, theta = problem(loss, 5, n=n + 1, p=p, classes=classes)
    x = each(rows)[:, :-1]
    without = scaled_rows(x[1:], feature_norm=1.0, intercept=0.3)
    whole = scaled_rows(x, feature_norm=1.0, intercept=0.3)

    def contributions(part: RowSource, labels: torch.Tensor) -> torch.Tensor:
        """The clipped slopes, part by part as they are summed."""
        found = []
        for start in range(0, part.count, 1024):
            stop = min(start + 1024, part.count)
            cut = part if part.count <= 1024 else part.take(slice(start, stop))
            own = linear_gradients(cut, labels[start:stop], theta, loss=loss)
            weights = RULES["automatic"].weights(own.sq_norms()[NAME].sqrt()[:, None])
            found.append(weights * own.slopes[: stop - start])
        return torch.cat(found)

    assert torch.equal(contributions(whole, y)[1:], contributions(without, y[1:]))
    drawn = np.arange(0, n + 1, 3)
    batch = whole.take(drawn)
    assert torch.equal(contributions(batch, y[drawn])[:1024], contributions(whole, y)[drawn][:1024])


def test_a_difference_is_that_of_two_gradients() -> None:
    rows, y, theta = problem(losses.logistic(), 1)
    new = linear_gradients(rows, y, theta, loss=losses.logistic())
    old = linear_gradients(rows, y, theta + 1e-9, loss=losses.logistic())
    apart = linear_difference(new, old)
    ones = {NAME: torch.ones(rows.count, dtype=torch.float64)}
    expected = new.weighted_sum(ones)[NAME] - old.weighted_sum(ones)[NAME]
    torch.testing.assert_close(apart.weighted_sum(ones)[NAME], expected, rtol=1e-5, atol=1e-13)
    slopes = (new.slopes - old.slopes).numpy().astype(np.longdouble)[: rows.count, 0]
    squares = np.square(each(rows).numpy().astype(np.longdouble)).sum(1)
    assert (apart.sq_norms()[NAME].numpy() >= np.square(slopes) * squares).all()
    with pytest.raises(ValueError, match="the same records"):
        linear_difference(
            new, linear_gradients(rows.take(slice(0, 8)), y[:8], theta, loss=LOSSES["hinge"])
        )


@pytest.mark.parametrize("kind", [None, sparse.csr_array])
def test_an_empty_batch_sums_to_zero(kind) -> None:
    rows, y, theta = problem(losses.logistic(), 1, kind=kind)
    none = rows.take(np.empty(0, dtype=np.int64))
    total = clipped_linear_sum(none, y[:0], theta, loss=losses.logistic(), clip=RULES["abadi"])
    assert not total.sum[NAME].any() and total.sum[NAME].shape == theta.shape


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_that_is_none_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="expected feature_norm > 0"):
        scaled_rows(np.ones((2, 2)), feature_norm=bad)
