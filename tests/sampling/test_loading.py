"""Batches from every kind of data set, with and without records, in and out of workers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from hushgrad.rng import Rng
from hushgrad.sampling import FullBatch, Loader, Poisson, Scheme, Shuffled, WithoutReplacement
from hushgrad.sampling.poisson import TruncatedPoisson
from hushgrad.types import Refused

N = 23
X = torch.arange(N * 6, dtype=torch.float32).reshape(N, 2, 3) / 7
Y = torch.arange(N) % 5
POSITIONS = np.array([0, 3, 4, 11, 22])
Batch = Any


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


@dataclasses.dataclass
class Example:
    image: Tensor
    label: int


class MapStyle(Dataset[Any]):
    """A data set of torch's kind, whose records are made by a function of the position."""

    def __init__(self, record: Callable[[int], Any]) -> None:
        self.record = record

    def __len__(self) -> int:
        return N

    def __getitem__(self, position: int) -> Any:
        assert type(position) is int and 0 <= position < N
        return self.record(position)


class HuggingFaceLike:
    """As `datasets.Dataset`: a row by an int, columns by a list, Python lists inside."""

    columns: ClassVar = {"ids": Y.reshape(-1, 1).expand(N, 4).tolist(), "score": (Y / 4).tolist()}

    def __len__(self) -> int:
        return N

    def __getitem__(self, key: int | list[int]) -> dict[str, Any]:
        if isinstance(key, int):
            return {name: column[key] for name, column in self.columns.items()}
        return {name: [column[i] for i in key] for name, column in self.columns.items()}


class NewerHuggingFaceLike(HuggingFaceLike):
    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        return [super(NewerHuggingFaceLike, self).__getitem__(key) for key in keys]

    def __getitem__(self, key: int | list[int]) -> dict[str, Any]:
        raise AssertionError("expected all records to be fetched at once")


def pair_record(i: int) -> Any:
    return X[i], int(Y[i])


def pair_by_name_record(i: int) -> Any:
    return {"x": X[i].numpy(), "y": Y[i]}


def named_record(i: int) -> Any:
    return Pair(X[i], Y[i])


def dataclass_record(i: int) -> Any:
    return Example(X[i], int(Y[i]))


def nested_record(i: int) -> Any:
    return {"in": [X[i], (Y[i], float(Y[i]))], "flag": bool(Y[i])}


def columns_of_hugging_face() -> dict[str, Tensor]:
    plain = HuggingFaceLike()[list(range(N))]
    return {
        "ids": torch.tensor(plain["ids"]),
        "score": torch.tensor(plain["score"], dtype=torch.float64),
    }


# Each data set, and the same as tensors with all the records in front.
SOURCES: dict[str, tuple[Any, Any]] = {
    "tensor": (X, X),
    "array": (X.numpy(), X),
    "tuple": ((X, Y.numpy()), (X, Y)),
    "mapping": ({"x": X, "y": Y}, {"x": X, "y": Y}),
    "TensorDataset": (TensorDataset(X, Y), (X, Y)),
    "Subset": (Subset(TensorDataset(X, Y), range(N)), (X, Y)),
    "list": ([(X[i], Y[i]) for i in range(N)], (X, Y)),
    "map-style tuple": (MapStyle(pair_record), (X, Y)),
    "map-style mapping": (MapStyle(pair_by_name_record), {"x": X, "y": Y}),
    "map-style named": (MapStyle(named_record), Pair(X, Y)),
    "map-style dataclass": (MapStyle(dataclass_record), Example(X, Y)),  # type: ignore[arg-type]
    "map-style nested": (
        MapStyle(nested_record),
        {"in": [X, (Y, Y.double())], "flag": Y.bool()},
    ),
    "Hugging Face": (HuggingFaceLike(), columns_of_hugging_face()),
    "newer Hugging Face": (NewerHuggingFaceLike(), columns_of_hugging_face()),
}
each_source = pytest.mark.parametrize(("data", "columns"), SOURCES.values(), ids=SOURCES.keys())


def assert_same(got: Any, expected: Any) -> None:
    """Same structure, dtypes, shapes and values."""
    assert type(got) is type(expected)
    if isinstance(expected, Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_same(got[key], expected[key])
    elif dataclasses.is_dataclass(expected):
        assert_same(vars(got), vars(expected))
    else:
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)


def picked(columns: Any, positions: np.ndarray) -> Any:
    """Plain indexing, written apart from the library's own."""
    index = torch.tensor(positions.tolist(), dtype=torch.int64)
    if isinstance(columns, Tensor):
        return columns[index]
    if isinstance(columns, dict):
        return {key: picked(value, positions) for key, value in columns.items()}
    if dataclasses.is_dataclass(columns):
        values = vars(columns).items()
        return type(columns)(**{name: picked(value, positions) for name, value in values})
    parts = [picked(value, positions) for value in columns]
    return type(columns)(*parts) if isinstance(columns, Pair) else type(columns)(parts)


@each_source
def test_a_batch_is_what_plain_indexing_gives(data: Any, columns: Any) -> None:
    assert_same(Loader(data).load(POSITIONS), picked(columns, POSITIONS))
    assert_same(Loader(data).load(POSITIONS[:1]), picked(columns, POSITIONS[:1]))


@each_source
def test_an_empty_batch_has_the_structure_of_a_full_one(data: Any, columns: Any) -> None:
    empty = Loader(data).load(np.empty(0, np.int64))
    assert_same(empty, picked(columns, np.empty(0, np.int64)))


@each_source
def test_absent_records_are_left_out_in_silence(
    data: Any, columns: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = Loader(data)
    assert_same(loader.load(np.array([3, 22, 23, 90])), picked(columns, np.array([3, 22])))
    assert_same(loader.load(np.array([23])), picked(columns, np.empty(0, np.int64)))
    assert capsys.readouterr() == ("", "")


def draws() -> list[np.ndarray]:
    """Batches of many sizes, some of them empty."""
    rng = Rng.fixed(6)
    found = [Poisson(0.08).draw(N, step=step, rng=rng) for step in range(30)]
    assert {0, 1, 2, 3} <= {len(positions) for positions in found}
    return found


@pytest.mark.parametrize("name", ["map-style tuple", "map-style nested", "Hugging Face", "tensor"])
def test_workers_change_no_batch_and_no_order(name: str) -> None:
    data, columns = SOURCES[name]
    batches = list(Loader(data, workers=2).load_each(draws()))
    assert len(batches) == 30
    for batch, positions in zip(batches, draws(), strict=True):
        assert_same(batch, picked(columns, positions))


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_global_random_state(workers: int) -> None:
    before = torch.get_rng_state()
    list(Loader(MapStyle(pair_record), workers=workers).load_each(draws()[:4]))
    assert torch.equal(torch.get_rng_state(), before)


def noisy_record(i: int) -> Tensor:
    return X[i] + torch.randn(2, 3)


def test_looking_at_the_structure_leaves_the_global_random_state() -> None:
    before = torch.get_rng_state()
    Loader(MapStyle(noisy_record))
    assert torch.equal(torch.get_rng_state(), before)


def padded(records: list[Any]) -> dict[str, Tensor]:
    """A user's collate: words of different lengths, padded to a public length."""
    rows = [torch.nn.functional.pad(word, (0, 6 - len(word))) for word, _ in records]
    return {"words": torch.stack(rows), "label": torch.tensor([label for _, label in records])}


def word_record(i: int) -> Any:
    return torch.arange(1 + i % 5), i


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_of_the_users_own(workers: int) -> None:
    loader = Loader(MapStyle(word_record), collate=padded, workers=workers)
    batches = list(loader.load_each([POSITIONS, np.empty(0, np.int64)]))
    assert_same(batches[0], padded([word_record(i) for i in POSITIONS.tolist()]))
    assert batches[1]["words"].shape == (0, 6)
    assert batches[1]["label"].shape == (0,)
    assert batches[1]["label"].dtype == torch.int64


def test_a_collate_gets_the_records_of_columns_too() -> None:
    loader = Loader((X, Y), collate=lambda rows: torch.stack([x.sum() * y for x, y in rows]))
    assert torch.equal(loader.load(POSITIONS), X[POSITIONS].sum((1, 2)) * Y[POSITIONS])


def test_an_empty_batch_holds_nothing_of_the_record_it_was_made_from() -> None:
    empty = Loader(MapStyle(pair_record)).load(np.empty(0, np.int64))
    assert [x.untyped_storage().nbytes() for x in empty] == [0, 0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_is_drawn_and_resumed(workers: int) -> None:
    scheme, data = Poisson(0.1), MapStyle(pair_record)

    def run(steps: range) -> list[Batch]:
        loader = Loader(data, workers=workers)
        return list(loader.batches(scheme, num_records=N, steps=steps, rng=Rng.fixed(8)))

    whole = run(range(12))
    for batch, again in zip(whole, run(range(5)) + run(range(5, 12)), strict=True):
        assert_same(batch, again)
    for step, batch in enumerate(whole):
        positions = scheme.draw(N, step=step, rng=Rng.fixed(8))
        assert_same(batch, picked((X, Y), positions))


ADDED = [(scheme, N + more) for scheme in (Poisson(0.3), FullBatch()) for more in (-8, -1, 0, 1, 8)]
ADDED += [(TruncatedPoisson(0.3, 1000), N + more) for more in (0, 1, 8)]


def test_more_records_than_truncation_is_accounted_for_are_refused() -> None:
    """Its event depends on their number: with more of them ε would be larger than stated."""
    loader = Loader(torch.arange(N))
    with pytest.raises(Refused, match=f"got more than {N - 1}; plan for a larger public number"):
        loader.batches(
            TruncatedPoisson(0.3, 6), num_records=N - 1, steps=range(1), rng=Rng.fixed(8)
        )


@pytest.mark.parametrize(("scheme", "public"), ADDED, ids=str)
def test_every_record_takes_part_where_one_may_be_removed(scheme: Scheme, public: int) -> None:
    """Removing the last record takes out that record and pulls none in, at any public count."""
    values = torch.arange(N)

    def drawn(data: Tensor) -> list[set[int]]:
        batches = Loader(data).batches(
            scheme, num_records=public, steps=range(40), rng=Rng.fixed(8)
        )
        return [set(batch.tolist()) for batch in batches]

    larger, smaller = drawn(values), drawn(values[:-1])
    assert [batch - {N - 1} for batch in larger] == smaller
    assert set.union(*larger) == set(range(N))


def test_a_record_removed_from_truncated_batches_leaves_its_place_empty() -> None:
    scheme = TruncatedPoisson(0.5, 6)

    def drawn(data: Tensor) -> list[list[int]]:
        loader = Loader(data)
        batches = loader.batches(scheme, num_records=N, steps=range(40), rng=Rng.fixed(8))
        return [batch.tolist() for batch in batches]

    larger, smaller = drawn(torch.arange(N)), drawn(torch.arange(N - 1))
    assert [[value for value in batch if value != N - 1] for batch in larger] == smaller
    assert sum(map(len, smaller)) < sum(map(len, larger)) <= 6 * 40


@pytest.mark.parametrize("public", [N - 8, N - 1, N + 1, N + 8])
@pytest.mark.parametrize("scheme", [WithoutReplacement(10), Shuffled(10)], ids=str)
def test_fixed_sizes_are_drawn_for_the_public_count(scheme: Scheme, public: int) -> None:
    batches = Loader(torch.arange(N)).batches(
        scheme, num_records=public, steps=range(40), rng=Rng.fixed(8)
    )
    for step, batch in enumerate(batches):
        positions = scheme.draw(public, step=step, rng=Rng.fixed(8))
        assert batch.tolist() == positions[positions < N].tolist()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


def generator() -> Iterator[Tensor]:
    yield from X


@pytest.mark.parametrize("data", [Stream(), generator(), {1, 2}, torch.tensor(3.0), 7])
def test_a_stream_is_refused(data: Any) -> None:
    with pytest.raises(Refused, match=r"expected data with a length and records by position, got"):
        Loader(data)
    with pytest.raises(Refused, match=r"collect it first, list\(stream\), or load the file as a"):
        Loader(data)


REFUSALS: dict[str, tuple[Any, str]] = {
    "loader": (DataLoader(TensorDataset(X), batch_size=3), r"pass its \.dataset, or state how it"),
    "lengths": ((X, Y[:-1]), r"of tensors or arrays with one length, got shapes \[\(23, 2, 3\)"),
    "text": ([{"text": "words"}] * 4, r"made of tensors, arrays and numbers, got str; .* collate="),
    "none": ([], r"expected at least one record.*, got an empty"),
    "no tensor": ([()] * 4, r"expected a batch of tensors .*, got no tensor for 2 records"),
}


@pytest.mark.parametrize(("data", "text"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_cannot_be_a_batch_is_refused(data: Any, text: str) -> None:
    with pytest.raises(Refused, match=text):
        Loader(data)


@pytest.mark.parametrize("rows", [[[1, 2], [3]], [X[0], X[0, 0]]], ids=["lists", "tensors"])
def test_ragged_records_are_refused(rows: list[Any]) -> None:
    with pytest.raises(Refused, match=r"expected records of one shape and dtype.* pass collate="):
        Loader(rows).load(np.arange(2))


@pytest.mark.parametrize(
    "collate",
    [
        lambda rows: torch.stack(rows, 1),
        lambda rows: (torch.stack(rows), X[0]),  # whose length is that of the first probe
        lambda rows: torch.stack(rows).sum(),
    ],
    ids=["second", "shared", "none"],
)
def test_a_collate_that_puts_records_elsewhere_is_refused(collate: Any) -> None:
    with pytest.raises(
        Refused, match=r"records in their first dimension, got shapes .* for [23] rec"
    ):
        Loader(list(X[:, 0]), collate=collate)


def test_a_batch_of_arrays_is_refused() -> None:
    with pytest.raises(Refused, match=r"expected a batch of tensors, got a ndarray; convert it"):
        Loader(list(X), collate=lambda rows: np.stack([row.numpy() for row in rows]))


def test_workers_are_counted_from_none() -> None:
    with pytest.raises(ValueError, match=r"expected workers >= 0, got -1; 0 loads in this"):
        Loader(X, workers=-1)


def test_the_users_data_is_left_as_it_was() -> None:
    data = {"x": X.clone(), "y": [1, 2]}
    before = copy.deepcopy(data)
    batch = Loader(data["x"]).load(POSITIONS)
    batch.zero_()
    assert torch.equal(data["x"], before["x"])
