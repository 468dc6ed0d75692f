"""Rules x groupings x forms x micro-batches: the clipped sum against plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad import Execution, clipped_sum
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.clipping.groups import Grouping, blocks, per_layer, per_parameter, whole
from hushgrad.clipping.rules import (
    Clip,
    abadi,
    automatic,
    custom,
    discard,
    normalize,
    reparameterized,
)
from hushgrad.gradients import Form, dense, loop, traced

RECORDS, LENGTH, WORDS, WIDTH = 10, 6, 12, 8


class Model(nn.Module):
    """Tied weights, a layer used twice, a grouped convolution and bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(0.3 * torch.randn(LENGTH, WIDTH))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens) + self.positions
        h = torch.tanh(self.conv(h.mT).mT)
        h = torch.tanh(self.again(h))
        h = self.again(h) * self.scale
        return h @ self.words.weight.T


@cache
def objective() -> tuple[Model, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Model(), torch.randint(WORDS, (RECORDS, LENGTH + 1))


def loss(tokens: Tensor) -> Tensor:
    logits = objective()[0](tokens[:, :-1]).mT
    # The records' gradients differ in size by a factor of twenty.
    size = torch.linspace(0.1, 2.0, WORDS)[tokens[:, 0]]
    return size * F.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)


# --- the oracle: one record at a time, clipped by formula in float64 ---


@cache
def gradients() -> list[dict[str, Tensor]]:
    model, batch = objective()
    params = dict(model.named_parameters())
    found = []
    for i in range(RECORDS):
        each = torch.autograd.grad(loss(batch[i : i + 1])[0], list(params.values()))
        found.append({name: g.double() for name, g in zip(params, each, strict=True)})
    return found


Formula = Callable[[float, float, int], float]
"""(norm, the group's clipping norm, number of groups) to the group's weight."""

RULES: dict[str, tuple[Clip, float, Formula]] = {
    "abadi": (abadi(0.5), 0.5, lambda n, r, k: min(1.0, r / n)),
    "automatic": (automatic(0.01, 2.0), 2.0, lambda n, r, k: r / (n + 0.01)),
    "normalize": (normalize(0.1), 0.1, lambda n, r, k: r / n),
    "discard": (discard(0.9), 0.9, lambda n, r, k: float(n < r)),
    "reparameterized": (
        reparameterized(0.5),
        0.5,
        lambda n, r, k: min(1 / (r * math.sqrt(k)), 1 / (n * math.sqrt(k))),
    ),
    "custom": (
        custom(lambda n: -1 / (1 + n) / len(n), bound=1.0),
        1.0,
        lambda n, r, k: -1 / (1 + n) / k,
    ),
}

GROUPINGS: dict[str, tuple[Grouping, Callable[[str], str]]] = {
    "whole": (whole, lambda name: "all"),
    "per_layer": (per_layer, lambda name: name.rsplit(".", 1)[0]),
    "per_parameter": (per_parameter, lambda name: name),
    "blocks": (
        blocks({"words": "words.*", "rest": "*"}),
        lambda name: "words" if name.startswith("words.") else "rest",
    ),
}


@cache
def expected(rule: str, grouping: str) -> dict[str, Tensor]:
    _, radius, formula = RULES[rule]
    label = GROUPINGS[grouping][1]
    groups = {label(name) for name in gradients()[0]}
    share = radius / math.sqrt(len(groups))
    total = {name: torch.zeros_like(g) for name, g in gradients()[0].items()}
    for record in gradients():
        for group in groups:
            members = [name for name in record if label(name) == group]
            norm = math.sqrt(sum(float(record[name].square().sum()) for name in members))
            for name in members:
                total[name] += formula(norm, share, len(groups)) * record[name]
    return total


@pytest.mark.parametrize("micro_batch", [None, 3, 8])
@pytest.mark.parametrize("form", [traced, dense, loop], ids=str)
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("rule", RULES)
def test_the_clipped_sum_is_that_of_the_formula(
    rule: str, grouping: str, form: Form, micro_batch: int | None
) -> None:
    model, batch = objective()
    clip = RULES[rule][0]
    bounded = clipped_sum(
        loss,
        dict(model.named_parameters()),
        batch,
        clip=clip,
        groups=GROUPINGS[grouping][0],
        modules=(model,),
        execution=Execution(form, micro_batch),
    )
    want = expected(rule, grouping)
    assert bounded.sum.keys() == want.keys()
    largest = max(float(x.norm()) for x in want.values())
    for name, exact in want.items():
        off = float((bounded.sum[name].double() - exact).norm())
        assert off <= 1e-4 * max(float(exact.norm()), 0.01 * largest), name
    groups = len({GROUPINGS[grouping][1](name) for name in want})
    assert bounded.l2 == pytest.approx(clip.bound(groups) * (1 + SUM_SLACK), rel=1e-12)


def test_the_rules_are_told_apart() -> None:
    """The batch has records on both sides of each threshold, so that no two rules agree."""
    norms = [math.sqrt(sum(float(g.square().sum()) for g in r.values())) for r in gradients()]
    assert min(norms) < 0.5 < 0.9 < max(norms)
    assert all(abs(n / 0.9 - 1) > 0.01 for n in norms)  # no record so near that slack decides
