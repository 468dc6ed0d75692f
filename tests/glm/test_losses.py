"""Losses of scores: their derivatives, and the bounds that they state."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hushgrad.glm import losses

TWO_CLASSES = {
    loss.name: loss
    for loss in (
        losses.logistic(),
        losses.hinge(),
        losses.smoothed_hinge(),
        losses.smoothed_hinge(0.1),
        losses.savage(),
        losses.tangent(),
        losses.bi_tempered(),
        losses.bi_tempered(0.5, 1.9),
        losses.bi_tempered(1.0, 1.0),
    )
}
NUMBERS = {loss.name: loss for loss in (losses.squared(), losses.huber(0.7), losses.poisson())}
VECTOR = {
    loss.name: loss
    for loss in (
        losses.multinomial(),
        losses.multiclass_hinge(),
        losses.bi_tempered(vector=True),
        losses.bi_tempered(0.3, 1.6, vector=True),
        losses.bi_tempered(1.0, 1.0, vector=True),
    )
}


def grid(loss: losses.ScoreLoss) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and labels to try; away from the corner of a hinge."""
    z = torch.linspace(-12, 12, 1201, dtype=torch.float64) + 1e-3
    labels = (-1.0, 1.0) if loss.name in TWO_CLASSES else (0.0, 2.5)
    y = torch.tensor(labels, dtype=torch.float64).repeat_interleave(len(z))
    return z.repeat(2), y


@pytest.mark.parametrize("loss", [*TWO_CLASSES.values(), *NUMBERS.values()], ids=repr)
def test_a_derivative_is_that_of_its_value(loss: losses.ScoreLoss) -> None:
    z, y = grid(loss)
    z = z.requires_grad_()
    (by_autograd,) = torch.autograd.grad(loss.value(z, y).sum(), z)
    torch.testing.assert_close(loss.derivative(z.detach(), y), by_autograd, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("loss", VECTOR.values(), ids=repr)
@given(seed=st.integers(0, 2**31))
def test_a_gradient_of_several_scores_is_that_of_its_value(loss, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    z = 5 * torch.randn(8, 5, dtype=torch.float64, generator=rng)
    y = torch.randint(5, (8,), generator=rng)
    z.requires_grad_()
    (by_autograd,) = torch.autograd.grad(loss.value(z, y).sum(), z)
    torch.testing.assert_close(loss.derivative(z.detach(), y), by_autograd, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("loss", [*TWO_CLASSES.values(), *NUMBERS.values()], ids=repr)
def test_stated_slopes_and_curvatures_are_bounds_and_not_far_ones(loss) -> None:
    z, y = grid(loss)
    slope = loss.derivative(z, y)
    assert slope.abs().max() <= loss.lipschitz
    curvature = (slope.reshape(2, -1).diff(dim=1) / 0.02).abs().max()
    assert curvature <= loss.smoothness * (1 + 1e-9)
    if math.isfinite(loss.lipschitz) and "tempered" not in loss.name:  # one bound for them all
        assert slope.abs().max() >= 0.999 * loss.lipschitz
    if math.isfinite(loss.smoothness):
        assert curvature >= 0.99 * loss.smoothness


@pytest.mark.parametrize("loss", [*TWO_CLASSES.values(), *NUMBERS.values()], ids=repr)
def test_convexity_is_as_stated(loss: losses.ScoreLoss) -> None:
    z, y = grid(loss)
    turns = loss.derivative(z, y).reshape(2, -1).diff(dim=1) < -1e-12
    tempered_to_logistic = loss.name == "bi_tempered(1, 1)"  # stated for all temperatures
    assert bool(turns.any()) == (not loss.convex and not tempered_to_logistic)


@pytest.mark.parametrize("loss", VECTOR.values(), ids=repr)
@given(seed=st.integers(0, 2**31), scale=st.floats(0, 30))
def test_gradients_of_several_scores_keep_their_bound(loss, seed: int, scale: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(200, 4, dtype=torch.float64, generator=rng)
    y = torch.randint(4, (200,), generator=rng)
    assert torch.linalg.vector_norm(loss.derivative(z, y), dim=1).max() <= loss.lipschitz


def test_softmax_reaches_root_two_and_not_the_printed_supremum() -> None:
    """Trap: √(K/(K−1)) is no bound."""
    z, y = torch.tensor([[0.0, 40.0, 0.0]], dtype=torch.float64), torch.tensor([0])
    norm = float(torch.linalg.vector_norm(losses.multinomial().derivative(z, y)))
    assert norm > math.sqrt(3 / 2) and abs(norm - math.sqrt(2)) < 1e-12


def test_tempered_losses_at_temperature_one_are_the_ordinary_ones() -> None:
    z, y = grid(losses.logistic())
    for kind in ("value", "derivative"):
        ordinary = getattr(losses.logistic(), kind)(z, y)
        tempered = getattr(losses.bi_tempered(1.0, 1.0), kind)(z, y)
        torch.testing.assert_close(tempered, ordinary, rtol=1e-9, atol=1e-12)


def test_a_bounded_tempered_loss_is_bounded() -> None:
    z, y = torch.tensor([-1e9], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    assert float(losses.bi_tempered(0.8, 1.2).value(z, y)) <= 1 / 0.2
    assert float(losses.logistic().value(z, y)) > 1e8


def test_a_loss_of_ones_own_is_differentiated_record_by_record() -> None:
    cubic = losses.custom(lambda z, y: (z - y).abs() ** 3)
    z, y = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    expected = 3 * (z - y).abs() * (z - y)
    torch.testing.assert_close(cubic.derivative(z, y), expected)


@pytest.mark.parametrize("penalty", [losses.ridge(0.3), losses.bounded_ridge(0.3)], ids=repr)
def test_a_penalty_has_the_gradient_of_its_value(penalty: losses.Penalty) -> None:
    theta = torch.randn(9, dtype=torch.float64, requires_grad=True)
    (by_autograd,) = torch.autograd.grad(penalty.value(theta), theta)
    torch.testing.assert_close(penalty.gradient(theta.detach()), by_autograd)


@pytest.mark.parametrize(("t1", "t2"), [(1.1, 1.2), (0.8, 0.9), (-0.1, 1.0), (0.5, 2.0)])
def test_other_temperatures_are_refused(t1: float, t2: float) -> None:
    with pytest.raises(ValueError, match="expected 0 <= t1 <= 1 <= t2 < 2"):
        losses.bi_tempered(t1, t2)


@pytest.mark.parametrize("branching", [False, True])
def test_a_loss_of_ones_own_cannot_look_at_other_records(branching: bool) -> None:
    """Centred over the batch, its slopes would move with every record."""

    def centred(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if branching and float(z.sum()) > 1e9:
            return z
        return z - z.mean(0) + y

    z, y = torch.randn(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    for loss in (
        losses.custom(centred, centred),
        losses.ScoreLoss("own", centred, centred),
        losses.custom(lambda z, y: (z - z.mean()) * z + y * z),
    ):
        for function in (loss.value, loss.derivative):
            torch.testing.assert_close(function(z, y)[:3], function(z[:3], y[:3]), rtol=0, atol=0)
            assert function(z[:0], y[:0]).shape == (0,)


def test_softmax_reaches_its_curvature_and_no_more() -> None:
    """At p = (½, ½, 0, …) the largest eigenvalue of its Hessian is ½."""
    loss = losses.multinomial()
    rng = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(200, 5, dtype=torch.float64, generator=rng)
    scores[0] = torch.tensor([30.0, 30.0, -30.0, -30.0, -30.0])
    y = torch.zeros(1, dtype=torch.long)
    largest = [
        float(
            torch.linalg.eigvalsh(torch.func.jacrev(lambda s: loss.derivative(s[None], y)[0])(z))[
                -1
            ]
        )
        for z in scores
    ]
    assert largest[0] <= loss.smoothness * (1 + 1e-12) and largest[0] >= 0.999 * loss.smoothness
    assert max(largest) <= loss.smoothness * (1 + 1e-12)
