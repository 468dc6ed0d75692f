"""Noise: its scale from both sides, its bits, its keys, and the event that it is."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from hushgrad.noise import Noise, gaussian, grid, laplace, release, standard_normal
from hushgrad.rng import Rng
from hushgrad.types import Bounded, Refused, Released

SHAPES = {"conv.weight": (40, 5, 5, 3), "conv.bias": (1001,), "scale": ()}


def bounded(value: float = 0.0, l2: float = 1.0, **other: Tensor) -> Bounded:
    sums = {name: torch.full(shape, value) for name, shape in SHAPES.items()}
    return Bounded(sums | other, l2)


def released(
    total: Bounded, sigma: float = 1.5, seed: int = 0, step: int = 0, noise: Noise | None = None
) -> Released:
    return release(total, noise or gaussian(sigma), rng=Rng.fixed(seed), step=step)


def noise_of(total: Bounded, out: Released) -> dict[str, np.ndarray]:
    return {n: (out.values[n] - total.sum[n].double()).flatten().numpy() for n in total.sum}


def fits(sample: np.ndarray, std: float) -> bool:
    return stats.kstest(sample, stats.norm(scale=std).cdf).pvalue > 1e-3


def assert_scale(sample: np.ndarray, std: float) -> None:
    """Accept the scale, and reject two thirds and three halves of it."""
    assert fits(sample, std)
    assert not fits(sample, std * 2 / 3)
    assert not fits(sample, std * 3 / 2)


# --- scale ---


@pytest.mark.parametrize(("sigma", "l2"), [(1.0, 1.0), (0.3, 2.0), (40.0, 1e-3), (1.5, 1e6)])
def test_noise_has_the_stated_scale_in_every_tensor(sigma: float, l2: float) -> None:
    total = bounded(0.2 * l2, l2)
    found = noise_of(total, released(total, sigma))
    for name in ("conv.weight", "conv.bias"):
        assert_scale(found[name], sigma * l2)


def test_noise_that_is_one_percent_off_is_seen() -> None:
    """Two million draws tell the scale to 0.05 %."""
    total = Bounded({"w": torch.zeros(1 << 21)}, l2=0.4)
    spread = released(total, sigma=1.5).values["w"].square().mean().sqrt().item()
    assert spread == pytest.approx(1.5 * 0.4, rel=0.003)


def test_noise_has_the_stated_scale_at_every_step_of_one_entry() -> None:
    total = bounded()
    found = [released(total, step=step).values["scale"].item() for step in range(800)]
    assert_scale(np.array(found), 1.5)


def test_noise_is_added_once_to_a_sum_of_micro_batches() -> None:
    total = bounded(1.0) + bounded(2.0) + bounded(-3.0)
    assert_scale(noise_of(total, released(total))["conv.weight"], 1.5)


def test_noise_is_added_to_an_empty_batch_too() -> None:
    total = bounded(0.0)
    assert_scale(noise_of(total, released(total))["conv.weight"], 1.5)


def test_steps_tensors_and_keys_do_not_share_noise() -> None:
    twin = bounded(twin=torch.zeros(SHAPES["conv.bias"]))
    samples = [
        noise_of(twin, released(twin))["conv.bias"],
        noise_of(twin, released(twin))["twin"],
        noise_of(twin, released(twin, step=1))["conv.bias"],
        noise_of(twin, released(twin, seed=1))["conv.bias"],
    ]
    correlation = np.corrcoef(samples)
    assert np.abs(correlation - np.eye(4)).max() < 5 / math.sqrt(1001)
    for one, other in itertools.pairwise(samples):
        assert_scale(one - other, 1.5 * math.sqrt(2))


def test_entries_are_independent() -> None:
    noise = standard_normal(1 << 20, Rng.fixed(2)).numpy()
    for lag in (1, 2, 8, 1 << 19):
        correlation = np.corrcoef(noise[:-lag], noise[lag:])[0, 1]
        assert abs(correlation) < 5 / math.sqrt(len(noise) - lag), lag
        squares = np.corrcoef(noise[:-lag] ** 2, noise[lag:] ** 2)[0, 1]
        assert abs(squares) < 5 / math.sqrt(len(noise) - lag), lag


def test_a_tensor_of_several_pieces_has_no_seam() -> None:
    total = Bounded({"w": torch.zeros((1 << 20) * 2 + 3)}, 1.0)
    found = noise_of(total, released(total))["w"]
    assert_scale(found, 1.5)
    pieces = found[: 1 << 20], found[1 << 20 : 1 << 21]
    assert abs(np.corrcoef(pieces)[0, 1]) < 5 / math.sqrt(1 << 20)


# --- replay ---


def test_the_same_sum_at_the_same_step_gets_the_same_noise() -> None:
    one, other = released(bounded(0.5)), released(bounded(0.5))
    assert one.digest == other.digest
    assert all(torch.equal(one.values[n], other.values[n]) for n in SHAPES)


def test_any_other_sum_gets_fresh_noise() -> None:
    """Else two sums with one noise reveal their difference."""
    total, changed = bounded(0.5), bounded(0.5)
    changed.sum["conv.bias"][7] = math.nextafter(0.5, 1)
    changed.sum["conv.bias"][7] += 1e-7
    one, other = released(total), released(changed)
    assert one.digest != other.digest
    gap = (one.values["conv.bias"] - other.values["conv.bias"]).numpy()
    assert_scale(gap, 1.5 * math.sqrt(2))
    gap = (one.values["conv.weight"] - other.values["conv.weight"]).flatten().numpy()
    assert_scale(gap, 1.5 * math.sqrt(2))  # the noise belongs to the whole sum


def test_another_scale_gets_fresh_noise() -> None:
    """Else two releases of one sum with one noise at two scales are two equations for the sum."""
    total = Bounded({"w": torch.zeros(4000)}, 1.0)
    one, other = (released(total, sigma).values["w"].numpy() for sigma in (1.0, 2.0))
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(4000)
    assert released(total, 1.0).digest != released(total, 2.0).digest


CHANGES = ["sign of zero", "last bit of a piece", "dtype", "shape", "name", "step", "key", "order"]


@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_sees_every_bit(change: str) -> None:
    large = torch.zeros((1 << 20) + 1)
    total, step, seed = Bounded({"w": torch.zeros(4), "x": large, "y": torch.zeros(3)}, 1.0), 0, 0
    before = released(total).digest
    match change:
        case "last bit of a piece":
            large[-1] = 1e-45
        case "order":
            total = Bounded(dict(reversed(total.sum.items())), 1.0)
        case "sign of zero":
            total.sum["w"][2] = -0.0
        case "dtype":
            total.sum["w"] = torch.zeros(4, dtype=torch.float64)
        case "shape":
            total.sum["w"] = torch.zeros(2, 2)
        case "name":
            total = Bounded({"v" if n == "w" else n: x for n, x in total.sum.items()}, 1.0)
        case "step":
            step = 1
        case "key":
            seed = 1
    assert released(total, seed=seed, step=step).digest != before


def test_a_view_and_its_copy_are_the_same_sum() -> None:
    x = torch.randn(6, 4)
    one, other = (released(Bounded({"w": w}, 1.0)) for w in (x.t(), x.t().contiguous()))
    assert torch.equal(one.values["w"], other.values["w"])


# --- bits ---


@given(scale=st.floats(1e-30, 1e30))
def test_the_grid_is_a_power_of_two_below_the_noise(scale: float) -> None:
    step = grid(scale)
    assert math.frexp(step)[0] == 0.5
    assert scale * 2.0**-15 < step <= scale * 2.0**-14


@pytest.mark.parametrize("value", [0.0, 1e-9, 0.1, 123.456, 1e6])
def test_a_release_lies_on_the_grid(value: float) -> None:
    out = released(bounded(value), sigma=0.7)
    step = grid(0.7)
    for x in out.values.values():
        assert x.dtype == torch.float64
        assert torch.equal(x / step, (x / step).round())


def test_the_grid_does_not_depend_on_the_sum() -> None:
    low_bits = [
        (released(bounded(value), sigma=1.0, seed=i).values["conv.weight"] / grid(1.0)) % 4
        for i, value in enumerate((0.0, 0.3, 1e5))
    ]
    for bits in low_bits:
        counts = torch.bincount(bits.flatten().long(), minlength=4)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("scale", [0.0, 1e-160, 1e160])
def test_a_scale_out_of_reach_is_refused(scale: float) -> None:
    with pytest.raises(Refused, match="within float64's reach"):
        grid(scale)


# --- events ---


def test_gaussian_is_the_event_of_its_multiplier() -> None:
    assert released(bounded(l2=3.0), sigma=1.5).event == dp_accounting.GaussianDpEvent(1.5)


def test_no_noise_is_not_private() -> None:
    out = released(bounded(0.25), sigma=0.0)
    assert out.event == dp_accounting.NonPrivateDpEvent()
    assert out.values["conv.bias"].unique().tolist() == [0.25]


def test_laplace_has_the_stated_scale() -> None:
    total = Bounded({"w": torch.zeros(4000)}, l2=1.0, l1=3.0)
    out = released(total, noise=laplace(0.5))
    sample = out.values["w"].numpy()
    assert out.event == dp_accounting.LaplaceDpEvent(0.5)
    assert stats.kstest(sample, stats.laplace(scale=1.5).cdf).pvalue > 1e-3
    assert stats.kstest(sample, stats.laplace(scale=1.0).cdf).pvalue < 1e-3
    assert stats.kstest(sample, stats.laplace(scale=2.25).cdf).pvalue < 1e-3


def test_laplace_without_an_l1_bound_is_refused() -> None:
    with pytest.raises(Refused, match=r"sum of absolute values.*use gaussian"):
        released(bounded(), noise=laplace(1.0))


@pytest.mark.parametrize("make", [gaussian, laplace])
@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_bad_multiplier_is_named(make: object, bad: float) -> None:
    with pytest.raises(ValueError, match="noise multiplier >= 0 and at most 1e"):
        make(bad)


def test_a_laplace_multiplier_of_zero_is_named() -> None:
    with pytest.raises(ValueError, match=r"above 0, got 0; use gaussian\(0\.0\)"):
        laplace(0.0)
