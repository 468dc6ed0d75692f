"""Collate functions and data sets that let the records of a batch meet before the model does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, default_collate

import hushgrad as hg
from hushgrad.rng import Rng
from hushgrad.run.evaluation import evaluate
from hushgrad.sampling import FullBatch, Loader, Poisson, Stated, coupling
from hushgrad.types import Refused

N, LONGEST = 40, 12
LENGTHS = [3 + i % 7 for i in range(N)]
WORDS = [torch.arange(1, length + 1) + i for i, length in enumerate(LENGTHS)]
TEXTS = ["word " * length for length in LENGTHS]
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
PAIRS = [(x, i % 3) for i, x in enumerate(X)]


def first_batch(data: Any, collate: Any, workers: int = 0, size: int = 10) -> Any:
    loader = Loader(data, collate=collate, workers=workers)
    return next(iter(loader.load_each([np.arange(size)])))


# --- couplings ----------------------------------------------------------------------------------


def longest(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)


def longest_with_mask(rows: list[Tensor]) -> dict[str, Tensor]:
    padded = longest(rows)
    return {"ids": padded, "mask": padded != 0}


def longest_multiple(rows: list[Tensor]) -> Tensor:
    padded = longest(rows)
    return torch.nn.functional.pad(padded, (0, -padded.shape[1] % 8))


def right_aligned(rows: list[Tensor]) -> Tensor:
    """To a fixed length, but shifted by the longest: the shape tells nothing."""
    most = max(map(len, rows))
    return torch.stack([fixed([torch.cat([r.new_zeros(most - len(r)), r])])[0] for r in rows])


def fixed(rows: list[Tensor]) -> Tensor:
    return torch.stack(
        [torch.nn.functional.pad(r[:LONGEST], (0, LONGEST - len(r[:LONGEST]))) for r in rows]
    )


def lengths_of(texts: list[str]) -> Tensor:
    most = max(map(len, texts))
    return torch.tensor([[ord(c) for c in text.ljust(most)] for text in texts])


def standardised(rows: list[Tensor]) -> Tensor:
    x = torch.stack(rows)
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


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


def dropped(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows[:-1])


OWN = np.random.default_rng(0)
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


# --- what they may do ---------------------------------------------------------------------------


def augmented(rows: list[Tensor]) -> Tensor:
    x = torch.stack(rows)
    return x * torch.rand(len(x), 1) + torch.from_numpy(np.random.rand(len(x), 5))


def shifted(rows: list[Tensor]) -> Tensor:
    shift = torch.tensor([random.random() for _ in rows])
    return torch.stack(rows) + shift[:, None]


def taken_apart(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Takes the labels out of its records, as some of Hugging Face's do."""
    labels = torch.tensor([row.pop("y") for row in rows])
    return {"x": torch.stack([row["x"] for row in rows]), "y": labels}


class Fresh:
    """A data set that makes its records anew each time."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": X[i], "y": i % 3}


ALLOWED: dict[str, tuple[Any, Any]] = {
    "a fixed length": (WORDS, fixed),
    "random": (X, augmented),
    "Python's random": (X, shifted),
    "keys taken out": (Fresh(), taken_apart),
    "default": (PAIRS, default_collate),
    "columns": ((X, torch.arange(N)), default_collate),
    "nan": (torch.full((N, 3), torch.nan), default_collate),
    "half precision": (list(X.half().numpy()), default_collate),
    "infinite": (list(np.full((N, 3), np.inf)), default_collate),
    "own scale": (X, lambda rows: torch.stack([(x - x.mean()) / x.std() for x in rows])),
}


@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize("name", ALLOWED)
def test_a_collate_function_that_treats_each_by_itself_is_taken(name: str, size: int) -> None:
    data, collate = ALLOWED[name]
    loader = Loader(data, collate=collate)
    for batch in loader.load_each([np.arange(size)] * 5):
        assert all(len(x) == size for x in hg.sampling.loading.leaves_of(batch))


def test_trials_leave_the_random_states_as_they_were() -> None:
    loader = Loader(X, collate=augmented)
    torch.manual_seed(3), np.random.seed(3)
    expected = augmented(list(X[:10]))
    torch.manual_seed(3), np.random.seed(3)
    assert torch.equal(loader.load(np.arange(10)), expected)
    python = random.getstate()
    with coupling._same_draws():
        random.random()
    assert random.getstate() == python


def test_a_collate_function_that_writes_to_its_records_is_refused() -> None:
    data = X.clone()

    def collate(rows: list[Tensor]) -> Tensor:
        return torch.stack([row.mul_(0.5) for row in rows])

    with pytest.raises(Refused, match="writes to them"):
        Loader(data, collate=collate).load(np.arange(4))


def test_rows_that_grow_in_the_data_set_are_refused() -> None:
    data = [[1] * length for length in LENGTHS]

    def collate(rows: list[list[int]]) -> Tensor:
        for row in rows:
            row += [0] * (LONGEST - len(row))
        return torch.tensor(rows)

    with pytest.raises(Refused, match="writes to them"):
        Loader(data, collate=collate).load(np.arange(1, 9))


# --- data sets that make several records at once ------------------------------------------------


class Together:
    """A data set that transforms all the records that are asked for at once."""

    def __init__(self, transform: Callable[[Tensor], Any]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([i])[0]

    def __getitems__(self, positions: list[int]) -> list[Any]:
        return list(self.transform([WORDS[i] for i in positions]))


@pytest.mark.parametrize("transform", [longest, right_aligned, lambda rows: longest(rows).float()])
def test_a_data_set_that_transforms_batches_is_refused(transform: Any) -> None:
    with pytest.raises(Refused, match="a data set that makes each record by itself"):
        first_batch(Together(transform), None)


def random_to_the_longest(rows: list[Tensor]) -> Tensor:
    padded = longest(rows).float()
    return padded + torch.rand(padded.shape)


def test_a_random_one_is_compared_by_its_shapes() -> None:
    with pytest.raises(Refused, match="a data set that makes each record by itself"):
        first_batch(Together(random_to_the_longest), None)
    first_batch(Together(lambda rows: fixed(rows) + torch.rand(len(rows), LONGEST)), None)


# --- wherever records come from -----------------------------------------------------------------


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


# --- Hugging Face -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2, "word": 3}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )


def plain(batch: Any) -> dict[str, Tensor]:
    return dict(batch)


@pytest.mark.parametrize("padding", ["longest", "max_length"])
@pytest.mark.parametrize("kind", ["padding", "language model"])
@pytest.mark.filterwarnings("ignore")
def test_hugging_faces_collators(tokenizer: Any, padding: str, kind: str) -> None:
    from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

    fixed_length = padding == "max_length"
    settings: dict[str, Any] = {"padding": padding}
    if fixed_length:
        settings["max_length"] = 16
    texts = [tokenizer(text, **(settings if fixed_length else {})) for text in TEXTS]
    collator = (
        DataCollatorWithPadding(tokenizer, **settings)
        if kind == "padding"
        else DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    )
    records = [dict(text) for text in texts]
    if fixed_length and kind == "padding":
        batch = first_batch(records, lambda rows: plain(collator(rows)))
        assert batch["input_ids"].shape == (10, 16)
    elif not fixed_length:
        with pytest.raises(Refused, match='padding="max_length"'):
            first_batch(records, lambda rows: plain(collator(rows)))
