"""Rows of a parameter that are looked up, in every spelling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compare import check
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from uses import loss_of, run

SIZES = st.integers(1, 5)
BATCHES = st.sampled_from([1, 2, 3, 8, 9])
SEEDS = st.integers(0, 1000)


@given(
    inner=st.lists(SIZES, max_size=2),
    rows=st.integers(1, 6),
    width=SIZES,
    padded=st.one_of(st.none(), st.integers(-6, 5)),
    batch=BATCHES,
    seed=SEEDS,
)
def test_embeddings_are_exact(
    inner: list[int], rows: int, width: int, padded: int | None, batch: int, seed: int
) -> None:
    """Few rows and many look-ups, so that indices repeat within a record."""
    assume(padded is None or -rows <= padded < rows)
    torch.manual_seed(seed)
    table = nn.Embedding(rows, width, padding_idx=padded)
    nn.init.normal_(table.weight)
    check(loss_of(table), table, torch.randint(rows, (batch, *inner)))


@pytest.mark.parametrize(("rows", "t", "form"), [(100, 4, "Gram"), (3, 40, "materialised")])
def test_embedding_in_both_forms(rows: int, t: int, form: str) -> None:
    table = nn.Embedding(rows, 6)
    gradients = check(loss_of(table), table, torch.randint(rows, (5, t)))
    assert gradients.held_gradients["weight"].form == form


LOOKUPS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "F.embedding": (lambda i, w: F.embedding(i, w), [(6, 3)]),
    "F.embedding, keywords": (lambda i, w: F.embedding(input=i, weight=w, padding_idx=2), [(6, 3)]),
    "w[i]": (lambda i, w: w[i], [(6, 3)]),
    "w[i] of negative indices": (lambda i, w: w[i - 6], [(6, 3)]),
    "w[i] of a vector": (lambda i, w: w[i], [(6,)]),
    "w[i] of three dimensions": (lambda i, w: w[i], [(6, 2, 3)]),
    "w[:, i]": (lambda i, w: w[:, i].movedim(0, -1), [(3, 6)]),
    "w[i, 0]": (lambda i, w: w[i, 0], [(6, 3)]),
    "w[i, j]": (lambda i, w: w[i, i % 3], [(6, 3)]),
    "index_select": (lambda i, w: w.index_select(0, i[:, 0]), [(6, 3)]),
    "gather": (lambda i, w: w.expand(len(i), -1).gather(1, i), [(6,)]),
    "one-hot product": (lambda i, w: F.one_hot(i, 6).to(w.dtype) @ w, [(6, 3)]),
    "w.T[i]": (lambda i, w: w.T[i], [(3, 6)]),
    "look-up in a slice": (lambda i, w: F.embedding(i, w[:6]), [(8, 3)]),
    "look-up in slices that meet": (
        lambda i, w: F.embedding(i % 4, w[:5]) * F.embedding(i % 4, w[3:]), [(8, 3)]
    ),
    "look-up in slices that do not": (
        lambda i, w: F.embedding(i % 4, w[:4]) * F.embedding(i % 4, w[4:]), [(8, 3)]
    ),
    "look-up in a scaled table": (lambda i, w: F.embedding(i, 2 * w), [(6, 3)]),
    "positions by arange": (
        lambda i, w, p: F.embedding(i, w) + F.embedding(torch.arange(4), p), [(6, 3), (5, 3)]
    ),
    "positions by a row": (
        lambda i, w, p: F.embedding(i, w) + F.embedding(torch.arange(4)[None], p),
        [(6, 3), (5, 3)],
    ),
    "positions that repeat": (
        lambda i, w, p: F.embedding(i, w) + F.embedding(torch.tensor([0, 0, 3, 0]), p),
        [(6, 3), (5, 3)],
    ),
    "positions expanded": (
        lambda i, w, p: F.embedding(i, w) + F.embedding(torch.arange(4).expand_as(i), p),
        [(6, 3), (5, 3)],
    ),
    "positions, padding index": (
        lambda i, w, p: F.embedding(i, w) + F.embedding(torch.arange(4), p, 1), [(6, 3), (5, 3)]
    ),
    "positions by w[arange]": (
        lambda i, w, p: F.embedding(i, w) + p[torch.arange(4)], [(6, 3), (5, 3)]
    ),
    "positions by a slice": (lambda i, w, p: F.embedding(i, w) + p[:4], [(6, 3), (5, 3)]),
    "positions, then a product": (
        lambda i, w, p: F.embedding(i, w) @ F.embedding(torch.arange(4), p).T, [(6, 3), (5, 3)]
    ),
    "two tables": (lambda i, w, v: F.embedding(i, w) * F.embedding(i, v), [(6, 3), (6, 3)]),
    "one table twice": (lambda i, w: F.embedding(i, w) * F.embedding(i.flip(1), w), [(6, 3)]),
    "records and positions of one table": (
        lambda i, w: F.embedding(i, w) * F.embedding(torch.arange(4), w), [(6, 3)]
    ),
    "tied head": (lambda i, w: F.linear(F.embedding(i, w), w), [(6, 3)]),
    "tied head by product": (lambda i, w: F.embedding(i, w) @ w.T, [(6, 3)]),
    "tied head, w[i]": (lambda i, w: F.linear(w[i], w), [(6, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("spelling", LOOKUPS)
def test_every_spelling_of_a_lookup_is_exact(spelling: str) -> None:
    function, shapes = LOOKUPS[spelling]
    run(function, shapes, torch.randint(6, (3, 4)))


def test_one_index_for_each_record_is_exact() -> None:
    run(lambda i, w: F.embedding(i, w), [(6, 3)], torch.randint(6, (7,)))
