"""The frugal form: two backward passes, one for the norms and one for the sum.

Each pass has one parameter's factors at a time and lets go of them, so that a step needs little
more memory than an ordinary one. The model runs forward once; between the passes its activations
are kept, and the norms.

Where layers are clipped by themselves, a layer's weights follow from its own norms. It is then
summed in the first pass, and the second is not needed unless other weights are asked for.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from hushgrad.batches import records
from hushgrad.gradients.factors.choice import settle
from hushgrad.gradients.factors.gradients import Gradients, UseKey, require_factors
from hushgrad.gradients.factors.held import Gradient, Known
from hushgrad.gradients.factors.kinds import Use
from hushgrad.gradients.factors.slots import Slots
from hushgrad.gradients.factors.sums import Extent, Summation, rows_within
from hushgrad.gradients.forms.traced import require_losses
from hushgrad.gradients.guards import refuse_kept, refuse_strangers
from hushgrad.gradients.objective import Objective
from hushgrad.gradients.tracing.call_sites import Replaying
from hushgrad.gradients.tracing.rules import RULES
from hushgrad.gradients.tracing.tape import HandOver, Tape
from hushgrad.numerics import Square, exact_products, wide
from hushgrad.types import Batch, EagerWeights, PerSample, Refused

_SMALL_GROUP = 8  # parameters, as a recurrent layer may have


@final
class Recomputed:
    """Per-sample gradients of which only the norms are held; they can be summed once.

    A `PerSample` like any other, but without factors: it cannot be added to others or subtracted.

    Guarantees: the norms are those that `Gradients` would have; the sum is taken from the factors
    that the norms were taken from, with the weights that are asked for up to 2⁻⁴⁰ of them.
    """

    def __init__(self, objective: Objective, batch: Batch, slots: Slots, guide: Replaying) -> None:
        self._objective, self._params = objective, objective.params
        self._slots, self._guide, self._scale = slots, guide, 1.0
        self.form = ""  # the form that they were taken in, where there is one
        self._tape = tape = Tape(objective.params, slots.rows, guide, RULES)
        with torch.enable_grad(), tape.intercept():
            losses = require_losses(objective.loss(batch), slots.rows)
            known = (tape.token, *records.tensors(batch))
            self._others = refuse_strangers(losses, objective.params, known)
        # None once they were summed: the second backward pass frees the graph.
        self._graph: Tensor | None = losses
        self._losses = slots.of_records(losses.detach())
        # Each backward pass ends the guide anew from where the forward pass left it.
        self._position = guide.position
        self._all: dict[str, Square] = {}
        self._known: dict[str, Known] = {}
        self._extents: dict[str, list[Extent]] = {}
        self._foreseen = _worth_it(objective.foreseen)
        self._waiting: dict[str, Gradient] = {}
        self._ahead: dict[str, tuple[Tensor, Tensor]] = {}  # weights, and the sum with them
        self._pass_back(self._measure, again=True)
        while self._waiting:  # for others of their group, which are on no path
            self._sum_ahead(next(iter(self._waiting)), self._foreseen)

    @property
    def losses(self) -> Float[Tensor, " batch"]:
        """Each record's loss, at the parameters that the pass was made with."""
        return self._losses

    @property
    def batch(self) -> int:
        """How many records there are, padding aside."""
        return len(self._losses)

    def held(self) -> list[Tensor]:
        """The tensors of factors that are held: none."""
        return []

    # --- the first pass back: norms, and sums by weights that are foreseen ---

    def _measure(self, name: str, uses: dict[UseKey, Use]) -> None:
        gradient = settle(tuple(uses.values()), tuple(self._params[name].shape))
        self._all[name], self._known[name] = gradient.square, gradient.measured
        self._extents[name] = gradient.extents
        if self._foreseen is not None:
            self._waiting[name] = gradient
            if self._waiting.keys() >= set(self._foreseen.group[name]):
                self._sum_ahead(name, self._foreseen)

    def _sum_ahead(self, name: str, foreseen: EagerWeights | None) -> None:
        """Sum the group of this parameter by the weights that are foreseen for it."""
        assert foreseen is not None
        group = foreseen.group[name]
        squares = self._squares_of(group)
        weights = foreseen.weights({n: square.upper for n, square in squares.items()})
        finite = _all_finite(self._all[n] for n in group if n in self._all)
        spread = self._slots.of_rows(weights)
        with torch.no_grad(), exact_products(weights.device):
            there = {n: self._waiting.pop(n) for n in group if n in self._waiting}
            # The groups' errors are orthogonal: each gets its share of the squared tolerance.
            rows = rows_within(
                {n: self._extents[n] for n in there},
                dict.fromkeys(there, spread),
                within=foreseen.within / math.sqrt(foreseen.groups),
            )
            for n, gradient in there.items():
                how = Summation(None if finite else spread != 0, False, rows[n])
                self._ahead[n] = weights, gradient.weighted_sum(spread, how)

    def _pass_back(self, hand_over: HandOver, *, again: bool) -> None:
        tape, guide, graph = self._tape, self._guide, self._graph
        if graph is None:
            raise Refused(
                "gradients of the form recomputed are summed once, since their graph is gone after "
                "it; take them again, or use form=traced"
            )
        guide.position = self._position
        with torch.enable_grad(), tape.intercept(), tape.hand_uses_to(hand_over):
            if graph.requires_grad:
                graph.backward(torch.ones_like(graph), retain_graph=again)
            guide.finish()
            late = tape.finish(again=again)
        with torch.no_grad(), exact_products(graph.device):
            for name, uses in late.items():
                if uses:
                    hand_over(name, dict(uses))

    # --- norms ---

    @property
    def squares(self) -> dict[str, Square]:
        """Squared norms as estimate and slack."""
        return self._squares_of(self._params)

    def _squares_of(self, names: Iterable[str]) -> dict[str, Square]:
        none = torch.zeros(self._slots.rows, dtype=torch.float64, device=self._losses.device)
        every = dict.fromkeys(names, Square(none, none))
        scale, records = self._scale**2, self._slots.of_records
        return {
            name: self._all.get(name, zero).each(lambda part: scale * records(part))
            for name, zero in every.items()
        }

    def sq_norms(self) -> dict[str, Float[Tensor, " batch"]]:
        """An upper bound on each record's squared norm, for each parameter."""
        return {name: square.upper for name, square in self.squares.items()}

    # --- the sum, by a second pass back where no weights were foreseen ---

    def weighted_sum(
        self, weights: Mapping[str, Float[Tensor, " batch"]], *, within: float = math.inf
    ) -> dict[str, Tensor]:
        """Sum the records' gradients with these weights; once, since it frees the graph.

        Raises:
            Refused: if they were summed before.
        """
        ahead, allowed = self._ahead, within / abs(self._scale) if self._scale else math.inf
        exact = self._foreseen is not None and self._foreseen.within <= allowed
        right = exact and all(n in ahead and _are_close(weights[n], ahead[n][0]) for n in self._all)
        sums = {n: ahead[n][1] for n in self._all} if right else self._sum_again(weights, allowed)
        self._graph, self._ahead = None, {}
        refuse_kept(self._others)
        if self._scale != 1:
            sums = {name: total * self._scale for name, total in sums.items()}
        return {
            name: sums[name] if name in sums else wide(torch.zeros_like(p))
            for name, p in self._params.items()
        }

    def _sum_again(
        self, weights: Mapping[str, Float[Tensor, " batch"]], within: float
    ) -> dict[str, Tensor]:
        """The sums by a second pass."""
        sums: dict[str, Tensor] = {}
        spread = {id(w): self._slots.of_rows(w) for w in weights.values()}
        finite = _all_finite(self._all.values())
        own = {name: spread[id(weights[name])] for name in self._extents}
        rows = rows_within(self._extents, own, within=within)

        def add(name: str, uses: dict[UseKey, Use]) -> None:
            shape = tuple(self._params[name].shape)
            gradient = settle(tuple(uses.values()), shape, known=self._known[name])
            how = Summation(None if finite else own[name] != 0, False, rows[name])
            sums[name] = gradient.weighted_sum(own[name], how)

        with self._objective.guard_pass():
            self._pass_back(add, again=False)
        return sums

    def __rmul__(self, factor: float) -> Recomputed:
        scaled = copy.copy(self)
        scaled._scale, scaled._losses = factor * self._scale, factor * self._losses
        return scaled

    def __add__(self, other: PerSample) -> Gradients:
        """Refuse: there are no factors to put beside another's."""
        return require_factors(self) + other


def _worth_it(foreseen: EagerWeights | None) -> EagerWeights | None:
    """Sums ahead of time, if no group would be held for long before it is complete."""
    small = foreseen is not None and max(map(len, foreseen.group.values())) <= _SMALL_GROUP
    return foreseen if small else None


def _are_close(one: Tensor, other: Tensor) -> bool:
    # A rule clamps all groups together, which may round where one group alone does not.
    return torch.allclose(one, other, rtol=2.0**-40, atol=0.0)


def _all_finite(squares: Iterable[Square]) -> bool:
    """Is every record's gradient finite? Padding counts too: a copy has draws of its own."""
    ends = [part for square in squares for part in square]
    return not ends or math.isfinite(torch.stack(ends).sum())
