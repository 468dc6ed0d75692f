"""Groups of parameters that are clipped together: names in, a partition out."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """A partition of parameter names: the groups' names, and each parameter's group."""

    names: tuple[str, ...]
    of: Mapping[str, int]

    def norms(
        self, sq_norms: Mapping[str, Float[Tensor, " batch"]]
    ) -> Float[Tensor, "batch group"]:
        """Each record's norm in each group, from its squared norms in each parameter."""
        members: list[list[Tensor]] = [[] for _ in self.names]
        for name, square in sq_norms.items():
            members[self.of[name]].append(square)
        return torch.stack([torch.stack(group).sum(0) for group in members], 1).sqrt()

    def spread(self, weights: Float[Tensor, "batch group"]) -> dict[str, Float[Tensor, " batch"]]:
        """Give every parameter its group's weights."""
        return {name: weights[:, group] for name, group in self.of.items()}


Grouping = Callable[[Sequence[str]], Groups]
"""A choice of groups: a function of the parameters' names alone."""


def whole(names: Sequence[str]) -> Groups:
    """All parameters in one group ("flat" clipping)."""
    return Groups(("all",), dict.fromkeys(names, 0))


def per_parameter(names: Sequence[str]) -> Groups:
    """Each parameter by itself."""
    return Groups(tuple(names), {name: i for i, name in enumerate(names)})


def per_layer(names: Sequence[str]) -> Groups:
    """The parameters of one module (`layer.weight`, `layer.bias`) together.

    >>> per_layer(["conv.weight", "conv.bias", "fc.weight"]).names
    ('conv', 'fc')
    """
    return _by_label(names, [name.rpartition(".")[0] or name for name in names])


def blocks(patterns: Mapping[str, str | Sequence[str]]) -> Grouping:
    """Groups by shell patterns, the first that matches; every parameter must match one.

    >>> blocks({"trunk": "conv*", "head": ["fc.*"]})(["conv.weight", "fc.bias"]).names
    ('trunk', 'head')
    """
    globs = {label: [p] if isinstance(p, str) else list(p) for label, p in patterns.items()}

    def group(names: Sequence[str]) -> Groups:
        def label_of(name: str) -> str:
            for label, options in globs.items():
                if any(fnmatch.fnmatchcase(name, option) for option in options):
                    return label
            raise ValueError(
                f"expected a pattern for every parameter, got none for {name} among "
                f"{sorted(globs)}; add a group with the pattern '*' at the end"
            )

        return _by_label(names, [label_of(name) for name in names])

    return group


def _by_label(names: Sequence[str], labels: Sequence[str]) -> Groups:
    order = tuple(dict.fromkeys(labels))
    index = {label: i for i, label in enumerate(order)}
    return Groups(order, {name: index[label] for name, label in zip(names, labels, strict=True)})
