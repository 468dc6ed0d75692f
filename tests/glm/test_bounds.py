"""The theorems on clipped DP-GD as numbers: constants, traps, and runs that keep to them."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hushgrad.accounting.closed_forms import gaussian_delta
from hushgrad.glm.bounds import (
    average_risk,
    best_rate,
    central_noise,
    central_risk,
    local_noise,
    local_risk,
    stationary_gradient,
)
from hushgrad.glm.losses import ScoreLoss, savage
from hushgrad.types import Refused

RUN = {"clip_norm": 0.7, "records": 400, "epsilon": 1.5, "delta": 1e-5}


def test_the_closed_form_of_theorem_4_1() -> None:
    found = central_risk(distance=2.0, rank=3, **RUN)
    printed = 0.7 * 2 * math.sqrt(1 + 2 * 3 * math.log(1e5)) / (1.5 * 400)
    assert found == pytest.approx(printed, rel=1e-4)  # T + 1 for T, of 360 000 steps
    assert found >= printed


def test_the_corollary_has_eight_where_the_paper_prints_one() -> None:
    found = local_risk(distance=2.0, rank=3, **RUN)
    by_hand = 0.7 * 2 * math.sqrt(1 + 8 * 3 * math.log(1e5)) / (1.5 * 20)
    assert found == pytest.approx(by_hand, rel=1e-3)
    assert found > 2 * 0.7 * 2 * math.sqrt(1 + 3 * math.log(1e5)) / (1.5 * 20)


def test_local_noise_hides_any_two_records() -> None:
    steps = 50
    at_source = local_noise(**RUN, steps=steps) * math.sqrt(400)
    hidden = at_source / math.sqrt(steps) / (2 * 0.7)  # ÷ what replacing a gradient can change
    assert gaussian_delta(hidden, epsilon=1.5) <= 1e-5
    assert gaussian_delta(hidden / 2, epsilon=1.5) > 1e-4  # the printed noise


def test_noise_is_refused_where_the_theorem_fails() -> None:
    with pytest.raises(Refused, match=r"Theorem 2\.2"):
        central_noise(clip_norm=1.0, records=100, epsilon=10.0, delta=1e-5, steps=5)


def test_the_best_rate_is_the_best() -> None:
    at = {"distance": 3.0, "clip_norm": 0.5, "rank": 4, "noise": 0.2, "steps": 30}
    rate = best_rate(**at)
    assert average_risk(**at) == pytest.approx(average_risk(**at, rate=rate))
    for other in (0.9 * rate, 1.1 * rate):
        assert average_risk(**at, rate=other) > average_risk(**at)


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_descent_on_the_steepest_cone_keeps_to_the_bound_and_comes_near_it(steps: int) -> None:
    at = {"distance": 2.0, "clip_norm": 1.0, "rank": 1, "noise": 0.0, "steps": steps}
    rate, theta, path = best_rate(**at), 2.0, []
    for _ in range(steps):
        theta -= rate * math.copysign(1.0, theta)
        path.append(theta)
    found = abs(sum(path) / steps)
    assert found <= average_risk(**at)
    if steps == 1:  # d − η against d²/(2η) + η, in the same size
        assert found > average_risk(**at) / 8


@dataclass(frozen=True)
class Valley:
    """Savage losses of few directions in many parameters: not convex, and smooth."""

    x: np.ndarray
    y: np.ndarray
    kind: ScoreLoss

    @property
    def smoothness(self) -> float:
        return self.kind.smoothness * float(np.linalg.eigvalsh(self.x.T @ self.x / len(self.x))[-1])

    def loss(self, theta: np.ndarray) -> float:
        z = torch.from_numpy(self.x @ theta)
        return float(self.kind.value(z, torch.from_numpy(self.y)).mean())

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        slope = self.kind.derivative(torch.from_numpy(self.x @ theta), torch.from_numpy(self.y))
        return self.x.T @ slope.numpy() / len(self.x)


def test_theorem_4_2_with_the_noise_that_its_steps_need() -> None:
    draw = np.random.default_rng(0)
    basis = np.linalg.qr(draw.normal(size=(200, 3)))[0]
    x = draw.normal(size=(100, 3)) @ basis.T
    valley = Valley(x, np.sign(x @ basis[:, 0] + 0.3 * draw.normal(size=100)), savage())
    steps, noise, failure = 40, 0.05, 0.05
    bound = stationary_gradient(
        gap=valley.loss(np.zeros(200)),  # the loss is above 0
        smoothness=valley.smoothness,
        rank=3,
        noise=noise,
        steps=steps,
        failure=failure,
    )
    means = []
    for _ in range(10):
        theta, norms = np.zeros(200), []
        for _ in range(steps):
            gradient = valley.gradient(theta)
            norms.append(np.linalg.norm(gradient))
            theta = theta - (gradient + noise * draw.normal(size=200)) / valley.smoothness
        means.append(math.sqrt(np.mean(np.square(norms))))
    assert max(means) <= bound  # each with a chance of 0.95, and then some
    assert np.mean(means) > bound / 10  # no idle bound


def test_the_gradient_that_is_proved_falls_as_the_root_of_n() -> None:
    """The printed form falls as 1/n; the factor T of the noise that it leaves out undoes that."""

    def proved(records: int) -> float:
        def at(steps: int) -> float:
            noise = central_noise(
                clip_norm=1.0, records=records, epsilon=1.0, delta=1e-5, steps=steps
            )
            return stationary_gradient(
                gap=1.0, smoothness=1.0, rank=3, noise=noise, steps=steps, failure=0.05
            )

        return min(at(round(10 ** (power / 8))) for power in range(60))

    assert proved(1000) / proved(100_000) == pytest.approx(10, rel=0.2)


def test_a_paid_choice_adds_its_noise() -> None:
    at = {"gap": 1.0, "smoothness": 1.0, "rank": 3, "noise": 0.01, "steps": 50, "failure": 0.1}
    extra = stationary_gradient(**at, choice=0.02) - stationary_gradient(**at)
    assert extra == pytest.approx(2 * 0.02 * math.log(1000))
    draw = np.random.default_rng(1)
    norms = np.linspace(1, 2, 50)
    noisy = norms + draw.laplace(scale=0.02, size=(4000, 50))
    worse = norms[noisy.argmin(1)] - 1
    assert np.mean(worse <= extra) >= 0.95 and worse.max() > 0

    with pytest.raises(ValueError, match="failure"):
        stationary_gradient(**(at | {"failure": 0.0}))
