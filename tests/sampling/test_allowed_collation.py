"""Collate functions that treat each record by itself are taken, and trials leave no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from collated import LENGTHS, LONGEST, PAIRS, TEXTS, WORDS, N, X, augmented, first_batch, fixed
from torch import Tensor
from torch.utils.data import default_collate

import hushgrad as hg
from hushgrad.sampling import Loader, coupling
from hushgrad.types import Refused


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
