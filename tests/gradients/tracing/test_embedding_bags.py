"""Bags of embeddings: rows that are looked up and reduced in one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import check
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from uses import loss_of, weigh

from hushgrad.gradients import auto, loop, per_sample, traced
from hushgrad.types import Refused

MODES = ("sum", "mean", "max")


@given(
    mode=st.sampled_from(MODES),
    entries=st.integers(1, 5),
    rows=st.integers(1, 6),
    width=st.integers(1, 4),
    padded=st.one_of(st.none(), st.integers(-6, 5)),
    offsets=st.sampled_from(["none", "starts", "starts and end"]),
    batch=st.sampled_from([1, 2, 3, 8, 9]),
    seed=st.integers(0, 1000),
)
def test_bags_are_exact(
    mode: str,
    entries: int,
    rows: int,
    width: int,
    padded: int | None,
    offsets: str,
    batch: int,
    seed: int,
) -> None:
    """Few rows, so that indices repeat and whole bags are padding."""
    assume(padded is None or -rows <= padded < rows)
    torch.manual_seed(seed)
    last = offsets == "starts and end"
    bag = nn.EmbeddingBag(rows, width, mode=mode, padding_idx=padded, include_last_offset=last)
    nn.init.normal_(bag.weight)

    def loss(index: Tensor) -> Tensor:
        if offsets == "none":
            return weigh(bag(index))
        return weigh(bag(index.flatten(), torch.arange(len(index) + last) * entries))

    check(loss, bag, torch.randint(rows, (batch, entries)))


@pytest.mark.parametrize("mode", MODES)
def test_a_large_table_stays_factored(mode: str) -> None:
    bag = nn.EmbeddingBag(200, 6, mode=mode)
    gradients = check(loss_of(bag), bag, torch.randint(200, (5, 3)))
    assert gradients.held_gradients["weight"].form == "Gram"


class Weighted(nn.Module):
    """A sum whose weights depend on parameters, or are one."""

    def __init__(self, *, learned: bool, padding_idx: int | None = None) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 3, mode="sum", padding_idx=padding_idx)
        self.scores = nn.Embedding(6, 1)
        self.places = nn.Parameter(torch.randn(4))
        self.learned = learned

    def forward(self, index: Tensor) -> Tensor:
        scores = self.scores(index)[..., 0].tanh()
        weights = self.places.expand_as(scores) if self.learned else scores
        return self.bag(index, per_sample_weights=weights) + scores.sum(1, keepdim=True)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_of_entries_are_exact(learned: bool, padding_idx: int | None, frozen: bool) -> None:
    model = Weighted(learned=learned, padding_idx=padding_idx)
    model.places.requires_grad_(learned)
    model.bag.weight.requires_grad_(not frozen)
    check(loss_of(model), model, torch.randint(6, (5, 4)))


USES: dict[str, Callable[[nn.EmbeddingBag, Tensor], Tensor]] = {
    "several bags to a record": lambda bag, i: bag(i.view(-1, 2)).view(len(i), -1),
    "bags before the records": lambda bag, i: (
        bag(i.view(len(i), 2, 2).movedim(1, 0).flatten(0, 1)).view(2, len(i), -1).movedim(0, 1)
    ),
    "tied": lambda bag, i: F.linear(bag(i), bag.weight),
    "twice": lambda bag, i: bag(i) * bag(i.flip(0).flip(0)[:, :2]),
    "some rows of the table": lambda bag, i: F.embedding_bag(i % 4, bag.weight[2:], mode="sum"),
    "a scaled table": lambda bag, i: F.embedding_bag(i, 2 * bag.weight, mode="max"),
    "beside a bag of its own": lambda bag, i: bag(i) * bag(torch.tensor([[0, 1, 1]])),
}


@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("mode", MODES)
def test_every_use_of_bags_is_exact(kind: str, mode: str) -> None:
    bag = nn.EmbeddingBag(6, 3, mode=mode)
    check(lambda i: weigh(USES[kind](bag, i)), bag, torch.randint(6, (5, 4)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bags_of_every_type_are_exact(dtype: torch.dtype) -> None:
    bag = nn.EmbeddingBag(6, 3, mode="sum", dtype=dtype)
    check(loss_of(bag), bag, torch.randint(6, (5, 4)))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("form", [traced, loop])
def test_sparse_tables_are_exact(kind: type[nn.Module], form: Any) -> None:
    """A table that asks autograd for sparse gradients has the same ones."""
    torch.manual_seed(0)
    tables = [kind(6, 3, sparse=sparse) for sparse in (False, True)]
    tables[1].load_state_dict(tables[0].state_dict())
    index, ones = torch.randint(6, (5, 4)), {"weight": torch.ones(5)}
    want, found = (
        per_sample(loss_of(m), dict(m.named_parameters()), index, form=form).weighted_sum(ones)
        for m in tables
    )
    torch.testing.assert_close(found, want)


# --- bags of different lengths ------------------------------------------------------------------


def ragged(bag: nn.EmbeddingBag) -> Callable[[Any], Tensor]:
    """A loss of records that hold up to four indices and how many of them count."""

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        index, lengths = batch
        flat = index[torch.arange(4) < lengths[:, None]]
        ends = lengths.cumsum(0)
        starts = ends - lengths
        return weigh(
            bag(flat, torch.cat([starts, ends[-1:]]) if bag.include_last_offset else starts)
        )

    return loss


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_bags_of_different_lengths_are_exact(mode: str, last: bool) -> None:
    """No shape tells whose an index is, so each record is taken by itself."""
    bag = nn.EmbeddingBag(6, 3, mode=mode, include_last_offset=last)
    batch = (torch.randint(6, (5, 4)), torch.tensor([1, 4, 2, 3, 4]))
    assert check(ragged(bag), bag, batch, form=auto).form == "loop"
    with pytest.raises(Refused, match="bags of different lengths; pass them as the rows"):
        per_sample(ragged(bag), dict(bag.named_parameters()), batch, form=traced)


def test_a_later_batch_of_different_lengths_is_exact() -> None:
    """As many indices as before, in bags of other lengths: the certificate is of no use for it."""
    bag = nn.EmbeddingBag(6, 3, mode="sum")
    loss = ragged(bag)
    index = torch.randint(6, (8, 4))
    even, uneven = torch.full((8,), 2), torch.tensor([1, 3, 2, 2, 3, 1, 4, 0])
    forms = [
        check(loss, bag, (index, lengths), form=auto).form
        for lengths in (even, uneven, even, uneven.roll(1))
    ]
    assert forms[1] == forms[3] == "loop"
