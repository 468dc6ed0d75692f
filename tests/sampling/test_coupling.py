"""Collate functions that let the records of a batch meet are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from collated import (
    OWN,
    PAIRS,
    TEXTS,
    WORDS,
    N,
    X,
    first_batch,
    fixed,
    longest,
    longest_with_mask,
    right_aligned,
    standardised,
)
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

import hushgrad as hg
from hushgrad.rng import Rng
from hushgrad.run.evaluation import evaluate
from hushgrad.sampling import FullBatch, Loader, Poisson, Stated
from hushgrad.types import Refused


def longest_multiple(rows: list[Tensor]) -> Tensor:
    padded = longest(rows)
    return torch.nn.functional.pad(padded, (0, -padded.shape[1] % 8))


def lengths_of(texts: list[str]) -> Tensor:
    most = max(map(len, texts))
    return torch.tensor([[ord(c) for c in text.ljust(most)] for text in texts])


def by_largest(rows: list[Tensor]) -> Tensor:
    x = torch.stack(rows)
    return x / x.abs().max()


def by_count(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) / len(rows)


def outliers_cut(rows: list[Tensor]) -> Tensor:
    """Which no usual batch shows: only values far from all others are moved."""
    x = torch.stack(rows)
    return x.clamp(x.mean() - 20, x.mean() + 20)


def nan_by_mean(rows: list[Tensor]) -> Tensor:
    x = torch.stack(rows)
    return x if bool(x.isfinite().all()) else torch.zeros_like(x)


def by_length(rows: list[Tensor]) -> Tensor:
    return fixed(sorted(rows, key=len))


def without_twins(rows: list[Tensor]) -> Tensor:
    return torch.stack(list({tuple(r.tolist()): r for r in rows}.values()))


def mixed_up(rows: list[Tensor]) -> Tensor:
    """Mixup: each record with another, drawn at random."""
    x = torch.stack(rows)
    return 0.9 * x + 0.1 * x[torch.randperm(len(x))]


def smoothed_labels(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    shares = torch.bincount(y, minlength=3) / len(y)
    return x, 0.9 * torch.eye(3)[y] + 0.1 * shares


class Centred:
    """By a mean that moves with every batch that was seen."""

    def __init__(self) -> None:
        self.mean = torch.zeros(5)

    def __call__(self, rows: list[Tensor]) -> Tensor:
        x = torch.stack(rows)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


COUPLINGS: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "padded to the longest": (
        WORDS,
        longest,
        r"shape depends on the other records.*padding=\"max_length",
    ),
    "with a mask": (WORDS, longest_with_mask, "shape depends.* with a mask or without"),
    "to a multiple": (WORDS, longest_multiple, "shape depends"),
    "right-aligned": (WORDS, right_aligned, "entries depend"),
    "equal lengths": ([w[:3] for w in WORDS], longest, "shape depends"),
    "texts": (TEXTS, lengths_of, "shape depends"),
    "equal texts": (["ab"] * N, lengths_of, "shape depends"),
    "standardised": (X, standardised, "entries depend.*public constants"),
    "by the largest": (X, by_largest, "entries depend"),
    "by their number": (X, by_count, "entries depend"),
    "outliers": (X, outliers_cut, "entries depend"),
    "one nan": (X, nan_by_mean, "entries depend"),
    "labels": (PAIRS, smoothed_labels, "entries depend"),
    "sorted": (WORDS, by_length, r"entries depend.*sorting.*keep the order"),
    "without twins": (X, without_twins, "the records in their first dimension"),
    "mixup": (X, mixed_up, "entries depend"),
    "a state": (X, Centred(), "different batches for the same records"),
    "a generator of its own": (
        X,
        lambda rows: torch.stack(rows) + OWN.normal(),
        "different batches for the same records",
    ),
}


@pytest.mark.parametrize("name", COUPLINGS)
def test_a_collate_function_that_couples_records_is_refused(name: str) -> None:
    data, collate, message = COUPLINGS[name]
    with pytest.raises(Refused, match=message):
        first_batch(data, collate)


def test_it_is_refused_with_workers_too() -> None:
    with pytest.raises(Refused, match=r"^expected a collate function that treats each record"):
        first_batch(X, standardised, workers=1)


@pytest.mark.parametrize("size", [1, 2, 3, N])
@pytest.mark.parametrize("collate", [longest, right_aligned])
def test_batches_of_any_size_show_it(collate: Any, size: int) -> None:
    with pytest.raises(Refused, match="a collate function that treats each record by itself"):
        first_batch(WORDS, collate, size=size)


def test_a_number_of_rows_is_looked_at_in_every_batch() -> None:
    """A collate function that drops a record in some batches, which no test need have met."""
    loader = Loader(X, collate=lambda rows: torch.stack(rows[: 7 if len(rows) == 9 else None]))
    for size in (8, 8):
        loader.load(np.arange(size))
    with pytest.raises(Refused, match="a row for each of the records") as refusal:
        loader.load(np.arange(9))
    assert "9" not in str(refusal.value)  # the size of a batch is private
    assert "7" not in str(refusal.value)


@pytest.mark.parametrize("since", [2, 5, 70, 300])
def test_a_coupling_that_comes_later_is_found_within_128_batches(since: int) -> None:
    batches = 0

    def collate(rows: list[Tensor]) -> Tensor:
        x = torch.stack(rows)
        return x - x.mean() if batches >= since else x

    loader = Loader(X, collate=collate)

    def load() -> None:
        nonlocal batches
        for _ in loader.load_each([np.arange(8)] * (since + 129)):
            batches += 1

    with pytest.raises(Refused, match="treats each record by itself"):
        load()
    assert since <= batches <= max(2 * since, since + 128)


def test_a_run_is_refused_before_its_first_step() -> None:
    net = torch.nn.Linear(5, 1)
    plan = hg.plan(records=N, batch=8, epochs=1, delta=1e-3, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = Loader(X, collate=standardised)
    run = hg.train(net, optimizer, data, plan=plan, rng=Rng.from_os())
    with pytest.raises(Refused, match="treats each record by itself"):
        next(iter(run))
    assert run.steps_taken == 0


def test_an_evaluation_is_refused() -> None:
    with pytest.raises(Refused, match="treats each record by itself"):
        evaluate(
            {"size": lambda x: x[:, 0]},
            Loader(X, collate=by_largest),
            records=N,
            delta=1e-3,
            epsilon=1.0,
            rng=Rng.from_os(),
        )


@pytest.mark.parametrize(
    ("data", "collate", "refused"),
    [(WORDS, longest, True), (WORDS, fixed, False), (X, None, False), (X, standardised, True)],
)
def test_a_loader_of_the_users_own_is_looked_into(data: Any, collate: Any, refused: bool) -> None:
    loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate)
    stated = Stated(loader, hg.sampling.Shuffled(8))
    if refused:
        with pytest.raises(Refused, match="treats each record by itself"):
            next(stated.batches(num_records=N, steps=range(5)))
    else:
        assert len(list(stated.batches(num_records=N, steps=range(5)))) == 5


@pytest.mark.parametrize("scheme", [FullBatch(), Poisson(0.2)])
def test_every_sampling_is_tested(scheme: Any) -> None:
    loader = Loader(WORDS, collate=longest)
    batches = loader.batches(scheme, num_records=N, steps=range(20), rng=Rng.fixed(0))
    with pytest.raises(Refused, match="treats each record by itself"):
        list(batches)
