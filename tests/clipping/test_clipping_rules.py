"""Every rule against its formula, and every rule, good or bad, against its bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hushgrad.clipping.rules import (
    LARGEST_NORM,
    SMALLEST_NORM,
    Clip,
    abadi,
    automatic,
    custom,
    discard,
    normalize,
    reparameterized,
)

# One group's weight by the published formula: norm n, clipping norm r, gamma, number of groups.
FORMULAS: dict[str, tuple[Callable[[Any, float], Clip], Callable[..., float]]] = {
    "abadi": (lambda r, g: abadi(r), lambda n, r, g, k: min(1.0, r / n) if n else 1.0),
    "automatic": (lambda r, g: automatic(g, r), lambda n, r, g, k: r / (n + g)),
    "normalize": (lambda r, g: normalize(r), lambda n, r, g, k: r / n if n else 0.0),
    "discard": (lambda r, g: discard(r), lambda n, r, g, k: float(n < r)),
    "reparameterized": (
        lambda r, g: reparameterized(r),
        lambda n, r, g, k: min(1 / (r * math.sqrt(k)), 1 / (n * math.sqrt(k)) if n else math.inf),
    ),
}
RULES = list(FORMULAS)

sizes = st.floats(1e-6, 1e6)
norm_values = st.one_of(st.just(0.0), st.floats(1e-12, 1e12), st.floats(1e-3, 1e3))


@st.composite
def norm_tables(draw: Any) -> list[list[float]]:
    groups = draw(st.integers(1, 6))
    row = st.lists(norm_values, min_size=groups, max_size=groups)
    return draw(st.lists(row, min_size=1, max_size=6))


def lengths(weights: Tensor, norms: Tensor) -> Tensor:
    """The norm of each record's contribution."""
    return (weights * norms).square().sum(1).sqrt()


@pytest.mark.parametrize("rule", RULES)
@given(rows=norm_tables(), radius=sizes, gamma=st.floats(1e-4, 10.0))
def test_a_number_is_shared_out_evenly(
    rule: str, rows: list[list[float]], radius: float, gamma: float
) -> None:
    make, formula = FORMULAS[rule]
    clip, norms = make(radius, gamma), torch.tensor(rows, dtype=torch.float64)
    groups = norms.shape[1]
    share = radius / math.sqrt(groups)
    expected = [[formula(n, share, gamma, groups) for n in row] for row in rows]
    weights = clip.weights(norms)
    assert weights.dtype == torch.float64
    torch.testing.assert_close(weights, torch.tensor(expected).double(), rtol=1e-6, atol=0)
    assert clip.bound(groups) == pytest.approx(1.0 if rule == "reparameterized" else radius)
    assert (lengths(weights, norms) <= clip.bound(groups) * (1 + 1e-12)).all()


@pytest.mark.parametrize("rule", RULES)
@given(rows=norm_tables(), gamma=st.floats(1e-4, 10.0), data=st.data())
def test_a_vector_is_taken_as_it_is(
    rule: str, rows: list[list[float]], gamma: float, data: Any
) -> None:
    make, formula = FORMULAS[rule]
    groups = len(rows[0])
    radii = data.draw(st.lists(sizes, min_size=groups, max_size=groups))
    clip, norms = make(radii, gamma), torch.tensor(rows, dtype=torch.float64)
    expected = [
        [formula(n, r, gamma, groups) for n, r in zip(row, radii, strict=True)] for row in rows
    ]
    weights = clip.weights(norms)
    torch.testing.assert_close(weights, torch.tensor(expected).double(), rtol=1e-6, atol=0)
    bound = 1.0 if rule == "reparameterized" else math.hypot(*radii)
    assert clip.bound(groups) == pytest.approx(bound)
    assert (lengths(weights, norms) <= clip.bound(groups) * (1 + 1e-12)).all()


@pytest.mark.parametrize("rule", ["abadi", "automatic", "normalize", "reparameterized"])
def test_the_bound_is_reached(rule: str) -> None:
    """A bound that no record comes near would cost noise for nothing."""
    clip, norms = FORMULAS[rule][0](2.0, 0.01), torch.full((1, 4), 1e6)
    assert float(lengths(clip.weights(norms), norms)) == pytest.approx(clip.bound(4), rel=1e-4)


# --- rules of the user's own ---

HOSTILE: dict[str, Callable[[Tensor], Tensor]] = {
    "unclipped": torch.ones_like,
    "far over": lambda n: 1e200 * torch.ones_like(n),
    "infinite": lambda n: torch.full_like(n, torch.inf),
    "negative": lambda n: -3 / n,
    "no digits": lambda n: 1 / (n - n),
    "largest of the batch": lambda n: 1 / n.max().expand(len(n)),
    "branches": lambda n: n * 0 + (5.0 if bool(n.sum() > 1) else 0.1),
    "reads a number": lambda n: torch.ones_like(n) / float(n.max()),
    "float32": lambda n: (2 / n).float(),
}


@pytest.mark.parametrize("name", HOSTILE)
@given(rows=norm_tables())
def test_any_function_keeps_the_stated_bound(name: str, rows: list[list[float]]) -> None:
    clip, norms = custom(HOSTILE[name], bound=0.7), torch.tensor(rows, dtype=torch.float64)
    if name == "reads a number":
        norms = norms + 1e-6
    weights = clip.weights(norms)
    assert weights.isfinite().all()
    assert (lengths(weights, norms) <= 0.7 * (1 + 1e-12)).all()


@pytest.mark.parametrize("name", [*HOSTILE, "exponential"])
@given(rows=norm_tables())
def test_other_records_change_no_weight(name: str, rows: list[list[float]]) -> None:
    clip = custom((HOSTILE | {"exponential": lambda n: (-n).exp()})[name], bound=1.0)
    norms = torch.tensor(rows, dtype=torch.float64) + 1e-3
    together, turned = clip.weights(norms), clip.weights(norms.flip(0)).flip(0)
    for i in range(len(norms)):
        alone = clip.weights(norms[i : i + 1])[0]
        assert torch.equal(alone, together[i])
        assert torch.equal(alone, turned[i])


def test_a_rule_is_given_one_record_only() -> None:
    """`1/norms.max()` over a batch would let one large record shrink all the others."""
    clip = custom(lambda n: 1 / n.max().expand(len(n)), bound=1.0)
    norms = torch.tensor([[1.0], [1000.0]])
    torch.testing.assert_close(clip.weights(norms), torch.tensor([[1.0], [0.001]]).double())


def _forget(norms: Tensor) -> Tensor:
    norms.zero_()
    return torch.full_like(norms, 1e6)


def test_a_rule_that_writes_its_norms_is_clamped_by_the_true_ones() -> None:
    norms = torch.tensor([[3.0], [5.0]], dtype=torch.float64)
    weights = custom(_forget, bound=1.0).weights(norms)
    torch.testing.assert_close(weights * norms, torch.ones(2, 1).double())
    assert norms.tolist() == [[3.0], [5.0]]


def test_nan_counts_as_zero() -> None:
    clip = custom(lambda n: torch.where(n > 1, torch.nan, 0.5), bound=1.0)
    assert clip.weights(torch.tensor([[0.5], [2.0]])).tolist() == [[0.5], [0.0]]


def test_a_kept_promise_is_not_touched() -> None:
    clip = custom(lambda n: 1 / (n + 3), bound=1.0)
    norms = torch.tensor([[0.1], [7.0], [1e5]], dtype=torch.float64)
    assert torch.equal(clip.weights(norms), 1 / (norms + 3))


@pytest.mark.parametrize(
    "weigh",
    [lambda n: 1 / (n.norm() + 1), lambda n: torch.ones(len(n) + 1), lambda n: n[None]],
    ids=["one number", "one too many", "a matrix"],
)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_weights_of_a_wrong_shape_are_named(weigh: Callable[[Tensor], Tensor], batch: int) -> None:
    """Broadcasting would hand one record's weight to another."""
    with pytest.raises(ValueError, match=r"one weight for each of the 2 groups.*got .*shape"):
        custom(weigh, bound=1.0).weights(torch.ones(batch, 2))


# --- norms that are no numbers, or have no digits left ---

ALL = [make(1.0, 0.01) for make, _ in FORMULAS.values()] + [custom(torch.ones_like, bound=1.0)]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 2 * LARGEST_NORM, 1e300])
@pytest.mark.parametrize("clip", ALL, ids=lambda clip: clip.name)
def test_a_record_that_is_not_finite_is_absent(clip: Clip, bad: float, groups: int) -> None:
    norms = torch.ones(3, groups, dtype=torch.float64)
    norms[1, -1] = bad
    weights = clip.weights(norms)
    assert weights[1].tolist() == [0.0] * groups
    assert torch.equal(weights[[0, 2]], clip.weights(torch.ones(2, groups)))


@pytest.mark.parametrize("groups", [1, 2, 9])
@pytest.mark.parametrize(
    "clip",
    [normalize(1.0), normalize(1e-3), custom(lambda n: 0.3 / n, bound=1.0)],
    ids=["normalize", "small", "custom"],
)
def test_a_norm_without_digits_gets_no_weight_by_a_scale_free_rule(clip: Clip, groups: int) -> None:
    norms = torch.full((1, groups), SMALLEST_NORM / 8, dtype=torch.float64)
    assert clip.weights(norms).tolist() == [[0.0] * groups]
    assert clip.weights(1e6 * norms).min() > 0


@pytest.mark.parametrize("clip", [abadi(), automatic(), discard()], ids=lambda clip: clip.name)
def test_a_small_norm_keeps_its_weight_by_other_rules(clip: Clip) -> None:
    assert clip.weights(torch.tensor([[1e-38], [0.0]])).min() >= 1


def test_an_empty_batch_has_no_weights() -> None:
    for clip in ALL:
        assert clip.weights(torch.zeros(0, 3)).shape == (0, 3)


# --- arguments ---


@pytest.mark.parametrize("make", [abadi, normalize, discard, reparameterized])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, [1.0, 0.0], []])
def test_a_bad_clipping_norm_is_named(make: Callable[..., Clip], bad: Any) -> None:
    with pytest.raises(ValueError, match=r"expected clip_norm > 0 and finite, got .*1\.0"):
        make(bad)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: automatic(gamma=0.0), "gamma"),
        (lambda: automatic(gamma=-1.0), "gamma"),
        (lambda: automatic(clip_norm=0.0), "clip_norm"),
        (lambda: custom(torch.ones_like, bound=0.0), "bound"),
        (lambda: custom(torch.ones_like, bound=math.inf), "bound"),
    ],
)
def test_other_bad_arguments_are_named(make: Callable[[], Clip], name: str) -> None:
    with pytest.raises(ValueError, match=f"expected {name} > 0 and finite, got"):
        make()


def test_a_vector_of_the_wrong_length_is_named() -> None:
    with pytest.raises(ValueError, match=r"each of the 2 groups, got 3; pass one number"):
        abadi([1.0, 2.0, 3.0]).weights(torch.ones(4, 2))


def test_a_rule_shows_its_name_and_norm() -> None:
    assert repr(automatic(0.5, 2.0)) == "automatic(gamma=0.5, clip_norm=2.0)"
