"""Groups of parameters that are clipped together: a partition of the parameters' names."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """A partition of parameter names into groups.

    Args:
        names: the groups' names.
        of: the index of each parameter's group.
    """

    names: tuple[str, ...]
    of: Mapping[str, int]

    @property
    def members(self) -> dict[str, tuple[str, ...]]:
        """For each parameter, the names of all parameters in its group, itself included."""
        members: dict[int, tuple[str, ...]] = {}
        for name, group in self.of.items():
            members[group] = (*members.get(group, ()), name)
        return {name: members[group] for name, group in self.of.items()}

    def norms(
        self, sq_norms: Mapping[str, Float[Tensor, " batch"]]
    ) -> Float[Tensor, "batch group"]:
        """Return each record's norm in each group, given its squared norms in each parameter."""
        members: list[list[Tensor]] = [[] for _ in self.names]
        for name, square in sq_norms.items():
            members[self.of[name]].append(square)
        # `cumsum` adds one by one. `sum` changes its order, and so its rounding, with the batch.
        squares = [torch.stack(group).cumsum(0)[-1] for group in members]
        return (torch.stack(squares, 1) if len(squares) > 1 else squares[0].unsqueeze(1)).sqrt()

    def spread(self, weights: Float[Tensor, "batch group"]) -> dict[str, Float[Tensor, " batch"]]:
        """Return, for every parameter, the weights of its group."""
        columns = weights.unbind(1)
        return {name: columns[group] for name, group in self.of.items()}


Grouping = Callable[[Sequence[str]], Groups]
"""A choice of groups: a function of the parameters' names alone."""


def whole(names: Sequence[str]) -> Groups:
    """Put all parameters in one group ("flat" clipping), the default.

    Args:
        names: the parameters' names.

    Example:
        >>> whole(["fc.weight", "fc.bias"]).names
        ('all',)
    """
    return Groups(("all",), dict.fromkeys(names, 0))


def per_parameter(names: Sequence[str]) -> Groups:
    """Put each parameter in a group of its own.

    Args:
        names: the parameters' names.

    Example:
        >>> per_parameter(["fc.weight", "fc.bias"]).names
        ('fc.weight', 'fc.bias')
    """
    return Groups(tuple(names), {name: i for i, name in enumerate(names)})


def per_layer(names: Sequence[str]) -> Groups:
    """Put the parameters of each module (`layer.weight`, `layer.bias`) in one group.

    Per-layer clipping needs less memory: each layer's gradients are clipped and summed during the
    backward pass.

    Args:
        names: the parameters' names.

    Example:
        >>> per_layer(["conv.weight", "conv.bias", "fc.weight"]).names
        ('conv', 'fc')

    Reference: He et al. 2023, Exploring the Limits of DP Learning with Group-wise Clipping.
    """
    layers = {name: name.rpartition(".")[0] or name for name in names}
    return _partition(layers, tuple(dict.fromkeys(layers.values())))


def blocks(patterns: Mapping[str, str | Sequence[str]]) -> Grouping:
    """Return a grouping by shell patterns; a parameter goes to the first group that matches.

    Args:
        patterns: for each group's name, one pattern or several.

    Raises:
        ValueError: (from the grouping) for a parameter without a pattern, or the reverse.

    Example:
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

        found = {name: label_of(name) for name in names}
        idle = [label for label in globs if label not in found.values()]
        if idle:
            raise ValueError(
                f"expected a parameter for every pattern, got none for {', '.join(idle)} "
                f"({', '.join(globs[idle[0]])}); see dict(model.named_parameters()) for the names"
            )
        return _partition(found, tuple(globs))

    return group


def _partition(label_of: Mapping[str, str], labels: tuple[str, ...]) -> Groups:
    return Groups(labels, {name: labels.index(label) for name, label in label_of.items()})
