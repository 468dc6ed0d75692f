"""Attacks with teeth: they succeed on the usual noise and fail on ours."""

from __future__ import annotations

import pytest

from hushgrad.audit.floating_point import (
    ANGLE,
    ATTACKS,
    LOW_BITS,
    LOW_BITS_64,
    RADIUS,
    Attack,
    float32_noise,
    float64_noise,
    hushgrad_noise,
    radii,
)

# An attack that learns nothing has a standard deviation of 0.07 at 36 trials of either kind.
TRIALS = 36
NOTHING = 0.25

by_name = pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)


@pytest.mark.parametrize("attack", [RADIUS, ANGLE, LOW_BITS], ids=lambda attack: attack.name)
def test_float32_noise_gives_the_record_away(attack: Attack) -> None:
    assert attack.auc(float32_noise, trials=12) > 0.9


def test_float64_noise_off_the_grid_gives_it_away_too() -> None:
    assert LOW_BITS_64.auc(float64_noise, trials=12) > 0.9


@by_name
def test_a_release_does_not(attack: Attack) -> None:
    assert abs(attack.auc(hushgrad_noise, trials=TRIALS, size=1 << 14) - 0.5) < NOTHING


@pytest.mark.slow
@by_name
def test_a_release_does_not_in_many_trials(attack: Attack) -> None:
    assert abs(attack.auc(hushgrad_noise, trials=200) - 0.5) < 0.1


def test_the_usual_tail_ends_and_has_an_atom() -> None:
    """2²⁷ pairs: eight are due beyond 5.768, and each atom is one too many."""
    seen = radii(float32_noise, draws=1 << 28)
    assert seen.largest < 5.7682
    assert seen.due_beyond > 7
    assert seen.atoms > 0


@pytest.mark.slow
def test_ours_goes_on_and_has_none() -> None:
    """Of 2²⁷ ideal pairs 0.08 are rounded to (0, 0) on the grid: three have chance 10⁻⁴."""
    seen = radii(hushgrad_noise, draws=1 << 28)
    assert seen.largest > 5.7682
    assert seen.due_beyond < 7
    assert seen.atoms < 3
