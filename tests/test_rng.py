"""Keys and the numbers that follow from them."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from scipy import stats

from hushgrad.rng import Rng


def test_the_same_labels_give_the_same_numbers() -> None:
    one, other = (Rng.fixed(5).derive("noise", 7, b"digest").words(9) for _ in range(2))
    assert (one == other).all()


@pytest.mark.parametrize(
    "labels", [("noise",), ("noise", 8), (7, "noise"), ("noise7",), ("noise", "7"), ()]
)
def test_other_labels_give_other_numbers(labels: tuple[int | str, ...]) -> None:
    rng = Rng.fixed(5)
    assert not (rng.derive("noise", 7).words(9) == rng.derive(*labels).words(9)).any()


def test_labels_do_not_run_into_each_other() -> None:
    rng = Rng.fixed(5)
    assert not (rng.derive("ab", "c").words(9) == rng.derive("a", "bc").words(9)).any()


def test_two_keys_from_the_system_differ() -> None:
    assert not (Rng.from_os().words(9) == Rng.from_os().words(9)).any()


@pytest.mark.parametrize("start", [0, 1, 2, 7])
def test_a_stream_can_be_entered_anywhere(start: int) -> None:
    rng = Rng.fixed(5)
    assert (rng.words(6, start=start) == rng.words(20)[start : start + 6]).all()


def test_words_are_the_keystream_of_aes() -> None:
    """Every bit is set half of the time, and none follows another."""
    bits = np.unpackbits(Rng.fixed(5).words(20_000).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(bits))
    by_place = bits.reshape(20_000, 64).mean(0)
    assert (abs(by_place - 0.5) < 5 * 0.5 / np.sqrt(20_000)).all()


def test_uniforms_are_uniform_and_open() -> None:
    u = Rng.fixed(5).uniforms(100_000)
    assert u.min() > 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert stats.kstest(u**1.02, "uniform").pvalue < 1e-3
    assert ((u * 2.0**52) % 1 == 0.5).all()


@pytest.mark.parametrize("save", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_key_is_not_saved(save: object) -> None:
    with pytest.raises(TypeError, match="holds a secret key; store it with"):
        save(Rng.fixed(5))


def test_a_key_is_not_shown() -> None:
    rng = Rng(b"k" * 32, reproducible=False)
    assert repr(rng) == "Rng(from the operating system)"
    assert "kkk" not in str(vars(rng).keys()) + repr(rng)
    assert rng.derive(1).reproducible is False
    assert Rng.fixed(1).derive(1).reproducible is True
