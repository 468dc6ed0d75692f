"""Clipping a linear model's gradients is descending another loss: Lemma 3.1, for every rule."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad import clipping
from hushgrad.glm import losses
from hushgrad.glm.huberised import ClippedObjective, Huberised

CONVEX = {
    "logistic": losses.logistic(),
    "squared": losses.squared(),
    "hinge": losses.hinge(),
    "huber": losses.huber(0.7),
    "poisson": losses.poisson(),
}
RULES = {
    "abadi": clipping.abadi,
    "automatic": lambda clip_norm: clipping.automatic(0.1, clip_norm),
    "normalize": clipping.normalize,
    "reparameterized": clipping.reparameterized,
    "discard": clipping.discard,
}


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def label(loss: str, positive: bool) -> float:
    if loss in ("logistic", "hinge"):
        return 1.0 if positive else -1.0
    return 2.0 if positive else 0.0


@pytest.mark.parametrize("loss", CONVEX)
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=10)  # for each of 25 pairs of a loss and a rule
@given(
    theta=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    x=st.lists(st.floats(-2, 2), min_size=3, max_size=3),
    positive=st.booleans(),
    clip_norm=st.floats(0.05, 3),
)
def test_a_clipped_gradient_is_the_gradient_of_the_huberised_loss(
    loss: str, rule: str, theta, x, positive: bool, clip_norm: float
) -> None:
    """Lemma 3.1, by the rule on the gradient itself and by differences of the loss."""
    clip, point, features = RULES[rule](clip_norm), doubles(*theta), doubles(*x)
    norm = torch.linalg.vector_norm(features)
    if norm < 1e-3:
        return
    huberised, y = Huberised(CONVEX[loss], clip), doubles(label(loss, positive))
    z = (features @ point)[None]
    gradient = CONVEX[loss].derivative(z, y)[:, None] * features
    weight = clip.weights(torch.linalg.vector_norm(gradient, dim=1, keepdim=True))
    clipped = (weight * gradient)[0]
    torch.testing.assert_close(
        huberised.derivative(z, y, norm[None])[0] * features, clipped, rtol=1e-9, atol=1e-12
    )

    def value(at: torch.Tensor) -> torch.Tensor:
        return huberised.value((features @ at)[None], y, norm[None])[0]

    corners = torch.cat([*huberised.knots(y, norm[None]), y, y - 0.7, y + 0.7])
    if (corners - z).abs().min() < 1e-3:
        return  # a difference across a corner is neither derivative
    step = 1e-4 / max(1.0, float(norm))
    for axis in torch.eye(3, dtype=torch.float64):
        slope = (value(point + step * axis) - value(point - step * axis)) / (2 * step)
        assert abs(float(slope - clipped @ axis)) <= 1e-5 * max(1.0, float(norm), float(z.exp()))


@pytest.mark.parametrize("loss", CONVEX)
@given(norm=st.floats(0.1, 10), clip_norm=st.floats(0.05, 3), z=st.floats(-4, 4), up=st.booleans())
def test_abadi_gives_the_lemmas_pieces(loss, norm, clip_norm, z, up) -> None:
    huberised = Huberised(CONVEX[loss], clipping.abadi(clip_norm))
    y, norms, at = doubles(label(loss, up)), doubles(norm), doubles(z)
    y1, y2 = (float(k) for k in huberised.knots(y, norms))
    level, f = clip_norm / norm, CONVEX[loss].value
    if z < y1:
        expected = -level * (z - y1) + float(f(doubles(y1), y))
    elif z > y2:
        expected = level * (z - y2) + float(f(doubles(y2), y))
    else:
        expected = float(f(at, y))
    assert float(huberised.value(at, y, norms)) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    below, above = (CONVEX[loss].derivative(doubles(k), y) for k in (y1 - 1e-6, y2 + 1e-6))
    assert math.isinf(y1) or float(below) < -level
    assert math.isinf(y2) or float(above) > level


@pytest.mark.parametrize("loss", ["logistic", "squared", "poisson"])
@pytest.mark.parametrize("gamma", [0.01, 0.1, 1.0])
def test_automatic_clipping_descends_its_closed_form(loss: str, gamma: float) -> None:
    """For the squared loss ∫ Ru/(|u| + γ) has a closed form: R(|u| − γ log(1 + |u|/γ))."""
    huberised = Huberised(CONVEX[loss], clipping.automatic(gamma, 1.0))
    z, y, norms = doubles(-3, 0.4, 5), doubles(1, 1, 1), doubles(2, 2, 2)
    got = huberised.value(z, y, norms) - huberised.value(y, y, norms)
    if loss == "squared":
        u = (z - y).abs() * 2
        torch.testing.assert_close(got, (u - gamma * (1 + u / gamma).log()) / 4, rtol=1e-7, atol=0)
    else:
        fine = torch.linspace(0, 1, 400_001, dtype=torch.float64)[:, None]
        t = y + (z - y) * fine
        slopes = torch.stack([huberised.derivative(row, y, norms) for row in t[::100]])
        simple = torch.trapezoid(slopes, t[::100], dim=0)
        torch.testing.assert_close(got, simple, rtol=1e-5, atol=1e-7)


def test_sign_clipping_of_the_logistic_loss_has_no_minimum() -> None:
    """Under AUTO-V each record pulls with all its force for ever: g is a straight line."""
    huberised = Huberised(losses.logistic(), clipping.normalize(0.5))
    z = doubles(-20, -1, 0, 3, 20)
    value = huberised.value(z, torch.ones_like(z), torch.full_like(z, 2.0))
    torch.testing.assert_close(value - value[2], -0.25 * z, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_every_increasing_rule_keeps_the_loss_convex(rule: str) -> None:
    assert Huberised(losses.logistic(), RULES[rule](0.5)).convex == (rule != "discard")


def test_discarding_makes_a_loss_that_no_minimiser_is_offered_for() -> None:
    huberised = Huberised(losses.squared(), clipping.discard(1.0))
    far = huberised.value(doubles(2.0, 50.0), doubles(0, 0), doubles(1, 1))
    torch.testing.assert_close(far, doubles(0.5, 0.5), rtol=1e-6, atol=0)  # flat beyond R
    with pytest.raises(ValueError, match="keeps the loss convex"):
        ClippedObjective(huberised, doubles(1.0)[:, None], doubles(0.0)).minimiser()


def lower_bound(clip_norm: float, records: int = 2) -> ClippedObjective:
    """Theorem 3.2's data: 2n times (½, +1), and n times (1, −1)."""
    x = torch.cat([doubles(0.5).expand(2 * records), doubles(1).expand(records)])[:, None]
    y = torch.cat([doubles(1).expand(2 * records), doubles(-1).expand(records)])
    return ClippedObjective(Huberised(losses.logistic(), clipping.abadi(clip_norm)), x, y)


@pytest.mark.parametrize("clip_norm", [0.24, 0.1, 0.01, 1e-4])
@pytest.mark.parametrize("records", [1, 50])
def test_theorem_3_2_in_exact_numbers(clip_norm: float, records: int) -> None:
    problem = lower_bound(clip_norm, records)
    biased = float(problem.minimiser()[0])
    assert biased == pytest.approx(2 * math.log(1 / clip_norm - 1), rel=1e-12)
    assert float(problem.minimiser(clipped=False)[0]) == pytest.approx(0, abs=1e-12)
    assert problem.original(doubles(0)) == pytest.approx(math.log(2), rel=1e-15)
    z = doubles(biased / 2, biased)
    exact = (2 * math.log1p(math.exp(-float(z[0]))) + math.log1p(math.exp(float(z[1])))) / 3
    assert problem.excess_risk() == pytest.approx(exact - math.log(2), rel=1e-9)
    assert problem.excess_risk() >= (math.log(1 / clip_norm) - 2) / 2  # Ω(log 1/L)


def test_a_curve_is_the_clipped_mean_at_each_point() -> None:
    problem = lower_bound(0.1)
    thetas = torch.linspace(-3, 6, 11, dtype=torch.float64)
    expected = [problem.clipped(theta[None]) for theta in thetas]
    torch.testing.assert_close(problem.curve(thetas), doubles(*expected))


@pytest.mark.parametrize("clip_norm", [1.0, 3.0])
def test_theorem_3_2_has_no_bias_above_the_largest_gradient(clip_norm: float) -> None:
    assert lower_bound(clip_norm).excess_risk() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 7.0])
def test_theorem_b_4_in_exact_numbers(clip_norm: float) -> None:
    """{0, L, 8L} under (θ − x)²: the clipped minimiser is L, the right one 3L, 4L² apart."""
    whole = losses.custom(lambda z, y: (z - y) ** 2, lambda z, y: 2 * (z - y), convex=True)
    problem = ClippedObjective(
        Huberised(whole, clipping.abadi(clip_norm)),
        torch.ones(3, 1, dtype=torch.float64),
        doubles(0, clip_norm, 8 * clip_norm),
    )
    assert float(problem.minimiser()[0]) == pytest.approx(clip_norm, rel=1e-9)
    assert float(problem.minimiser(clipped=False)[0]) == pytest.approx(3 * clip_norm, rel=1e-9)
    assert problem.excess_risk() == pytest.approx(4 * clip_norm**2, rel=1e-9)


@pytest.mark.parametrize("rule", ["abadi", "automatic", "reparameterized"])
def test_the_minimiser_of_several_parameters_has_no_clipped_gradient_left(rule: str) -> None:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(200, 3, dtype=torch.float64, generator=rng)
    y = torch.sign(x @ doubles(1, -1, 0.5) + torch.randn(200, generator=rng).double())
    problem = ClippedObjective(Huberised(losses.logistic(), RULES[rule](0.3)), x, y)
    theta = problem.minimiser()
    assert problem.gradient(theta, clipped=True).norm() < 1e-5
    assert problem.gradient(theta, clipped=False).norm() > 1e-3
    assert problem.excess_risk() > 1e-5


def clipped_softmax(theta: torch.Tensor, x: torch.Tensor, *, clip, per_class: bool) -> torch.Tensor:
    """The clipped gradient of one record of class 0, [classes, features] as a vector."""
    z = (theta.reshape(-1, len(x)) @ x)[None]
    slopes = losses.multinomial().derivative(z, torch.tensor([0]))[0]
    gradient = slopes[:, None] * x
    size = torch.linalg.vector_norm(gradient, dim=1) if per_class else gradient.norm()[None]
    return (clip.weights(size[:, None]) * gradient).reshape(-1)


def asymmetry(theta: torch.Tensor, x: torch.Tensor, *, clip, per_class: bool = False) -> float:
    """The largest |J − Jᵀ| of the field, by central differences."""
    step, columns = 1e-5, []
    for axis in torch.eye(len(theta), dtype=torch.float64):
        ahead = clipped_softmax(theta + step * axis, x, clip=clip, per_class=per_class)
        behind = clipped_softmax(theta - step * axis, x, clip=clip, per_class=per_class)
        columns.append((ahead - behind) / (2 * step))
    jacobian = torch.stack(columns, 1)
    return float((jacobian - jacobian.T).abs().max())


@pytest.mark.parametrize("per_class", [False, True])
def test_clipped_softmax_gradients_are_no_gradient_field(per_class: bool) -> None:
    """Theorem 3.3 (flat) and B.5 (each class by itself): J is not symmetric where one is clipped.

    Unclipped it is, and so it is on the set of measure 0 where the other classes' scores agree.
    """
    x, clip = doubles(1.0, -0.5), clipping.abadi(0.3)
    theta = doubles(0.2, 0.1, 0.9, -0.4, -0.3, 0.8)
    assert asymmetry(theta, x, clip=clip, per_class=per_class) > 0.01
    assert asymmetry(theta, x, clip=clipping.abadi(9.0), per_class=per_class) < 1e-9
    alike = doubles(0.2, 0.1, 0.9, -0.4, 0.9, -0.4)
    assert per_class or asymmetry(alike, x, clip=clip) < 1e-9


def test_softmax_and_losses_without_knots_are_refused() -> None:
    for loss in (losses.multinomial(), losses.savage()):
        with pytest.raises(ValueError, match="expected a convex loss of one score"):
            Huberised(loss, clipping.abadi(1.0))
