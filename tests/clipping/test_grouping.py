"""A grouping is a partition, and its norms are those of the groups."""

from __future__ import annotations

import pytest
import torch

from hushgrad.clipping.groups import Grouping, blocks, per_layer, per_parameter, whole

NAMES = ("conv.weight", "conv.bias", "scale", "block.0.fc.weight", "block.0.fc.bias", "head.weight")

GROUPINGS: dict[str, tuple[Grouping, dict[str, set[int]]]] = {
    "whole": (whole, {"all": {0, 1, 2, 3, 4, 5}}),
    "per_parameter": (per_parameter, {name: {i} for i, name in enumerate(NAMES)}),
    "per_layer": (
        per_layer,
        {"conv": {0, 1}, "scale": {2}, "block.0.fc": {3, 4}, "head": {5}},
    ),
    "blocks": (
        blocks({"first": ["conv.*", "scale"], "rest": "*"}),
        {"first": {0, 1, 2}, "rest": {3, 4, 5}},
    ),
    "blocks by suffix": (
        blocks({"biases": "*.bias", "others": ["*"]}),
        {"biases": {1, 4}, "others": {0, 2, 3, 5}},
    ),
}
grouping = pytest.mark.parametrize(("groups", "members"), GROUPINGS.values(), ids=GROUPINGS)


@grouping
def test_names_are_partitioned(groups: Grouping, members: dict[str, set[int]]) -> None:
    found = groups(NAMES)
    assert set(found.of) == set(NAMES)
    by_label = {
        label: {i for i, name in enumerate(NAMES) if found.of[name] == at}
        for at, label in enumerate(found.names)
    }
    assert by_label == members


@grouping
def test_norms_are_those_of_the_groups(groups: Grouping, members: dict[str, set[int]]) -> None:
    found = groups(NAMES)
    squares = torch.rand(len(NAMES), 7, dtype=torch.float64)
    norms = found.norms(dict(zip(NAMES, squares, strict=True)))
    assert norms.shape == (7, len(members))
    for at, label in enumerate(found.names):
        expected = squares[sorted(members[label])].sum(0).sqrt()
        torch.testing.assert_close(norms[:, at], expected)


@grouping
def test_weights_are_spread_to_the_members(groups: Grouping, members: dict[str, set[int]]) -> None:
    found = groups(NAMES)
    weights = torch.rand(7, len(members), dtype=torch.float64)
    spread = found.spread(weights)
    assert set(spread) == set(NAMES)
    for name in NAMES:
        assert torch.equal(spread[name], weights[:, found.of[name]])


@pytest.mark.parametrize("parameters", [3, 20, 150])
def test_a_records_norm_is_bit_identical_beside_other_records(parameters: int) -> None:
    names = [f"p{i}" for i in range(parameters)]
    squares = torch.rand(parameters, 40, dtype=torch.float64)
    together = whole(names).norms(dict(zip(names, squares, strict=True)))
    for size in range(1, 40):
        first, last = squares[:, :size], squares[:, -size:]
        assert torch.equal(
            whole(names).norms(dict(zip(names, first, strict=True))), together[:size]
        )
        assert torch.equal(
            whole(names).norms(dict(zip(names, last, strict=True))), together[-size:]
        )


def test_blocks_keep_the_order_in_which_they_are_named() -> None:
    """A vector of clipping norms is written in the order of the patterns."""
    found = blocks({"head": "head.*", "trunk": "*"})(NAMES)
    assert found.names == ("head", "trunk")
    assert found.of["head.weight"] == 0


def test_a_pattern_takes_the_first_match() -> None:
    found = blocks({"all convolutions": "conv*", "weights": "*.weight", "rest": "*"})(NAMES)
    assert found.names[found.of["conv.weight"]] == "all convolutions"


def test_a_name_without_a_pattern_is_named() -> None:
    message = r"none for scale among \['conv', 'head'\]; add a group with the pattern '\*'"
    with pytest.raises(ValueError, match=message):
        blocks({"conv": "conv.*", "head": "head.*"})(NAMES)


def test_a_pattern_without_a_name_is_named() -> None:
    """Else a vector of clipping norms silently shifts to other groups, or no longer fits."""
    with pytest.raises(ValueError, match="typo"):
        blocks({"typo": "cnov.*", "rest": "*"})(NAMES)
